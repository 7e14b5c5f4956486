from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace_bench.client.driver import ABANDON_S, drive, units
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Outcome, Record
from virtual_time import run


class Scripted:
    """Answers after a time of its own, of each request by index."""

    def __init__(
        self,
        clock: Callable[[], float],
        takes: Callable[[Planned], float] = lambda _: 1.0,
        outcome: Callable[[Planned], Outcome] = lambda _: "ok",
    ) -> None:
        self.clock = clock
        self.takes = takes
        self.outcome = outcome
        self.asked: dict[int, list[dict[str, str]]] = {}
        self.most = 0
        self._open = 0
        self._abandoned = asyncio.Event()

    def abandon(self) -> None:
        self._abandoned.set()

    async def send(self, planned: Planned, messages: Sequence[dict[str, str]], keep_text: bool = False) -> Record:
        self.asked[planned.index] = [dict(message) for message in messages]
        self._open += 1
        self.most = max(self.most, self._open)
        at = self.clock()
        outcome: Outcome = "unfinished"
        try:
            takes = self.takes(planned)
            try:
                await asyncio.wait_for(self._abandoned.wait(), takes)
            except TimeoutError:
                outcome = self.outcome(planned)
        finally:
            self._open -= 1
        return Record(
            index=planned.index,
            scheduled=planned.at,
            dispatched=at,
            outcome=outcome,
            phase=planned.phase,
            closed=self.clock(),
            text=f"answer {planned.index}" if keep_text else None,
        )


def planned(index: int, at: float | None = None, **more: Any) -> Planned:
    message = {"role": "user", "content": f"question {index}"}
    return Planned(index=index, at=at, messages=(message,), max_tokens=8, prompt_tokens=4, **more)


def schedule(*requests: Planned, users: int | None = None, duration: float = 10.0, warmup: float = 0.0) -> Schedule:
    return Schedule(seed=1, kind="test", users=users, duration=duration, warmup=warmup, requests=requests)


def load(asked: Schedule, **more: Any) -> tuple[list[Record], Scripted]:
    """Drives it in virtual time."""

    async def work() -> tuple[list[Record], Scripted]:
        clock = asyncio.get_running_loop().time
        scripted = {key: more.pop(key) for key in ("takes", "outcome") if key in more}
        client = Scripted(clock, **scripted)
        return await drive(asked, client, clock=clock, spin_s=0, kernel_timer=False, **more), client

    return run(work())


def test_an_open_loop_sends_at_its_times_whatever_is_unanswered() -> None:
    times = [0.0, 0.1, 0.1, 2.5, 9.0]
    records, client = load(schedule(*(planned(i, at) for i, at in enumerate(times))), takes=lambda _: 5.0)
    assert [record.dispatched for record in records] == pytest.approx(times)
    assert [record.index for record in records] == [0, 1, 2, 3, 4]
    assert client.most == 4
    assert {record.outcome for record in records} == {"ok"}


def test_requests_need_not_stand_in_order_of_time() -> None:
    records, _ = load(schedule(planned(0, 3.0), planned(1, 1.0)))
    assert [record.dispatched for record in records] == [3.0, 1.0]


def test_a_request_without_a_time_is_a_mistake_in_an_open_loop() -> None:
    with pytest.raises(ValueError, match="request 1 has no time"):
        load(schedule(planned(0, 0.0), planned(1)))


def test_each_record_is_told_as_it_ends() -> None:
    told: list[int] = []
    load(
        schedule(planned(0, 0.0), planned(1, 0.5)),
        takes=lambda p: 3.0 if p.index == 0 else 1.0,
        on_record=lambda record: told.append(record.index),
    )
    assert told == [1, 0]


def test_the_drain_ends_what_has_not_ended() -> None:
    asked = schedule(planned(0, 0.0), planned(1, 9.0), planned(2, 9.5))
    records, _ = load(asked, takes=lambda p: 4.0 if p.index == 1 else 1000.0, drain_s=5.0)
    assert [record.outcome for record in records] == ["unfinished", "ok", "unfinished"]
    assert [record.closed for record in records] == [15.0, 13.0, 15.0]
    assert records[0].scheduled == 0.0


