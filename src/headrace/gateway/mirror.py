"""Copies of live requests for a candidate: its text is thrown away, its times are kept beside the live ones.

    request ─▶ live engine ──────────────────▶ client
        └ every n-th, if there is room ─▶ Shadow ─▶ candidate       both ends ─▶ pair ─▶ gate ─▶ promote?

Rules: a copy is made after the live request was handed to its engine and never waits for a place: without one it is
dropped and counted, and so it is if the candidate's own queue is full: that says how much it has to do, not how good
it is. It has the least priority and a salt of its own, so it leaves nothing in a user's cache. It is booked nowhere:
not in limits, usage, the figures of requests, nor in the candidate's health, so that the candidate may answer for
another alias, or answer by weight, and no copy can take it away there. A client that leaves ends its copy too. Which
requests are copied is not drawn: a share of 1 % is every hundredth.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, Overloaded
from headrace.core.events import Admitted, Answered, Broken, Delta, Failed, Finished, Relayed
from headrace.core.request import BATCH, Ask
from headrace.gateway.backend import Lease
from headrace.gateway.gate import Figures, Quantiles, Seen, Verdict, agreement, judge
from headrace.gateway.spec import MirrorSpec

MOST_AT_ONCE = 4
"""Copies that run at the same time."""
LONGEST_S = 120.0
"""A copy that takes longer has failed."""
KEPT_TEXT = 32 * 1024
"""Characters of either side that are compared."""
SALT = "mirror\x1f"
FIRST_RID = 1 << 48
"""Above those of requests."""

Outcome = Literal["ok", "error", "cancelled", "dropped", "unpaired"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "cancelled", "dropped", "unpaired")
"""Of copies; dropped: there was no place for it, here or at the candidate; unpaired: the live answer failed, so there
is nothing to compare with."""

log = logging.getLogger(__name__)


class Mirrored(Protocol):
    """An alias. A `pool.Route`."""

    @property
    def mirror(self) -> MirrorSpec | None: ...


class Candidates(Protocol):
    """What is to be mirrored where. A `pool.Pool`."""

    @property
    def routes(self) -> Mapping[str, Mirrored]: ...

    def lease_of(self, name: str) -> Lease:
        """A lease of that very engine that only keeps it alive. Raises EngineUnavailable."""
        ...


class Window:
    """What is known of one alias's candidate."""

    def __init__(self, spec: MirrorSpec) -> None:
        self.spec = spec
        self.due = 0.0
        """Copies that should have been made, less those that were."""
        self.outcomes: Counter[Outcome] = Counter()
        self.agreements = Quantiles()
        self.verdict = Verdict("waiting", f"0 of {spec.requests} mirrored requests are done")
        """Of the newest full window, or of the running one while there is none."""
        self.begin()

    def begin(self) -> None:
        """A new window of pairs."""
        self.live = Figures()
        self.candidate = Figures()

    def report(self) -> dict[str, Any]:
        """For the admin API. Times in ms; null: no data."""
        return {
            "to": self.spec.to,
            "share": self.spec.share,
            "promote": self.spec.promote,
            "mirrored": {outcome: self.outcomes[outcome] for outcome in OUTCOMES},
            "live": _side(self.live),
            "candidate": _side(self.candidate),
            "agreement_p50": self.agreements.at(0.5),
            "verdict": self.verdict.decision,
            "why": self.verdict.why,
        }


def _side(figures: Figures) -> dict[str, Any]:
    def ms(value: float | None) -> float | None:
        return None if value is None else round(value * 1e3, 3)

    return {
        "requests": figures.requests,
        "errors": figures.errors,
        "ttft_p50_ms": ms(figures.ttft.at(0.5)),
        "ttft_p95_ms": ms(figures.ttft.at(0.95)),
        "itl_p50_ms": ms(figures.gaps.at(0.5)),
        "itl_p99_ms": ms(figures.gaps.at(0.99)),
    }


