"""Carries a schedule out: sends what is due when it is due, whatever became of what was sent before.

    open loop    ──●──●───●●────●──▶ time     each at its time, a task each
    sessions       └─ answer ─ think ─ next turn, with the answer that came
    closed loop  user 1 ─●═══ think ●══ …     takes the next request of the phase that it is
                 user 2 ───●════ think ●═ …
    then         the drain: what has not ended by its end is cancelled, and its record says `unfinished`

Rules: an open loop has no limit on what is in flight, for waiting here would be left out of what is measured; a later
turn or a user's next request is begun before the window ends or not at all; a user that finds no request left before
then is told of, for the load is not the one that was asked for; a session ends with the first turn that is not ok;
every request that was due or begun has exactly one record; who cancels `drive` has the records up to then by
`on_record`, those in flight included.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from headrace_bench.client.pacing import SPIN, Pacer
from headrace_bench.load.schedule import Phase, Planned, Schedule
from headrace_bench.record import Record

ABANDON_S = 1.0
"""A client that was told to end what is under way and has not done so is cancelled."""
Unit = tuple[Planned, ...]
"""Turns of a session in order, or one request."""


class Sender(Protocol):
    """What sends a request and tells what became of it; a `Client`, or a test's stand-in."""

    async def send(self, planned: Planned, messages: Sequence[dict[str, str]], keep_text: bool = False) -> Record:
        """Does not raise for what a server does."""
        ...

    def abandon(self) -> None:
        """Ends what is under way, now: `send` returns its record, `unfinished`."""
        ...


async def drive(
    schedule: Schedule,
    client: Sender,
    *,
    clock: Callable[[], float],
    drain_s: float = 30.0,
    on_record: Callable[[Record], None] | None = None,
    keep_text: bool = False,
    on_ran_out: Callable[[float], None] | None = None,
    spin_s: float = SPIN,
    kernel_timer: bool = True,
) -> list[Record]:
    """All records, by index. `clock` has to say 0 when the load starts, so about now. `on_ran_out` is called once, with
    the time at which the first user of a closed loop had nothing left to ask while the window was open.

    Raises what `client` or `on_record` raised, after everything in flight was cancelled.
    """
    driver = asyncio.current_task()
    assert driver is not None, "a coroutine runs in a task"
    load = _Load(schedule, client, clock, on_record, keep_text, on_ran_out, driver)
    with Pacer(clock, spin_s, kernel_timer) as pacer:
        try:
            if schedule.users is None:
                await load.send_on_time(pacer)
            else:
                load.start_users(schedule.users)
            await load.drain(drain_s)
        except asyncio.CancelledError:
            await load.cancel()
            if load.fault is not None:
                load.driver.uncancel()
                raise load.fault from None
            raise
    return sorted(load.records, key=lambda record: record.index)


def units(schedule: Schedule) -> list[Unit]:
    """The schedule's requests, turns of one session together, in the order in which the first of each stands."""
    turns: dict[tuple[str, int], list[Planned]] = {}
    for planned in schedule.requests:
        key = ("alone", planned.index) if planned.session is None else ("session", planned.session)
        turns.setdefault(key, []).append(planned)
    return [tuple(sorted(found, key=lambda planned: planned.turn)) for found in turns.values()]


def due(planned: Planned) -> float:
    """Its time in an open loop. ValueError where it has none: it would never be sent, and nobody would know."""
    if planned.at is None:
        raise ValueError(f"request {planned.index} has no time, but the loop is open and no turn comes before it")
    return planned.at


def unfinished(planned: Planned, dispatched: float, now: float) -> Record:
    """The record of a request that was cancelled before its client could say more."""
    return Record(
        index=planned.index,
        scheduled=planned.at,
        dispatched=dispatched,
        outcome="unfinished",
        phase=planned.phase,
        tag=planned.tag,
        session=planned.session,
        turn=planned.turn,
        max_tokens=planned.max_tokens,
        closed=now,
    )


