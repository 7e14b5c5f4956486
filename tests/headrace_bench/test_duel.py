from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from headrace_bench.client.run import Run
from headrace_bench.client.target import Target
from headrace_bench.duel import Cut, Side, duel
from headrace_bench.fault import Fault, Misuse
from headrace_bench.figures.trial import Trial
from headrace_bench.load.schedule import Schedule
from headrace_bench.pairing import alike
from made_runs import A, B, Servers, schedule

SLOW, FAST = Side("slow", A), Side("fast", B)


def servers() -> Servers:
    return Servers({A.url: 0.2, B.url: 0.1})


def fine(target: Target) -> None:
    pass


def test_the_floor_comes_first_then_pairs_that_share_a_schedule() -> None:
    them = servers()
    made = duel(SLOW, FAST, schedule, pairs=6, seed=3, run=them.run, check=fine)
    assert (len(made.floor), len(made.pairs), made.dropped) == (6, 6, [])
    assert [target.url for target, _ in them.asked[:12]] == [A.url] * 12
    real = them.asked[12:]
    for (one, first), (other, second) in zip(real[::2], real[1::2], strict=True):
        assert {one.url, other.url} == {A.url, B.url}
        assert alike(first, second)
    assert len({asked.seed for _, asked in real}) == 6
    assert {one.url for one, _ in real[::2]} == {A.url, B.url}, "neither side is always first"
    for slow, fast in made.pairs:
        assert (slow.side, fast.side) == ("slow", "fast")
        assert slow.figures["ttft_p50"] is not None
        assert fast.figures["ttft_p50"] is not None
        assert slow.figures["ttft_p50"] > fast.figures["ttft_p50"]


def test_one_server_never_answers_the_same_prompts_twice() -> None:
    them = servers()
    duel(SLOW, replace(FAST, target=A), schedule, pairs=2, seed=3, run=them.run, check=fine)
    prompts = [one.messages[0]["content"] for _, asked in them.asked for one in asked.requests]
    assert len(prompts) == len(set(prompts))


def test_a_floor_that_is_known_is_not_measured_again() -> None:
    them = servers()
    earlier = duel(SLOW, FAST, schedule, pairs=2, seed=3, run=them.run, check=fine).floor
    them.asked.clear()
    made = duel(SLOW, FAST, schedule, pairs=2, floor=earlier, seed=4, run=them.run, check=fine)
    assert made.floor == earlier
    assert len(them.asked) == 4


def test_an_invalid_run_drops_its_pair_for_both_and_is_replaced_once() -> None:
    them = servers()
    them.invalid = lambda n, target: ("late",) if n in (1, 4) else ()
    told: list[Trial] = []
    made = duel(
        SLOW,
        FAST,
        schedule,
        pairs=4,
        floor_pairs=0,
        run=them.run,
        check=fine,
        on_run=lambda trial, _: told.append(trial),
    )
    assert [(one.pair, one.reasons) for one in made.dropped] == [(0, ("late",)), (2, ("late",))]
    assert [one.place.pair for one, _ in made.pairs] == [1, 3, 4, 5]
    assert len(told) == len(them.asked) == 12


def test_pairs_that_replace_others_are_not_replaced() -> None:
    them = servers()
    them.invalid = lambda n, target: ("late",)
    made = duel(SLOW, FAST, schedule, pairs=2, floor_pairs=0, run=them.run, check=fine)
    assert (made.pairs, len(made.dropped), len(them.asked)) == ([], 4, 8)


def test_the_other_server_has_to_be_idle() -> None:
    used = iter(range(100))
    busy = replace(FAST, cpu=lambda: float(next(used)))
    calm = replace(SLOW, cpu=lambda: 1.0)
    made = duel(calm, busy, schedule, pairs=1, floor_pairs=0, run=servers().run, check=fine, calm=lambda: None)
    assert made.pairs == []
    assert "fast was to be idle and used" in made.dropped[0].reasons[0]
    assert made.notes == []
    unseen = duel(SLOW, FAST, schedule, pairs=1, floor_pairs=0, run=servers().run, check=fine)
    assert len(unseen.pairs) == 1
    assert "could not be checked" in unseen.notes[0]