def test_a_load_that_is_answered_ends_early() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        await drive(schedule(planned(0, 0.0)), Scripted(loop.time), clock=loop.time, spin_s=0, kernel_timer=False)
        return loop.time()

    assert run(work()) == 1.0


def test_a_session_carries_the_answers_that_came() -> None:
    asked = schedule(
        planned(0, 1.0, session=7),
        planned(1, session=7, turn=1, think=2.0),
        planned(2, session=7, turn=2, think=0.5),
    )
    records, client = load(asked)
    assert [record.dispatched for record in records] == [1.0, 4.0, 5.5]
    assert [message["content"] for message in client.asked[2]] == [
        "question 0",
        "answer 0",
        "question 1",
        "answer 1",
        "question 2",
    ]
    assert [message["role"] for message in client.asked[2]] == ["user", "assistant", "user", "assistant", "user"]
    assert {record.text for record in records} == {None}


def test_text_is_kept_where_it_is_asked_for() -> None:
    records, _ = load(schedule(planned(0, 0.0)), keep_text=True)
    assert records[0].text == "answer 0"


def test_a_session_ends_with_a_turn_that_failed_or_with_the_window() -> None:
    turns = [planned(i, 1.0 if i == 0 else None, session=1, turn=i, think=2.0) for i in range(5)]
    records, _ = load(schedule(*turns), outcome=lambda p: "http" if p.index == 1 else "ok")
    assert [record.outcome for record in records] == ["ok", "http"]
    records, _ = load(schedule(*turns))
    assert [record.dispatched for record in records] == [1.0, 4.0, 7.0]  # the next would begin at 10


def test_turns_and_users_take_turns_in_their_order_only() -> None:
    asked = schedule(planned(0, session=1, turn=1), planned(1), planned(2, 0.0, session=1, turn=0))
    assert [[turn.index for turn in unit] for unit in units(asked)] == [[2, 0], [1]]


def test_users_ask_again_when_answered_and_thought() -> None:
    pool = [planned(i, think=(0.0, 0.5)[i] if i < 2 else 1.0) for i in range(20)]
    records, client = load(schedule(*pool, users=2, duration=6.0))
    assert client.most == 2
    assert [record.dispatched for record in records] == pytest.approx([0.0, 0.5, 2.0, 2.5, 4.0, 4.5])
    assert {record.scheduled for record in records} == {None}


def test_a_user_begins_measuring_when_the_window_begins() -> None:
    pool = [planned(i, phase="warmup" if i < 10 else "measure") for i in range(30)]
    records, _ = load(schedule(*pool, users=1, duration=3.0, warmup=2.5))
    assert [(record.index, record.phase, record.dispatched) for record in records] == [
        (0, "warmup", 0.0),
        (1, "warmup", 1.0),
        (2, "warmup", 2.0),
        (10, "measure", 3.0),
        (11, "measure", 4.0),
        (12, "measure", 5.0),
    ]


def test_a_user_that_finds_nothing_left_is_told_of_once() -> None:
    told: list[float] = []
    load(schedule(*(planned(i) for i in range(5)), users=2, duration=6.0), on_ran_out=told.append)
    assert told == [2.0]  # 0 and 1, 2 and 3, then 4 for one of them
    load(schedule(*(planned(i, think=1.0) for i in range(20)), users=2, duration=6.0), on_ran_out=told.append)
    load(schedule(*(planned(i) for i in range(3)), users=1, duration=3.0), on_ran_out=told.append)
    load(schedule(planned(0, 0.0)), on_ran_out=told.append)
    assert told == [2.0]


