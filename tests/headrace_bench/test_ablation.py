from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from headrace_bench.ablation import Leg, Load, Turn, ablate, conclude, deadline, killing, reduce, repeats, resting
from headrace_bench.client.run import Run
from headrace_bench.client.target import Target
from headrace_bench.exhibits import Exhibit, Primary, exhibit
from headrace_bench.fault import Fault
from headrace_bench.figures.slo import parse
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Chunk, Health, Outcome, Record
from headrace_bench.server import Server

CHAT = parse("chat")
PLAIN = exhibit("engine.anything")


def health(*invalid: str) -> Health:
    return Health(
        lag_p50=0.0, lag_p99=0.0, lag_max=0.0, loop_lag_p99=0.0, loop_lag_max=0.0, cpu=0.1, gc_pauses=0, gc_longest=0.0,
        load_average=0.5, steal=0.0, asked_rate=1.0, sent_rate=1.0, invalid=invalid,
    )  # fmt: skip


def record(planned: Planned, ttft: float, *, gap: float = 0.01, tokens: int = 4, outcome: Outcome = "ok") -> Record:
    at = planned.at or 0.0
    chunks = tuple(Chunk(at + ttft + i * gap, "text", 4) for i in range(tokens))
    return Record(
        index=planned.index, scheduled=planned.at, dispatched=at, sent=at, outcome=outcome, phase=planned.phase,
        tag=planned.tag, chunks=chunks, closed=at + ttft + tokens * gap, completion_tokens=tokens,
    )  # fmt: skip


def ran(schedule: Schedule, answer: Callable[[Planned], Record], *invalid: str) -> Run:
    records = tuple(answer(planned) for planned in schedule.requests)
    return Run(schedule, records, health(*invalid), Target("http://127.0.0.1:1", "m"), "2026-01-01T00:00:00Z")


class Fake:
    """Stands for a server that answers its first text after `ttft` seconds."""

    def __init__(self, on: bool, started: list[bool]) -> None:
        self.on = on
        self._started = started

    def __enter__(self) -> Fake:
        self._started.append(self.on)
        return self

    name = "fake"

    def __exit__(self, *_: object) -> None: ...

    def cpu(self) -> float:
        return 0.0


def measured(
    on: float, off: float, *, invalid: Callable[[int], tuple[str, ...]] = lambda _: (), noise: float = 0.05, **more: Any
) -> tuple[Any, list[bool], list[int]]:
    started: list[bool] = []
    seeds: list[int] = []
    rng = random.Random(5)
    runs = itertools.count()

    def load(server: Server, schedule: Schedule, drain_s: float) -> Run:
        seeds.append(schedule.seed)
        base = on if cast("Fake", server).on else off
        ttft = base * rng.lognormvariate(0.0, noise)
        return ran(schedule, lambda planned: record(planned, ttft), *invalid(next(runs)))

    settings: dict[str, Any] = {"slo": CHAT, "pairs": 8, "until": 1e9, **more}
    found = ablate(PLAIN, lambda side: cast("Server", Fake(side, started)), cast("Load", load), **settings)
    return found, started, seeds


def test_a_switch_that_halves_ttft_helps() -> None:
    found, started, _ = measured(0.1, 0.2)
    assert found.verdict == "helps"
    assert found.pairs == 8
    assert found.comparison.ratio == pytest.approx(0.5, rel=0.1)
    assert started.count(True) == started.count(False) == 4  # two pairs a round


def test_one_that_doubles_it_hurts_and_none_makes_no_difference() -> None:
    assert measured(0.2, 0.1)[0].verdict == "hurts"
    assert measured(0.1, 0.1)[0].verdict == "no difference"


def test_two_pairs_have_one_schedule_and_each_text_of_its_own() -> None:
    openings: list[tuple[int, str]] = []

    def load(server: Server, schedule: Schedule, drain_s: float) -> Run:
        openings.append((schedule.seed, schedule.requests[1].messages[0]["content"].split()[0]))
        return ran(schedule, lambda planned: record(planned, 0.1))

    ablate(PLAIN, lambda side: cast("Server", Fake(side, [])), cast("Load", load), slo=CHAT, pairs=6, until=1e9)
    pairs = list(zip(openings[::2], openings[1::2], strict=True))
    assert all(first == second for first, second in pairs)  # both sides the same
    assert [seed for (seed, _), _ in pairs] == [1000, 1001, 1001, 1002, 1002, 1003, 1003]
    assert len({salt for (_, salt), _ in pairs}) == 7


