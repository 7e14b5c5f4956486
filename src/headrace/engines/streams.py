"""The generations that an engine is working on, on the server's side: which sink gets which event.

One per StreamEngine, event loop only. It keeps the contract of `core.events`: nothing reaches a sink after the end or
a cancel. Who may join is asked here too, because only here is known at once how many generations wait.

It remembers what a replay needs, the tokens that each reader was told of. A worker tells in one frame all that a step
gave, and its socket is read to the end: what is known here is what the reader has, to the token.

    generation   p p p p          what was asked for
    told         a b c d e        of each choice; None once it is over
    replay       p p p p a b c d e ──► the worker draws f
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.core.admission import Backlog
from headrace.core.clock import Clock
from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.request import Generation
from headrace.engines.base import EngineStats, Sink


class _Stream:
    __slots__ = ("admitted", "generation", "left", "paused", "placed", "sink", "told")

    def __init__(self, generation: Generation, sink: Sink) -> None:
        self.generation = generation
        self.sink = sink
        self.left = generation.n
        self.told: list[list[int] | None] = [[] for _ in range(generation.n)]
        self.admitted: set[int] = set()
        """Choices that a step has worked on, in whatever worker."""
        self.placed = False
        """The worker of now has it."""
        self.paused = False

    def __repr__(self) -> str:
        return f"<_Stream {self.generation.rid} [{self.left} of {self.generation.n} choices, {self.tokens} told]>"

    @property
    def tokens(self) -> int:
        """Tokens told so far, of choices that are not over."""
        return sum(len(ids) for ids in self.told if ids is not None)


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

    def predict(self, tokens: int, priority: int) -> float:
        """Seconds to the first token, see `Backlog.predict`; what is cached was taken off by the caller."""
        return self._backlog.predict(tokens, priority, self._clock(), reuses=False)

    def open(self, generation: Generation, sink: Sink) -> None:
        """Raises Overloaded, see `Backlog`."""
        self._backlog.add(generation, self._clock())
        self._live[generation.rid] = _Stream(generation, sink)

    def close(self, rid: int) -> bool:
        """Drop a generation; False if it was over."""
        stream = self._live.pop(rid, None)
        if stream is None:
            return False
        self._backlog.remove(rid, self._clock())
        return True

    def learn(self, stats: EngineStats) -> None:
        """The engine's newest figures, before the events that came with them."""
        self._backlog.learn(stats.prefill_s, stats.decode_share, stats.begun_tokens)

    def deliver(self, events: Iterable[Event]) -> None:
        """Hand events to their sinks in order. Of a replayed choice's `Admitted`, only the first reaches its sink."""
        for event in events:
            stream = self._live.get(event.rid)
            if stream is None:
                continue
            if type(event) is Delta:
                ids = stream.told[event.index]
                if ids is not None:
                    ids += event.ids
            elif type(event) is Admitted:
                if event.index in stream.admitted:
                    continue
                stream.admitted.add(event.index)
            self._backlog.book(event, self._clock())
            if type(event) is Finished:
                stream.told[event.index] = None
                stream.left -= 1
                if stream.left == 0:
                    self.close(event.rid)
            elif type(event) is Failed:
                self.close(event.rid)
            stream.sink(event)

    def fail_all(self, code: str, message: str) -> None:
        """Every live generation ends with the same error."""
        self.deliver([Failed(rid, code, message) for rid in list(self._live)])

    # A worker's death, and the next one's life.

    def pause(self, rid: int, paused: bool) -> bool:
        """Remember that a reader is slow, or no longer; False if its stream is over."""
        stream = self._live.get(rid)
        if stream is not None:
            stream.paused = paused
        return stream is not None

    def paused(self, rid: int) -> bool:
        """Does its reader hold it back?"""
        stream = self._live.get(rid)
        return stream is not None and stream.paused

    def unplaced(self) -> list[int]:
        """Who has yet to be given to the worker, in order of arrival."""
        return [rid for rid, stream in self._live.items() if not stream.placed]

    def begun(self, rid: int) -> set[int]:
        """Choices that a step has worked on and that are not over."""
        stream = self._live[rid]
        return {index for index in stream.admitted if stream.told[index] is not None}

    def place(self, rid: int) -> Generation:
        """Give a stream to the worker: what to submit there, so that it goes on after the last token told."""
        stream = self._live[rid]
        stream.placed = True
        if not stream.admitted:
            return stream.generation
        told = tuple(None if ids is None else tuple(ids) for ids in stream.told)
        return msgspec.structs.replace(stream.generation, resume=told)

    def displace(self) -> list[int]:
        """The worker is gone: who was computed there, most tokens told first. If nobody was, all whom it had."""
        placed = {rid: stream for rid, stream in self._live.items() if stream.placed}
        for stream in placed.values():
            stream.placed = False
        begun = [rid for rid, stream in placed.items() if stream.admitted]
        return sorted(begun or placed, key=lambda rid: -placed[rid].tokens)
