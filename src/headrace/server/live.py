"""What runs for one response, on one engine after the other, and the client it runs for.

    client ── on_gone, or receive ──┐ leaves
    server ── fail ─────────────────┤                 ┌▶ cancel ──▶ engine
    engine ── events ──▶ mailbox ───┴▶ the response ──┘

Rules: the client is watched from before the submit to the end, so that a client that leaves stops the engine at
once and not at the next write. Whatever way a response ends, `close` leaves no live rid and no watcher behind.
Tokens are counted here and nowhere else. Of an engine that was given up nothing more is heard: events of a rid that is
not ours are dropped by `book`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import Draining, EngineFailed, EngineUnavailable, HeadraceError, Overloaded, ServiceError
from headrace.core.events import Admitted, Answered, Broken, Delta, Failed, Finished, Marks, Relayed
from headrace.core.request import Told
from headrace.core.timeline import Timeline
from headrace.gateway.backend import Backend, Work
from headrace.protocol.answer import Usage
from headrace.server.account import Account
from headrace.server.exchange import ClientGone, Receive
from headrace.server.mailbox import Mailbox

MAX_PENDING_EVENTS = 256
MAX_PENDING_TEXT = 256 * 1024

OnGone = Callable[[Callable[[], None] | None], None]
"""Takes what is called once when the client leaves; None: nobody wants to hear of it any more."""

log = logging.getLogger(__name__)

_ERRORS: dict[str | None, type[ServiceError]] = {
    error.code: error for error in (Overloaded, EngineUnavailable, Draining, EngineFailed)
}


class Live:
    """One response's share of an engine. Owned by the task that answers; sinks and watcher run on the same loop."""

    def __init__(
        self,
        timeline: Timeline,
        clock: Clock,
        *,
        max_pending: int = MAX_PENDING_EVENTS,
        queue_timeout_s: float = math.inf,
    ) -> None:
        self.timeline = timeline
        self.mailbox = Mailbox(
            max_events=max_pending, max_text=MAX_PENDING_TEXT, pause=self._pause, resume=self._resume
        )
        self.gone = False
        """The client left."""
        self.failure: HeadraceError | None = None
        """Why there will be no more events, if that is so."""
        self.remaining = 0
        """Choices without an end."""
        self.queued = True
        """The engine has not begun with any of it."""
        self.begun: float | None = None
        """When the first text of the running attempt was there."""
        self.first_s: float | None = None
        """Seconds from the submit of the engine that gave the first text to that text."""
        self.first_text: Callable[[float], None] | None = None
        """Told then: how many seconds after the submit that was."""
        self.leaving: Callable[[], object] | None = None
        """Called when the client leaves: what is waited for meanwhile is given up."""
        self.identity: tuple[str, int] | None = None
        """`id` and `created` of an answer that another server began."""
        self.counted = False
        """The other server told its own count of the tokens."""
        self._queue_timeout_s = queue_timeout_s
        self._backend: Backend | None = None
        self._clock = clock
        self._submitted = 0.0
        self._open: dict[int, int] = {}
        """rid → choices of it that are not finished."""
        self._base: dict[int, int] = {}
        """rid → choice index of its first choice."""
        self._cached = 0
        self._drawn: list[int] = []
        self._told = Account()
        self._hidden = 0
        """Characters that the engine will say and the reader has."""
        self._primed = False
        self._watcher: asyncio.Task[None] | None = None
        self._on_gone: OnGone | None = None

    def prime(self, told: Told) -> None:
        """Go on with what another server began."""
        self._told.add(told.text, told.ids or (), told.tokens, holds=not told.exact)
        self._primed = True

    @property
    def committed(self) -> bool:
        """The reader has text: nobody may begin anew."""
        return self._primed or self.timeline.delivered is not None

    @property
    def over(self) -> bool:
        """An engine has it, and every choice of it has its end."""
        return bool(self._base) and self.remaining == 0

    @property
    def choices(self) -> int:
        """How many the answer has."""
        return len(self._drawn)

    def watch(self, receive: Receive, on_gone: OnGone | None = None) -> None:
        """Start to look out for the client's leaving, by `on_gone` if the server has that (a task costs a kilobyte and
        two turns of the loop), else with a task of our own. The body must have been read."""
        self._on_gone = on_gone
        if on_gone is not None:
            on_gone(self.leave)
        else:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(receive))

    def submit(self, backend: Backend, work: Work) -> None:
        """Hand everything to an engine. Raises its refusal; what it took until then is cancelled."""
        timeline = self.timeline
        self._backend = backend
        self.remaining = work.choices
        self._drawn = [self._told.tokens] if work.choices == 1 else [0] * work.choices
        self._hidden = work.hidden
        self._base.clear()
        if not self.committed or not timeline.prompt_tokens:
            timeline.prompt_tokens = work.prompt_tokens
        self._submitted = self._clock()
        if timeline.tokenized is None:
            timeline.tokenized = self._submitted
        try:
            base = 0
            for part in work.parts:
                self._base[part.rid] = base
                self._open[part.rid] = part.n
                base += part.n
                backend.submit(part, self.mailbox.put)
                if self.mailbox.paused:
                    # It was filled by another engine, or by the parts before.
                    backend.pause(part.rid)
        except BaseException:
            self.give_up(forget=not self.committed)
            raise
        if not work.parts:
            # Nothing is asked for beyond what there is: every choice is complete as it stands.
            self._base[0] = 0
            for index in range(work.choices):
                self.mailbox.put(Finished(0, index, work.reason, completion_tokens=self._drawn[index]))

    def give_up(self, *, forget: bool = False) -> None:
        """Leave the engine; another one may be given the request. `forget`: from the beginning, nothing of what it
        said was shown."""
        self.cancel()
        if forget:
            self._told = Account()
            self.identity = None
            self._cached = self.timeline.cached_tokens = self.timeline.prompt_tokens = 0
            self.counted = False
            self.timeline.unmark()
            self.first_s = None
        self._base.clear()
        self.failure = None
        self.queued = True
        self.begun = None

    @property
    def told(self) -> Told | None:
        """What the reader has, if another engine could go on from there; `Told("", …)`: nothing yet."""
        return self._told.told() if len(self._drawn) == 1 else None

    def told_since(self, ids: int) -> tuple[tuple[int, ...], bool, bool, int, int]:
        """For who keeps account elsewhere: the tokens after the first `ids`; whether these are all that were told, and
        whether text is all that the answer is; how many tokens and characters it has."""
        return self._told.since(ids) if len(self._drawn) == 1 else ((), False, False, 0, 0)

    @property
    def text(self) -> str:
        """Choice 0, as far as it is known."""
        return self._told.text

    def book(self, event: Answered) -> int:
        """Take an event into account; its choice's index in the response, -1 for one that ends everything or is not
        for us any more."""
        kind = type(event)
        base = self._base.get(event.rid)
        if base is None:
            return -1
        if kind is Failed:
            assert isinstance(event, Failed)
            return self._break(event.rid, _ERRORS.get(event.code, EngineFailed)(event.message))
        if kind is Broken:
            assert isinstance(event, Broken)
            return self._break(event.rid, event.error)
        self.queued = False
        if kind is Relayed:
            assert isinstance(event, Relayed)
            self._book_relayed(event)
            return base
        assert isinstance(event, Admitted | Delta | Finished)
        index = base + event.index
        if kind is Delta:
            assert isinstance(event, Delta)
            self._drawn[index] += event.tokens
            if index == 0:
                text = event.text[self._hidden :] if self._hidden else event.text
                self._told.add(text, event.ids, event.tokens, holds=event.holds)
            if self.begun is None and event.text:
                self._begin(event.marks)
        elif kind is Finished:
            assert isinstance(event, Finished)
            # A continued answer's engine was told what it has already, and counts that too.
            self._drawn[index] = event.completion_tokens
            self.timeline.prompt_tokens = self.timeline.prompt_tokens or event.prompt_tokens
            self.remaining -= 1
            self._release(event.rid)
        elif event.index == 0:
            assert isinstance(event, Admitted)
            # The choices of a prompt share it: only the first says what the cache was worth.
            self._cached += event.cached
            self.timeline.cached_tokens = self._cached
        return index

    def visible(self, event: Delta) -> Delta:
        """`event` without what its reader has already: the engine of a continued answer may say it once more."""
        if not self._hidden:
            return event
        text = event.text[self._hidden :]
        self._hidden -= len(event.text) - len(text)
        return msgspec.structs.replace(event, text=text)

    @property
    def hiding(self) -> bool:
        """There is something that `visible` takes off."""
        return self._hidden > 0

    def check_gone(self) -> None:
        """Raises ClientGone."""
        if self.gone:
            raise ClientGone

    def check(self) -> None:
        """Raises ClientGone, or the failure."""
        if self.gone:
            raise ClientGone
        if self.failure is not None:
            raise self.failure

    def tick(self, now: float) -> float:
        """Give up on an engine that did not begin in time; at `now` nothing of the response has been sent yet. When to
        look again."""
        if not self.queued or self.failure is not None or not self._open:
            return now + self._queue_timeout_s
        due = self._submitted + self._queue_timeout_s
        if now >= due:
            self.fail(
                Overloaded(
                    f"no place became free in {now - self._submitted:.0f} s, the limit is {self._queue_timeout_s:g} s; "
                    "try again later",
                    reason="queue_timeout",
                )
            )
        return due

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            prompt_tokens=self.timeline.prompt_tokens, completion_tokens=sum(self._drawn), cached_tokens=self._cached
        )

    def leave(self) -> None:
        """The client is gone: stop the engine, tell the response."""
        self.gone = True
        if self.leaving is not None:
            self.leaving()
        self.cancel()
        self.mailbox.wake()

    def fail(self, error: HeadraceError) -> None:
        """End the response with an error from outside."""
        if self.failure is None:
            self.failure = error
        self.cancel()
        self.mailbox.wake()

    def cancel(self) -> None:
        """Stop everything that still runs."""
        while self._open:
            rid, _ = self._open.popitem()
            if self._backend is not None:
                self._backend.cancel(rid)

    async def close(self) -> None:
        """Stop everything, the watcher too, whatever the state."""
        self.cancel()
        if self._on_gone is not None:
            self._on_gone(None)
        self.mailbox.close()
        watcher = self._watcher
        if watcher is not None:
            watcher.cancel()
            await asyncio.wait((watcher,))

    async def _watch(self, receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception as error:
            # A server that cannot say what its client does has lost it.
            log.debug("receive failed: %s", type(error).__name__)
        self.leave()

    def _break(self, rid: int, error: HeadraceError) -> int:
        self._open.pop(rid, None)
        self.failure = error
        return -1

    def _begin(self, marks: Marks | None) -> None:
        """The attempt's first text is here."""
        self.begun = self._clock()
        if self.first_s is None:
            self.first_s = self.begun - self._submitted
        if self.first_text is not None:
            self.first_text(self.begun - self._submitted)
        if marks is not None and self.timeline.scheduled is None and self._backend is not None:
            self.timeline.mark(marks, self._backend.clock_offset)

    def _book_relayed(self, event: Relayed) -> None:
        if event.identity is not None:
            self.identity = event.identity
        if event.text and self.begun is None:
            self._begin(event.marks)
        self._drawn[0] += event.tokens
        if event.content is None:
            self._told.spoil()
        else:
            self._told.add(event.content, (), event.tokens)
        if event.usage is not None:
            self.counted = True
            self.timeline.prompt_tokens = event.usage.prompt
            self.timeline.cached_tokens = self._cached = event.usage.cached
            self._drawn = [event.usage.completion] + [0] * (len(self._drawn) - 1)
        if event.over:
            self.remaining = 0
            self._open.pop(event.rid, None)

    def _release(self, rid: int) -> None:
        left = self._open.get(rid, 0) - 1
        if left > 0:
            self._open[rid] = left
        else:
            self._open.pop(rid, None)

    def _pause(self) -> None:
        for rid in self._open:
            if self._backend is not None:
                self._backend.pause(rid)

    def _resume(self) -> None:
        for rid in self._open:
            if self._backend is not None:
                self._backend.resume(rid)