class _Load:
    def __init__(
        self,
        schedule: Schedule,
        client: Sender,
        clock: Callable[[], float],
        on_record: Callable[[Record], None] | None,
        keep_text: bool,
        on_ran_out: Callable[[float], None] | None,
        driver: asyncio.Task[Any],
    ) -> None:
        self._schedule = schedule
        self._client = client
        self._clock = clock
        self._on_record = on_record
        self._keep_text = keep_text
        self._on_ran_out = on_ran_out
        self._end = schedule.warmup + schedule.duration
        self._tasks: set[asyncio.Task[None]] = set()
        self._pools: dict[Phase, deque[Unit]] = {"warmup": deque(), "measure": deque()}
        self._asking: set[asyncio.Task[Any]] = set()
        self._over = False
        self.records: list[Record] = []
        self.fault: BaseException | None = None
        self.driver = driver

    async def send_on_time(self, pacer: Pacer) -> None:
        """The open loop: ends with the last one sent, answered or not."""
        timed = [(due(unit[0]), unit) for unit in units(self._schedule)]
        for at, unit in sorted(timed, key=lambda pair: pair[0]):
            await pacer.until(at)
            self._spawn(self._session(unit))
            await asyncio.sleep(0)  # where the next one is due at once, nothing else would run before the last was sent

    def start_users(self, users: int) -> None:
        """The closed loop."""
        for unit in units(self._schedule):
            self._pools[unit[0].phase].append(unit)
        for _ in range(users):
            self._spawn(self._user())

    async def drain(self, seconds: float) -> None:
        """Waits for all that is begun, up to `seconds` after the window, and cancels the rest."""
        until = max(self._end, self._clock()) + seconds
        while self._tasks and (left := until - self._clock()) > 0:
            # For all of them: to be woken by each would look at all the others each time. A fault cancels this wait.
            await asyncio.wait(self._tasks, timeout=left)
        await self.cancel()
        if self.fault is not None:
            raise self.fault

    async def cancel(self) -> None:
        """Ends all that is in flight; each leaves its record."""
        self._over = True
        await asyncio.sleep(0)  # a task that is cancelled before its first step would leave no record
        for task in self._tasks - self._asking:
            task.cancel()
        if self._asking:
            self._client.abandon()
            await asyncio.wait(self._asking, timeout=ABANDON_S)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (fault := task.exception()) is None:
            return
        if self.fault is None:  # ours or the client's mistake, not the server's: the load cannot go on
            self.fault = fault
            self.driver.cancel()

    async def _user(self) -> None:
        while not self._over and (unit := self._take()) is not None:
            first = unit[0]
            begin = self._clock() + first.think
            if first.phase == "measure":
                begin = max(begin, self._schedule.warmup)
            if begin >= self._end:
                return
            await asyncio.sleep(begin - self._clock())
            await self._session(unit)
        now = self._clock()
        if self._on_ran_out is not None and not self._over and now < self._end:
            tell, self._on_ran_out = self._on_ran_out, None
            tell(now)

    def _take(self) -> Unit | None:
        """The next of the phase in which it would begin; None when there is no more."""
        warm, measure = self._pools["warmup"], self._pools["measure"]
        if warm and self._clock() + warm[0][0].think < self._schedule.warmup:
            return warm.popleft()
        return measure.popleft() if measure else None

    async def _session(self, turns: Unit) -> None:
        said: list[dict[str, str]] = []
        for place, planned in enumerate(turns):
            if place:
                if self._clock() + planned.think >= self._end:
                    return
                await asyncio.sleep(planned.think)
            said.extend(planned.messages)
            record = await self._ask(planned, said, place + 1 < len(turns))
            if record.outcome != "ok":
                return
            said.append({"role": "assistant", "content": record.text or ""})

    async def _ask(self, planned: Planned, messages: Sequence[dict[str, str]], goes_on: bool) -> Record:
        dispatched = self._clock()
        task = asyncio.current_task()
        assert task is not None, "sessions and users are tasks"
        self._asking.add(task)
        try:
            record = await self._client.send(planned, messages, self._keep_text or goes_on)
        except asyncio.CancelledError:
            self._tell(unfinished(planned, dispatched, self._clock()))
            raise
        finally:
            self._asking.discard(task)
        self._tell(record)
        return record

    def _tell(self, record: Record) -> None:
        if record.text is not None and not self._keep_text:
            record = msgspec.structs.replace(record, text=None)
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)
