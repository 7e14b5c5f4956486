"""What happened to one request: stamps and counts, nothing computed. One line of `requests.jsonl`.

    scheduled ─ dispatched ─ connected ─ sent ─ headers ─ first_byte ─ first_event ─ chunks … ─ done ─ closed

Rules: stamps are seconds on one monotonic clock, from the start of the load; one stamp a socket read, and all events of
a read have it; an event is stamped by the read that completed it; None is "did not happen", never 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["text", "reasoning", "tool"]
Outcome = Literal["ok", "http", "stream_error", "truncated", "timeout", "connect", "protocol", "hung_up", "unfinished"]
"""How it ended.

ok: a stream that ended as it should, even without a token. http: a status of 400 and more. stream_error: an error event
inside a 200. truncated: it closed without [DONE]. timeout: silent for too long. connect: no connection. protocol: not
HTTP or not an event stream. hung_up: the client left as its schedule says. unfinished: the load's drain ended first.
"""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """An event that carried text."""

    at: float
    kind: Kind
    size: int
    """Bytes of its text, in UTF-8."""
    tokens: int | None = None
    """Where the server counts them event by event."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request's life, as this end of the socket saw it."""

    index: int
    """Of its `Planned`."""
    scheduled: float | None
    """None in a closed loop and for later turns of a session: nobody was to send it at a certain time."""
    dispatched: float
    """When its task began."""
    outcome: Outcome
    phase: str = "measure"
    tag: str = ""
    session: int | None = None
    turn: int = 0
    max_tokens: int = 0
    connected: float | None = None
    reused: bool = False
    """The connection was open already."""
    resent: bool = False
    """A kept connection turned out closed at once, so it was sent again on a new one; what follows is of that."""
    sent: float | None = None
    """The last byte of the request was handed to the kernel."""
    headers: float | None = None
    first_byte: float | None = None
    """Of the body."""
    first_event: float | None = None
    """Comments are none."""
    chunks: tuple[Chunk, ...] = ()
    done: float | None = None
    """[DONE] was read."""
    closed: float | None = None
    status: int | None = None
    error: str | None = None
    """The server's own words, one line of at most 200 characters."""
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """All three by the server's usage."""
    server: dict[str, float | None] | None = None
    """A Headrace's own timeline: stage → ms, `ttft`, `cached_tokens`."""
    request_id: str | None = None
    text: str | None = None
    """Only where a verb asks for it: text is not written to disk."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the client and the machine did meanwhile. Times in seconds."""

    lag_p50: float | None
    """dispatched - scheduled, of an open loop."""
    lag_p99: float | None
    lag_max: float | None
    loop_lag_p99: float
    """How late a timer of the client's event loop fires, in the window."""
    loop_lag_max: float
    cpu: float
    """CPU seconds of the client per second of the window; 1 is one core."""
    gc_pauses: int
    gc_longest: float
    load_average: float
    steal: float | None
    """Share of the machine's time that its host took; None where it does not say."""
    asked_rate: float | None
    """Requests per second that were due in the window, of an open loop."""
    sent_rate: float | None
    """Of these, requests per second that were dispatched, by the window's end and what may be late."""
    invalid: tuple[str, ...] = ()
    """Why the run does not count, a line each; empty: it does."""
