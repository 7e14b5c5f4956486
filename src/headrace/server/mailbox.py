"""Where an engine leaves the events of one response until the response takes them.

    engine ── put ──▶ [ event event … ] ── take ──▶ encode ── write ──▶ socket
               │ pause ◀── over the limit          below a quarter ──▶ resume ▲
               └── nothing there, the response waits: `direct` ───────────────┘

Rules: everything happens on the event loop's thread, so there are no locks. `take` gives all that is there: several
events become one write. What was taken counts as held until `written`, so a reader that takes nothing bounds what
is kept for it: the limit, plus what the engine had under way when it was paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.core.events import Answered, Delta, Relayed


def _nobody() -> None:
    """To be told when nobody listens."""


class Mailbox:
    """Bounded by `max_events` and by `max_text` characters; `pause` and `resume` act on whoever fills it."""

    __slots__ = (
        "_events",
        "_held_events",
        "_held_text",
        "_max_events",
        "_max_text",
        "_pause",
        "_paused",
        "_resume",
        "_text",
        "_waiter",
        "_woken",
        "direct",
    )  # fmt: skip

    def __init__(
        self, *, max_events: int, max_text: int, pause: Callable[[], None], resume: Callable[[], None]
    ) -> None:
        self.direct: Callable[[Answered], bool] | None = None
        """Takes an event at once, or says no. Asked only while the response waits and nothing is before it."""
        self._events: list[Answered] = []
        self._text = 0
        self._held_events = 0
        self._held_text = 0
        self._max_events = max_events
        self._max_text = max_text
        self._pause = pause
        self._resume = resume
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

    @property
    def paused(self) -> bool:
        return self._paused

    def put(self, event: Answered) -> None:
        """The engine's sink."""
        if self.direct is not None and self._waiter is not None and not self._woken and self.direct(event):
            return
        self._events.append(event)
        if isinstance(event, Delta):
            self._text += len(event.text)
        elif isinstance(event, Relayed):
            self._text += len(event.raw)
        if not self._paused and self._over():
            self._paused = True
            self._pause()
        self.wake()

    def take(self) -> list[Answered]:
        """All events since the last call, oldest first; held until `written`."""
        events = self._events
        if events:
            self._events = []
            self._held_events += len(events)
            self._held_text += self._text
            self._text = 0
        return events

    def written(self, events: int = 0, text: int = 0) -> None:
        """What was taken has left for the socket; but for so much of it, which stays held."""
        self._held_events = events
        self._held_text = text
        few = (len(self._events) + events) * 4 < self._max_events
        if self._paused and few and (self._text + text) * 4 < self._max_text:
            self._paused = False
            self._resume()

    def wake(self) -> None:
        """Let `wait` return although there may be no event: something else wants to be seen."""
        self._woken = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Nobody takes anything any more. Whoever it told of that is let go: the response, its engine and this one
        would hold each other, and only the garbage collector could free them."""
        self.direct = None
        self._pause = self._resume = _nobody

    async def wait(self) -> None:
        """Until an event or a `wake` since the last `wait`. For one waiter."""
        if not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._woken = False

    def _over(self) -> bool:
        return len(self._events) + self._held_events > self._max_events or self._text + self._held_text > self._max_text
