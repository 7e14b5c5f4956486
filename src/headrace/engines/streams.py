"""The generations that an engine is working on, on the server's side: which sink gets which event.

One per StreamEngine, event loop only. It keeps the contract of `core.events`: nothing reaches a sink after the end or
a cancel. It also bounds the queue, because only here is known at once how many generations wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.errors import Overloaded
from headrace.core.events import Admitted, Event, Failed, Finished
from headrace.core.request import Generation
from headrace.engines.base import Sink


class _Stream:
    __slots__ = ("admitted", "left", "sink")

    def __init__(self, sink: Sink, choices: int) -> None:
        self.sink = sink
        self.left = choices
        self.admitted = False


class Streams:
    """Live generations of one engine."""

    def __init__(self, max_waiting: int) -> None:
        self._live: dict[int, _Stream] = {}
        self._waiting = 0
        self._max_waiting = max_waiting

    def __repr__(self) -> str:
        return f"<Streams [{len(self._live)} live, {self._waiting} waiting]>"

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, rid: int) -> bool:
        return rid in self._live

    @property
    def waiting(self) -> int:
        """Generations that no step has worked on."""
        return self._waiting

    def open(self, generation: Generation, sink: Sink) -> None:
        """Raises Overloaded when `max_waiting` generations are queued."""
        if self._waiting >= self._max_waiting:
            raise Overloaded(
                f"{self._waiting} requests are waiting, the limit is {self._max_waiting}; try again later",
                retry_after=1,
            )
        self._live[generation.rid] = _Stream(sink, generation.n)
        self._waiting += 1

    def close(self, rid: int) -> bool:
        """Drop a generation; False if it was over."""
        stream = self._live.pop(rid, None)
        if stream is None:
            return False
        if not stream.admitted:
            self._waiting -= 1
        return True

    def deliver(self, events: Iterable[Event]) -> None:
        """Hand events to their sinks in order."""
        for event in events:
            stream = self._live.get(event.rid)
            if stream is None:
                continue
            if type(event) is Admitted and not stream.admitted:
                stream.admitted = True
                self._waiting -= 1
            elif type(event) is Finished:
                stream.left -= 1
                if stream.left == 0:
                    self.close(event.rid)
            elif type(event) is Failed:
                self.close(event.rid)
            stream.sink(event)

    def fail_all(self, code: str, message: str) -> None:
        """Every live generation ends with the same error."""
        self.deliver([Failed(rid, code, message) for rid in list(self._live)])