def test_the_order_is_drawn_for_a_round_and_turns_within_it() -> None:
    asked: list[bool] = []

    def load(server: Server, schedule: Schedule, drain_s: float) -> Run:
        asked.append(cast("Fake", server).on)
        return ran(schedule, lambda planned: record(planned, 0.1))

    ablate(PLAIN, lambda side: cast("Server", Fake(side, [])), cast("Load", load), slo=CHAT, pairs=24, until=1e9)
    rounds = [asked[i : i + 4] for i in range(2, len(asked), 4)]
    assert all(one[:2] == one[:1:-1] for one in rounds)  # on off off on, or off on on off
    assert {one[0] for one in rounds} == {True, False}


def test_a_leg_begins_when_both_servers_are_idle() -> None:
    calmed: list[int] = []
    measured(0.1, 0.2, pairs=6, calm=lambda servers: calmed.append(len(servers)))
    assert calmed == [2] * 14


def test_a_pair_that_the_machine_disturbed_is_dropped_for_both_and_replaced() -> None:
    found, _, _ = measured(0.1, 0.2, invalid=lambda run: ("lag p99 is 20 ms",) if run == 5 else ())
    assert found.pairs == 9  # whole rounds, of two pairs each
    assert found.dropped == ("lag p99 is 20 ms",)


def test_a_machine_that_is_always_disturbed_ends_it() -> None:
    found, _, _ = measured(0.1, 0.2, invalid=lambda _: ("busy",))
    assert found.pairs == 0
    assert found.verdict == "too few"
    assert len(found.dropped) == 8


def test_time_that_is_up_ends_it_after_the_least_number_of_pairs() -> None:
    found, _, _ = measured(0.1, 0.2, until=0.0, clock=lambda: 1.0, pairs=20)
    assert found.pairs == 6


def test_noise_between_runs_of_one_side_is_the_floor() -> None:
    quiet, loud = measured(0.1, 0.1, noise=0.01)[0], measured(0.1, 0.1, noise=0.3)[0]
    assert quiet.comparison.floor is not None
    assert loud.comparison.floor is not None
    assert quiet.comparison.floor < 0.05 < loud.comparison.floor


def leg(value: float | None) -> Leg:
    return Leg(value=value, seen=(), good=1, scheduled=1, failed=0, invalid=())


def test_the_two_pairs_of_a_schedule_are_the_a_a_pairs() -> None:
    turns = [Turn(1, leg(1.0), leg(5.0)), Turn(1, leg(2.0), leg(6.0)), Turn(2, leg(3.0), leg(7.0))]
    assert [(pair.a, pair.b) for pair in repeats(turns)] == [(1.0, 2.0), (5.0, 6.0)]


def test_without_a_floor_nothing_is_claimed() -> None:
    turns = [Turn(i, leg(1.0 + i / 100), leg(2.0 + i / 90)) for i in range(8)]
    found = conclude(PLAIN, turns, [], CHAT, 0.0, 1)
    assert found.comparison.verdict == "better"
    assert found.verdict == "too few"


