"""One request's answer as it comes in: stamps and events in, a Record out.

    sent ─► head ─► body … ─► ended      the message is whole
                       └────► broken     it is not, and why

Rules: every stamp is handed in, by whoever read the socket; what decides the outcome is decided once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace_bench.client import sse
from headrace_bench.load.schedule import Planned
from headrace_bench.record import Chunk, Kind, Outcome, Record

KEPT = 1 << 16
"""Bytes of a body that is no stream which are kept for the server's words."""


class Head(msgspec.Struct, frozen=True):
    """Status and headers of a response. Names are in lower case; of several with one name, the last."""

    status: int
    headers: dict[str, str]


class Answer:
    """What has come so far."""

    def __init__(self, planned: Planned, dispatched: float, *, keep_text: bool, headrace: bool) -> None:
        self._planned = planned
        self._dispatched = dispatched
        self._headrace = headrace
        self._texts: list[str] | None = [] if keep_text else None
        self.connected: float | None = None
        self.reused = False
        self.resent = False
        self.sent: float | None = None
        self.done: float | None = None
        self.over: Outcome | None = None
        """Set once: nothing that comes later counts."""
        self._closed: float | None = None
        self._head: Head | None = None
        self._headers: float | None = None
        self._first_byte: float | None = None
        self._first_event: float | None = None
        self._splitter = sse.Splitter()
        self._body = bytearray()
        self._chunks: list[tuple[float, Kind, int, int | None]] = []
        """At, kind, bytes, the server's count after it."""
        self._finish: str | None = None
        self._usage = sse.Usage()
        self._timeline: Mapping[str, Any] | None = None
        self._error: str | None = None
        self._fault: Outcome | None = None
        """What an event said that makes it fail."""

    def head(self, head: Head, at: float) -> None:
        """Status and headers are complete."""
        self._head, self._headers = head, at

    def body(self, data: bytes, at: float) -> None:
        """More of the body."""
        if self._first_byte is None:
            self._first_byte = at
        if self._head is None or self._head.status != 200:
            self._keep(data)
            return
        if self._first_event is None:
            self._keep(data)
        for event in self._splitter.feed(data):
            self._take(event, at)

    def ended(self, at: float) -> None:
        """The message is complete."""
        for event in self._splitter.end():
            self._take(event, at)
        self._closed = at
        self._settle(self._judged())

    def broken(self, at: float, outcome: Outcome, why: str | None) -> None:
        """It ends here, before its message was complete. What was done by then stays done."""
        if self.over is not None:
            return
        self._closed = at
        settled = self.done is not None or self._fault is not None
        if outcome == "truncated" and self._head is not None:
            for event in self._splitter.end():
                self._take(event, at)
            settled = True
        if settled:
            outcome = self._judged()
        if outcome != "ok" and self._error is None:
            self._error = why
        self._settle(outcome)

    def stood_open(self) -> None:
        """[DONE] was there long ago and the message has no end: `closed` stays None."""
        self._settle(self._judged())

    def record(self) -> Record:
        """All of it; to be called once it is over."""
        planned, head, usage = self._planned, self._head, self._usage
        headers = head.headers if head is not None else {}
        return Record(
            index=planned.index,
            scheduled=planned.at,
            dispatched=self._dispatched,
            outcome=self.over or "unfinished",
            phase=planned.phase,
            tag=planned.tag,
            session=planned.session,
            turn=planned.turn,
            max_tokens=planned.max_tokens,
            connected=self.connected,
            reused=self.reused,
            resent=self.resent,
            sent=self.sent,
            headers=self._headers,
            first_byte=self._first_byte,
            first_event=self._first_event,
            chunks=self._counted(),
            done=self.done,
            closed=self._closed,
            status=None if head is None else head.status,
            error=None if self._error is None else sse.one_line(self._error),
            finish=self._finish,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            cached_tokens=usage.cached,
            server=self._server(headers),
            request_id=headers.get("x-request-id"),
            text=None if self._texts is None else "".join(self._texts),
        )

    def _keep(self, data: bytes) -> None:
        room = KEPT - len(self._body)
        if room > 0:
            self._body += data[:room]

    def _take(self, event: sse.Event, at: float) -> None:
        if self._first_event is None:
            self._first_event = at
        if self.done is not None:
            return
        said = sse.read(event)
        if said.done:
            self.done = at
            return
        if said.error is not None or said.malformed:
            if self._fault is None:
                self._fault = "protocol" if said.malformed else "stream_error"
                self._error = said.error or "an event is not JSON: " + event.data.decode(errors="replace")
            return
        if said.usage is not None:
            self._usage = said.usage
        self._text(said, at)
        if said.finish is not None:
            self._finish = said.finish
        if said.timeline is not None:
            self._timeline = said.timeline

    def _text(self, said: sse.Said, at: float) -> None:
        count = said.usage.completion if said.usage is not None else None
        if said.reasoning:
            self._chunks.append((at, "reasoning", len(said.reasoning.encode(errors="replace")), count))
        if said.text:
            self._chunks.append((at, "text", len(said.text.encode(errors="replace")), count))
            if self._texts is not None:
                self._texts.append(said.text)
        if said.tool:
            self._chunks.append((at, "tool", len(said.tool.encode(errors="replace")), count))

    def _counted(self) -> tuple[Chunk, ...]:
        """With tokens a chunk, if every chunk came with the count so far. A usage that only the last one carries is the
        whole answer's, not its own."""
        counts = [count for *_, count in self._chunks]
        if None in counts:
            return tuple(Chunk(at, kind, size) for at, kind, size, _ in self._chunks)
        before, chunks = 0, []
        for at, kind, size, count in self._chunks:
            after = max(before, count or 0)
            chunks.append(Chunk(at, kind, size, after - before))
            before = after
        return tuple(chunks)

    def _judged(self) -> Outcome:
        """The outcome of a message that came to its end or was cut."""
        head = self._head
        if head is None:
            return "truncated"
        if head.status >= 400:
            self._error = self._error or sse.refusal(bytes(self._body)) or None
            return "http"
        if head.status != 200 or (self._first_event is None and "event-stream" not in self._type):
            self._error = f"status {head.status}, {self._type or 'no content type'}: no event stream: " + sse.refusal(
                bytes(self._body)
            )
            return "protocol"
        if self._fault is not None:
            return self._fault
        return "ok" if self.done is not None else "truncated"

    @property
    def _type(self) -> str:
        return self._head.headers.get("content-type", "") if self._head is not None else ""

    def _settle(self, outcome: Outcome) -> None:
        if self.over is None:
            self.over = outcome

    def _server(self, headers: Mapping[str, str]) -> dict[str, float | None] | None:
        if self._timeline is not None:
            return {
                name: None if value is None else float(value)
                for name, value in self._timeline.items()
                if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
            }
        if self._headrace and "server-timing" in headers:
            return sse.server_timing(headers["server-timing"]) or None
        return None
