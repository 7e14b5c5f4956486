from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.core.costmodel import CostModel, Work, positions
from headrace.core.drafter import Drafter
from headrace.core.plan import Share
from headrace.core.request import Generation
from headrace.core.sequence import Sequence as Choice
from headrace.core.sequence import sequences
from headrace.core.speculation import Outcome, Proposer, Speculation

FREE = CostModel((10e-3, 0.0, 0.0, 1e-3, 0.0, 0.0, 0.0))
"""A guess costs nothing: as many are made as may be."""
DEAR = CostModel((10e-3, 10e-3, 0.0, 1e-3, 0.0, 0.0, 0.0))
"""A guess costs as much as a step."""


class Sure:
    """Guesses without end, and well founded ones."""

    support: int | None = 41

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def review(self) -> Sequence[Outcome]:
        return ()

    def ready(self, allowed: float) -> bool:
        return True

    def cost(self, k: int) -> float:
        return 0.0

    def propose(self, k: int) -> tuple[int, ...]:
        return tuple(self.tokens[-1] + 1 + i for i in range(k))


class Clueless(Sure):
    support = None


def decoding(rid: int, *, prompt: int = 5, drawn: int = 2, max_tokens: int = 100) -> Choice:
    """It has drawn some tokens, the last of which is to be computed."""
    (s,) = sequences(Generation(rid, list(range(prompt)), max_tokens), 0.0, lambda token: b"")
    s.tokens.extend(range(100, 100 + drawn))
    s.computed = len(s.tokens) - 1
    return s


def shares(*choices: Choice) -> list[Share]:
    return [Share(s, 1) for s in choices]


def work(step: Sequence[Share]) -> Work:
    return Work(0, len(step), sum(share.sequence.computed for share in step), len(step))


def drafter(
    *, most: int = 63, itl: float = 1.0, by: type[Sure] = Sure, speculation: Speculation | None = None
) -> Drafter:
    def proposer(tokens: Sequence[int]) -> Proposer:
        return by(tokens)

    return Drafter(speculation or Speculation(proposer), most=most, itl=itl)


def test_guesses_follow_on_the_sequence_and_count_as_its_tokens() -> None:
    step = shares(decoding(1))
    drafter().add(step, work(step), FREE, 1000)
    (share,) = step
    assert len(share.guesses) > 7
    assert share.guesses == tuple(range(102, 102 + len(share.guesses)))
    assert share.count == 1 + len(share.guesses)


def test_the_work_is_that_of_all_rows() -> None:
    step = shares(decoding(1), decoding(2, prompt=9))
    before = work(step)
    after = drafter(most=10).add(step, before, FREE, 1000)
    extra = [(share.sequence.computed + 1, len(share.guesses)) for share in step]
    assert sum(n for _, n in extra) == 10
    back = sum(positions(start, n) for start, n in extra)
    assert after == Work(10, 2, before.positions + back, before.width + 10)


def test_nobody_guesses_more_than_the_engine_takes_or_the_cells_hold() -> None:
    for most, room in ((7, 1000), (63, 7)):
        step = shares(decoding(1), decoding(2), decoding(3))
        drafter(most=most).add(step, work(step), FREE, room)
        assert sum(len(share.guesses) for share in step) == 7
        assert len(step[0].guesses) == 7, "who comes first is served first"
    step = shares(decoding(1))
    assert drafter().add(step, work(step), FREE, 0) == work(step)
    assert step == shares(step[0].sequence)


@pytest.mark.parametrize(("drawn", "guesses"), [(2, 7), (8, 1), (9, 0)])
def test_no_guess_goes_past_the_end_of_the_answer(drawn: int, guesses: int) -> None:
    """The step draws one token more than it guesses right."""
    step = shares(decoding(1, drawn=drawn, max_tokens=10))
    drafter().add(step, work(step), FREE, 1000)
    assert len(step[0].guesses) == guesses


def test_a_step_with_guesses_keeps_to_the_target_for_gaps() -> None:
    cost = CostModel((10e-3, 1e-3, 0.0, 1e-3, 0.0, 0.0, 0.0))
    for itl in (12e-3, 14e-3, 20e-3, 40e-3):
        step = shares(decoding(1), decoding(2))
        after = drafter(itl=itl).add(step, work(step), cost, 1000)
        assert cost.predict(after) <= itl
        assert (itl > 12e-3) == any(share.guesses for share in step)


def test_a_step_that_is_too_long_already_guesses_nothing() -> None:
    step = shares(decoding(1))
    slow = CostModel((50e-3, 1e-6, 0.0, 1e-3, 0.0, 0.0, 0.0))
    assert drafter(itl=20e-3).add(step, work(step), slow, 1000) == work(step)
    assert not step[0].guesses


def test_without_anything_to_go_by_the_step_stays_as_it_is() -> None:
    step = shares(decoding(1), decoding(2))
    before = list(step)
    planned = work(step)
    assert drafter(by=Clueless).add(step, planned, FREE, 1000) is planned
    assert step == before


def test_guesses_that_cost_a_step_each_are_not_made() -> None:
    step = shares(decoding(1))
    assert drafter().add(step, work(step), DEAR, 1000) == work(step)


def test_a_sequence_keeps_what_it_learned() -> None:
    speculation = Speculation(Sure)
    choice = decoding(1)
    draft = drafter(speculation=speculation)
    draft.add(shares(choice), work(shares(choice)), FREE, 1000)
    first = choice.speculator
    assert first is not None
    first.observe(10, 0)
    step = shares(choice)
    draft.add(step, work(step), FREE, 1000)
    assert choice.speculator is first
    assert (speculation.proposed, speculation.accepted) == (10, 0)


def test_planning_twice_guesses_the_same() -> None:
    choice = decoding(1)
    draft = drafter()
    first, second = shares(choice), shares(choice)
    assert draft.add(first, work(first), FREE, 1000) == draft.add(second, work(second), FREE, 1000)
    assert first == second
