from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace_bench.load.schedule import Planned
from headrace_bench.pairing import alike, plan, salted
from made_runs import schedule


@pytest.mark.parametrize("seed", range(20))
def test_half_of_the_pairs_begin_with_each_side_in_an_order_of_chance(seed: int) -> None:
    turns = plan(12, np.random.default_rng(seed))
    assert [turn.pair for turn in turns] == list(range(12))
    assert sum(turn.order == ("a", "b") for turn in turns) == 6
    assert len({turn.seed for turn in turns}) == 12
    assert turns == plan(12, np.random.default_rng(seed))


def test_orders_differ_between_seeds() -> None:
    orders = {tuple(turn.order for turn in plan(8, np.random.default_rng(seed))) for seed in range(30)}
    assert len(orders) > 15


def test_the_odd_one_goes_either_way() -> None:
    starts = {plan(1, np.random.default_rng(seed))[0].order for seed in range(30)}
    assert starts == {("a", "b"), ("b", "a")}


def test_pairs_that_replace_others_have_numbers_and_seeds_of_their_own() -> None:
    rng = np.random.default_rng(3)
    before, after = plan(4, rng), plan(2, rng, first=4)
    assert [turn.pair for turn in after] == [4, 5]
    assert not {turn.seed for turn in before} & {turn.seed for turn in after}
    assert plan(0, rng) == ()


def test_a_salt_opens_each_conversation_and_changes_nothing_else() -> None:
    plain = schedule(n=3)
    later = Planned(
        index=3,
        at=None,
        messages=({"role": "user", "content": "and?"},),
        max_tokens=4,
        prompt_tokens=1,
        session=0,
        turn=1,
    )
    system = Planned(
        index=4,
        at=9.0,
        messages=({"role": "system", "content": "rules"}, {"role": "user", "content": "hi"}),
        max_tokens=4,
        prompt_tokens=2,
    )
    plain = msgspec.structs.replace(plain, requests=(*plain.requests, later, system))
    once, twice = salted(plain, 42), salted(plain, 7)
    assert [one.messages[0]["content"] for one in once.requests] == [
        "000042 1 0",
        "000042 1 1",
        "000042 1 2",
        "and?",
        "000042 rules",
    ]
    assert once.requests[4].messages[1] == {"role": "user", "content": "hi"}
    assert once.requests[0].messages != twice.requests[0].messages
    assert [one.at for one in once.requests] == [one.at for one in plain.requests]
    assert plain.requests[0].messages[0]["content"] == "1 0"


def test_schedules_are_alike_when_they_ask_the_same() -> None:
    assert alike(schedule(1), msgspec.structs.replace(schedule(1), notes=("clipped",)))
    assert not alike(schedule(1), schedule(2))
    assert not alike(schedule(1, n=10), schedule(1, n=11))