def test_what_is_due_at_one_time_leaves_the_loop_its_turns() -> None:
    turns, seen = 0, list[int]()

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def turn() -> None:
            nonlocal turns
            turns += 1
            if turns < 100:
                loop.call_soon(turn)

        def takes(_: Planned) -> float:
            seen.append(turns)
            return 1.0

        loop.call_soon(turn)
        asked = schedule(*(planned(i, 0.0) for i in range(20)))
        await drive(asked, Scripted(loop.time, takes), clock=loop.time, spin_s=0, kernel_timer=False)

    run(work())
    assert len(set(seen)) == 20


def test_without_requests_left_for_the_warm_up_a_user_waits_for_the_window() -> None:
    pool = [planned(0, phase="warmup"), planned(1)]
    records, _ = load(schedule(*pool, users=1, duration=3.0, warmup=2.5))
    assert [(record.index, record.dispatched) for record in records] == [(0, 0.0), (1, 2.5)]


def interrupted(asked: Schedule, at: float) -> list[Record]:
    async def work() -> list[Record]:
        clock = asyncio.get_running_loop().time
        kept: list[Record] = []
        client = Scripted(clock, takes=lambda p: 1.0 if p.index == 0 else 100.0)
        load = asyncio.create_task(
            drive(asked, client, clock=clock, spin_s=0, kernel_timer=False, on_record=kept.append)
        )
        await asyncio.sleep(at)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        return kept

    return run(work())


def test_an_interrupt_keeps_what_was_measured() -> None:
    kept = interrupted(schedule(planned(0, 0.0), planned(1, 2.0), planned(2, 9.0)), 3.0)
    assert [(record.index, record.outcome) for record in kept] == [(0, "ok"), (1, "unfinished")]


def test_an_interrupt_keeps_what_was_measured_of_a_closed_loop() -> None:
    kept = interrupted(schedule(*(planned(i) for i in range(9)), users=2), 3.0)
    assert [(record.index, record.outcome) for record in kept] == [(0, "ok"), (1, "unfinished"), (2, "unfinished")]


def test_a_client_that_raises_ends_the_load_with_its_words() -> None:
    def takes(p: Planned) -> float:
        if p.index == 1:
            raise RuntimeError("a mistake of ours")
        return 100.0

    told: list[Record] = []
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        load(schedule(*(planned(i, float(i)) for i in range(5))), takes=takes, on_record=told.append)
    assert [(record.index, record.outcome) for record in told] == [(0, "unfinished")]


def test_a_fault_ends_the_drain_at_once() -> None:
    def outcome(p: Planned) -> Outcome:
        if p.index == 1:
            raise RuntimeError("a mistake of ours")
        return "ok"

    told: list[Record] = []
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        load(
            schedule(*(planned(i, float(i)) for i in range(3))),
            takes=lambda p: 20.0 if p.index == 1 else 1000.0,
            outcome=outcome,
            on_record=told.append,
            drain_s=500.0,
        )
    ended = sorted((record.index, record.outcome, record.closed) for record in told)
    assert ended == [(0, "unfinished", 21.0), (2, "unfinished", 21.0)]


def test_a_client_that_does_not_end_what_is_under_way_is_cancelled() -> None:
    class Deaf(Scripted):
        def abandon(self) -> None:
            pass

    async def work() -> list[Record]:
        clock = asyncio.get_running_loop().time
        client = Deaf(clock, takes=lambda _: 100.0)
        asked = schedule(*(planned(i) for i in range(9)), users=2)
        return await drive(asked, client, clock=clock, spin_s=0, kernel_timer=False, drain_s=1.0)

    records = run(work())
    assert [(record.index, record.outcome, record.closed) for record in records] == [
        (0, "unfinished", 11.0 + ABANDON_S),
        (1, "unfinished", 11.0 + ABANDON_S),
    ]


def test_who_thinks_when_the_load_is_interrupted_asks_no_more() -> None:
    turns = [planned(i, 0.0 if i == 0 else None, session=1, turn=i, think=5.0) for i in range(3)]
    assert [record.index for record in interrupted(schedule(*turns), 3.0)] == [0]
