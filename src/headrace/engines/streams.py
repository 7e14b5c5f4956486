"""The generations that an engine is working on, on the server's side: which sink gets which event.

One per StreamEngine, event loop only. It keeps the contract of `core.events`: nothing reaches a sink after the end or
a cancel. Who may join is asked here too, because only here is known at once how many generations wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.admission import Backlog
from headrace.core.clock import Clock
from headrace.core.events import Event, Failed, Finished
from headrace.core.request import Generation
from headrace.engines.base import EngineStats, Sink


class _Stream:
    __slots__ = ("left", "sink")

    def __init__(self, sink: Sink, choices: int) -> None:
        self.sink = sink
        self.left = choices


class Streams:
    """Live generations of one engine."""

    def __init__(self, backlog: Backlog, clock: Clock) -> None:
        self._live: dict[int, _Stream] = {}
        self._backlog = backlog
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Streams [{len(self._live)} live, {self.waiting} waiting]>"

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, rid: int) -> bool:
        return rid in self._live

    @property
    def waiting(self) -> int:
        """Generations that no step has worked on."""
        return self._backlog.waiting

    def open(self, generation: Generation, sink: Sink) -> None:
        """Raises Overloaded, see `Backlog`."""
        self._backlog.add(generation, self._clock())
        self._live[generation.rid] = _Stream(sink, generation.n)

    def close(self, rid: int) -> bool:
        """Drop a generation; False if it was over."""
        stream = self._live.pop(rid, None)
        if stream is None:
            return False
        self._backlog.remove(rid, self._clock())
        return True

    def learn(self, stats: EngineStats) -> None:
        """The engine's newest figures, before the events that came with them."""
        self._backlog.learn(stats.prefill_s, stats.decode_share, stats.backlog_tokens)

    def deliver(self, events: Iterable[Event]) -> None:
        """Hand events to their sinks in order."""
        for event in events:
            stream = self._live.get(event.rid)
            if stream is None:
                continue
            self._backlog.book(event, self._clock())
            if type(event) is Finished:
                stream.left -= 1
                if stream.left == 0:
                    self.close(event.rid)
            elif type(event) is Failed:
                self.close(event.rid)
            stream.sink(event)

    def fail_all(self, code: str, message: str) -> None:
        """Every live generation ends with the same error."""
        self.deliver([Failed(rid, code, message) for rid in list(self._live)])