class Mirror:
    """On the event loop. `promote(alias, engine)` is started as a task when the gate opens; it does not raise."""

    def __init__(
        self,
        candidates: Candidates,
        clock: Clock,
        *,
        promote: Callable[[str, str], Awaitable[None]] | None = None,
        most: int = MOST_AT_ONCE,
    ) -> None:
        self._candidates = candidates
        self._clock = clock
        self._rids = itertools.count(FIRST_RID)
        self._promote = promote
        self._most = most
        self._running: set[Shadow] = set()
        self._tasks: set[asyncio.Future[None]] = set()
        self.windows: dict[str, Window] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """(alias, outcome) → copies, since the start."""

    @property
    def running(self) -> int:
        return len(self._running)

    def table(self) -> dict[str, Any]:
        """Alias → its candidate's figures."""
        return {alias: window.report() for alias, window in sorted(self.windows.items())}

    def offer(self, ask: Ask, engine: str | None) -> Shadow | None:
        """A copy of `ask`, which `engine` answers, is on its way; None: not this one. Does not raise."""
        route = self._candidates.routes.get(ask.model)
        spec = None if route is None else route.mirror
        if spec is None or spec.to == engine:
            return None
        window = self.windows.get(ask.model)
        if window is None or window.spec != spec:
            window = self.windows[ask.model] = Window(spec)
        window.due += spec.share
        if window.due < 1.0:
            return None
        window.due -= 1.0
        if len(self._running) >= self._most:
            self._count(ask.model, window, "dropped")
            return None
        try:
            lease = self._candidates.lease_of(spec.to)
        except HeadraceError:
            self._count(ask.model, window, "dropped")
            return None
        shadow = Shadow(self, window, ask, lease)
        self._running.add(shadow)
        shadow.start()
        return shadow

    async def close(self) -> None:
        """End all copies."""
        for shadow in tuple(self._running):
            shadow.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # What shadows use ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _spawn(self, work: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _count(self, alias: str, window: Window, outcome: Outcome) -> None:
        window.outcomes[outcome] += 1
        self.counts[alias, outcome] += 1

    def _over(self, shadow: Shadow) -> None:
        self._running.discard(shadow)

    def _pair(self, alias: str, window: Window, live: Seen, candidate: Seen) -> None:
        window.live.add(live)
        window.candidate.add(candidate)
        spec = window.spec
        verdict = judge(window.live, window.candidate, requests=spec.requests, tolerance=spec.tolerance)
        if verdict.decision == "waiting":
            if window.verdict.decision == "waiting":
                window.verdict = verdict
            return
        if verdict != window.verdict:
            log.info("mirror of %s to %s: %s, %s", alias, spec.to, verdict.decision, verdict.why)
        window.verdict = verdict
        window.begin()
        if verdict.decision == "promote" and spec.promote == "auto" and self._promote is not None:
            self._spawn(self._promote(alias, spec.to))