def test_a_server_that_dies_ends_it_and_what_was_measured_stays() -> None:
    them = servers()
    them.outcome = lambda n, target: "connect" if n >= 7 and target == B else "ok"

    def gone(target: Target) -> None:
        raise Fault(f"{target.url}: nobody listens there")

    with pytest.raises(Cut, match=r"^fast went away in pair [45]: http://127.0.0.1:2: nobody listens there$") as caught:
        duel(SLOW, FAST, schedule, pairs=12, floor_pairs=0, run=them.run, check=gone)
    assert len(caught.value.duel.pairs) in (3, 4)
    assert caught.value.status == 1


def test_failures_of_a_server_that_is_there_are_figures() -> None:
    them = servers()
    them.outcome = lambda n, target: "http" if n >= 4 and target == B else "ok"
    made = duel(SLOW, FAST, schedule, pairs=4, floor_pairs=0, run=them.run, check=fine)
    assert [fast.figures["attainment"] for _, fast in made.pairs] == [1.0, 1.0, 0.0, 0.0]


def test_a_server_that_never_answered_well_is_not_compared() -> None:
    them = servers()
    them.outcome = lambda n, target: "timeout" if target == B else "ok"
    with pytest.raises(Cut, match=r"fast brought no request to a good end in pair 1 \(40 timeout\): refused"):
        duel(SLOW, FAST, schedule, pairs=3, floor_pairs=0, run=them.run, check=fine)


def test_an_interrupt_ends_it() -> None:
    def run(target: Target, schedule: Schedule, *, drain_s: float) -> Run:
        return replace(servers().run(target, schedule, drain_s=drain_s), interrupted=True)

    with pytest.raises(Cut, match="interrupted in floor pair 1"):
        duel(SLOW, FAST, schedule, pairs=3, run=run, check=fine)


@pytest.mark.parametrize("where", ["calm", "on_run"])
def test_an_interrupt_outside_a_load_keeps_what_was_measured(where: str) -> None:
    calls = 0

    def seventh(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt

    calm: Callable[[], object] = seventh if where == "calm" else lambda: None
    on_run: Callable[..., None] | None = seventh if where == "on_run" else None
    with pytest.raises(Cut, match=r"^interrupted between two runs; what was measured is kept$") as caught:
        duel(
            SLOW, FAST, schedule, pairs=12, floor_pairs=1, run=servers().run, check=fine, calm=calm, on_run=on_run
        )  # fmt: skip
    assert caught.value.status == 130
    made = caught.value.duel
    assert (len(made.floor), len(made.pairs)) == (1, 2)


def test_a_seed_that_draws_nothing_ends_it_and_what_was_measured_stays() -> None:
    drawn = 0

    def scheduler(seed: int) -> Schedule:
        nonlocal drawn
        drawn += 1
        if drawn > 2:
            raise Misuse("no request falls into the window")
        return schedule(seed)

    with pytest.raises(Cut, match="what was measured is kept: no request falls into the window") as caught:
        duel(SLOW, FAST, scheduler, pairs=6, floor_pairs=0, run=servers().run, check=fine)
    assert (caught.value.status, len(caught.value.duel.pairs)) == (1, 2)
    with pytest.raises(Misuse, match="no request"):
        duel(SLOW, FAST, scheduler, pairs=6, floor_pairs=0, run=servers().run, check=fine)


def test_what_stands_around_a_run_is_entered_and_left() -> None:
    seen: list[str] = []

    @contextmanager
    def around(asked: Schedule) -> Iterator[None]:
        seen.append(f"in {asked.seed}")
        yield
        seen.append("out")

    made = duel(SLOW, replace(FAST, around=around), schedule, pairs=2, floor_pairs=0, run=servers().run, check=fine)
    assert seen == [word for one, _ in made.pairs for word in (f"in {one.seed}", "out")]