def test_a_gain_that_costs_the_slo_is_mixed() -> None:
    turns = [
        Turn(i // 2, replace(leg(1.0 + i / 100), good=2, scheduled=4), replace(leg(2.0 + i / 90), good=4, scheduled=4))
        for i in range(8)
    ]
    assert conclude(PLAIN, turns, [], CHAT, 0.0, 1).verdict == "mixed"


def test_a_server_that_does_not_rest_while_the_other_is_asked_spoils_the_pair() -> None:
    seconds = iter((1.0, 1.5))

    class Busy:
        name = "off"

        def cpu(self) -> float:
            return next(seconds)

    with resting(cast("Server", Busy()), clock=iter((0.0, 5.0)).__next__) as noise:
        assert not noise
    assert noise == ["off was to be idle and used 0.10 cores"]


def test_of_an_endless_closed_loop_only_what_was_begun_is_due() -> None:
    schedule = msgspec.structs.replace(in_time().schedule(1), users=2)
    requests = tuple(msgspec.structs.replace(one, at=None) for one in schedule.requests)
    schedule = msgspec.structs.replace(schedule, requests=requests)
    done = ran(schedule, lambda planned: record(planned, 0.1))
    done = Run(done.schedule, done.records[:3], done.health, done.target, done.wall)
    assert reduce(PLAIN.primary, done, CHAT).scheduled == 2


def test_a_server_without_an_engine_process_is_a_fault() -> None:
    class Alone:
        name = "on"

        def biggest_child(self) -> int:
            raise ValueError

    with pytest.raises(Fault, match="on has no process of an engine"), killing(cast("Server", Alone()), 1.0):
        pass


def test_nothing_measured_is_no_figure() -> None:
    found = conclude(PLAIN, [], [], CHAT, 0.0, 1)
    assert found.middle_on is None
    assert found.on.goodput is None
    assert found.verdict == "too few"


def in_time() -> Exhibit:
    def make(rng: random.Random) -> list[Planned]:
        extra = {"headrace": {"ttft_deadline_ms": 500}}
        return [
            Planned(index=0, at=0.1 * i, messages=(), max_tokens=4, prompt_tokens=1, tag="user", extra=extra)
            for i in range(4)
        ]

    return Exhibit("engine.x", "four", make, Primary("in_time", "share", "user"))


def test_in_time_is_a_share_of_all_that_were_scheduled() -> None:
    one = in_time()
    ttfts = {0: 0.1, 1: 0.2, 2: 0.6, 3: 0.5, 4: 0.1}
    schedule = one.schedule(1)
    found = reduce(one.primary, ran(schedule, lambda planned: record(planned, ttfts[planned.index])), CHAT)
    assert found.value == 3 / 4  # the third is late; the warm-up does not count

    def refusing(planned: Planned) -> Record:
        return record(planned, 0.1, tokens=0, outcome="http") if planned.index == 2 else record(planned, 0.1)

    refused = reduce(one.primary, ran(schedule, refusing), CHAT)
    assert refused.value == 3 / 4
    assert refused.failed == 1


def test_what_was_never_sent_is_not_in_time() -> None:
    one = in_time()
    schedule = one.schedule(1)
    cut = ran(schedule, lambda planned: record(planned, 0.1))
    cut = Run(cut.schedule, cut.records[:3], cut.health, cut.target, cut.wall)
    assert reduce(one.primary, cut, CHAT).value == 2 / 4


@pytest.mark.parametrize(
    ("primary", "expected"),
    [
        (Primary("ttft", "p50"), 0.1),
        (Primary("gap", "max"), 0.04),
        (Primary("tpot", "mean"), 0.04),
        (Primary("ttft", "max", "nobody"), None),
    ],
)
def test_the_deciding_figure(primary: Primary, expected: float | None) -> None:
    done = ran(PLAIN.schedule(1), lambda planned: record(planned, 0.1, gap=0.04))
    value = reduce(primary, done, CHAT).value
    assert value == (None if expected is None else pytest.approx(expected))


def test_a_deadline_is_read_from_the_request() -> None:
    assert deadline({"headrace": {"ttft_deadline_ms": 800}}) == 0.8
    assert deadline({"headrace": {}}) is None
    assert deadline({"temperature": 0}) is None


def test_the_engine_is_killed_while_the_load_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:

        class Parent:
            def biggest_child(self) -> int:
                return child.pid

        with killing(cast("Server", Parent()), 0.01):
            assert child.wait(timeout=30) == -9


def test_nothing_is_killed_otherwise(tmp_path: Path) -> None:
    with killing(cast("Server", object()), None):
        pass


def test_a_server_that_does_not_start_is_a_fault_of_this_switch() -> None:
    def start(_: bool) -> Server:
        raise Fault("no")

    with pytest.raises(Fault, match="no"):
        ablate(PLAIN, start, cast("Load", None), slo=CHAT, pairs=6, until=0.0)