class Shadow:
    """One copy. `close` or `cancel` ends the live side; the pair counts when both are there."""

    def __init__(self, mirror: Mirror, window: Window, ask: Ask, lease: Lease) -> None:
        options = replace(ask.options, priority=BATCH, resume=False)
        fields = _of_copy(ask.fields) if lease.backend.kind == "openai" else ask.fields
        self._ask = replace(ask, fields=fields, options=options, salt=SALT + ask.salt, told=None)
        self._mirror = mirror
        self._window = window
        self._lease = lease
        self._clock = mirror._clock
        self._task: asyncio.Future[None] | None = None
        self._over = asyncio.Event()
        self._rids: set[int] = set()
        self._left = 0
        """Choices that are not complete."""
        self._text: list[str] = []
        self._kept = 0
        self._submitted = 0.0
        self._first: float | None = None
        self._last = 0.0
        self._gaps: list[float] = []
        self._ok = False
        self._done = False
        """The candidate's side is there."""
        self._live: tuple[Seen, str | None] | None = None
        self._cancelled = False
        self._dropped = False
        self._counted = False

    @property
    def compares(self) -> bool:
        """`close` wants the live text."""
        return self._window.spec.compare

    def start(self) -> None:
        self._task = self._mirror._spawn(self._run())
        # Not at the end of `_run`: a task that is cancelled before its first step never gets there.
        self._task.add_done_callback(self._end)

    def close(self, live: Seen, text: str | None) -> None:
        """The live answer is over."""
        if self._live is None and not self._cancelled:
            self._live = live, text
            self._settle()

    def cancel(self) -> None:
        """The client is gone, or the server closes: nothing is compared."""
        self._cancelled = True
        if self._done:
            self._settle()
        elif self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        backend = self._lease.backend
        try:
            async with asyncio.timeout(LONGEST_S):
                parsed = await asyncio.get_running_loop().run_in_executor(None, backend.parse, self._ask)
                work = await backend.prepare(self._ask, parsed, self._mirror._rids)
                self._left = work.choices
                self._submitted = self._clock()
                for part in work.parts:
                    self._rids.add(part.rid)
                    backend.submit(part, self._event)
                if work.parts:
                    await self._over.wait()
                else:
                    self._ok = True
        except (HeadraceError, TimeoutError) as error:
            # A reason: it is a queue of ours that is full, see `Overloaded`.
            self._dropped = isinstance(error, Overloaded) and error.reason is not None
            log.debug("a mirrored request failed: %s", type(error).__name__)

    def _end(self, task: asyncio.Future[None]) -> None:
        """The task is over, whatever became of it."""
        if task.cancelled():
            self._cancelled = True
        elif (error := task.exception()) is not None:
            log.error("a mirrored request failed: %s", type(error).__name__)
        for rid in self._rids:
            self._lease.backend.cancel(rid)
        self._lease.close("cancelled" if self._cancelled else "ok" if self._ok else "failed")
        self._done = True
        self._mirror._over(self)
        self._settle()

    def _event(self, event: Answered) -> None:
        if isinstance(event, Delta):
            self._say(event.text, event.text if event.index == 0 else "")
        elif isinstance(event, Relayed):
            self._say(event.text, event.content or "")
            if event.over:
                self._finish(ok=True)
        elif isinstance(event, Finished):
            self._left -= 1
            if self._left == 0:
                self._finish(ok=True)
        elif isinstance(event, Broken):
            self._dropped = isinstance(event.error, Overloaded) and event.error.reason is not None
            self._finish(ok=False)
        elif isinstance(event, Failed):
            self._finish(ok=False)
        else:
            assert isinstance(event, Admitted)

    def _say(self, text: str, content: str) -> None:
        if not text:
            return
        now = self._clock()
        if self._first is None:
            self._first = now - self._submitted
        else:
            self._gaps.append(now - self._last)
        self._last = now
        if self.compares and self._kept < KEPT_TEXT:
            self._text.append(content)
            self._kept += len(content)

    def _finish(self, *, ok: bool) -> None:
        self._ok = ok
        self._over.set()

    def _count(self, outcome: Outcome) -> None:
        self._mirror._count(self._ask.model, self._window, outcome)

    def _settle(self) -> None:
        """Both sides are there: what has become of it?"""
        if self._counted or not self._done:
            return
        if self._dropped:
            self._counted = True
            self._count("dropped")
            return
        if self._live is None and not self._cancelled:
            return
        self._counted = True
        if self._cancelled or self._live is None:
            self._count("cancelled")
            return
        live, text = self._live
        if not live.ok:
            self._count("unpaired")
            return
        self._count("ok" if self._ok else "error")
        if text is not None and self._ok:
            self._window.agreements.add((agreement(text[:KEPT_TEXT], "".join(self._text)[:KEPT_TEXT]),))
        streamed = self._ask.options.stream
        mine = Seen(self._ok, self._first if streamed else None, tuple(self._gaps) if streamed else ())
        self._mirror._pair(self._ask.model, self._window, live, mine)


def _of_copy(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """For another Headrace, whose caches know nothing of our salt; the others are not sent this, see `continuation`."""
    given = fields.get("headrace")
    own = given if isinstance(given, Mapping) else {}
    return {**fields, "headrace": {**own, "priority": "batch", "cache": False}}
