"""What is asked and when: drawn whole before the start, from one seed, and stored with the result.

    open loop     each request has its time; nobody waits for an answer
    closed loop   `users` people; each takes the next request when the last was answered and thought about
    sessions      requests of one session are turns: the first has a time (or a user), the next comes `think` after the
                  answer, with the conversation so far, the answers that really came included, before its own messages

Rules: times are seconds from the start of the load; nothing here is drawn while the load runs; a request is in exactly
one phase, and only `measure` counts.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Phase = Literal["warmup", "measure"]


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One request to come."""

    index: int
    """Its place in the schedule, from 0."""
    at: float | None
    """Seconds from the start; None in a closed loop, and for a turn that follows another."""
    messages: tuple[dict[str, str], ...]
    """Chat messages; of a later turn, those that are new in it."""
    max_tokens: int
    prompt_tokens: int
    """As asked for when the prompt was drawn; what the server counts is in its usage."""
    phase: Phase = "measure"
    tag: str = ""
    """The part it plays, in a load that has several: reader, long, short."""
    session: int | None = None
    turn: int = 0
    think: float = 0.0
    """Seconds between the answer before it and this request, in a closed loop or a later turn."""
    hang_up: float | None = None
    """Seconds after sending at which the client leaves."""
    extra: dict[str, Any] = {}
    """More fields of the request's body."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run's requests, in order of time."""

    seed: int
    kind: str
    """The arrivals in words that make them again: `poisson 4.0/s`, `trace azure_conv ×0.5`, `closed 16 users`."""
    users: int | None
    """Of a closed loop; None for an open one."""
    duration: float
    """Seconds in which `measure` requests are due (open) or may be begun (closed): the window of rates and goodput."""
    warmup: float
    """Seconds before that: the window begins here."""
    requests: tuple[Planned, ...]
    finite: bool = False
    """A closed loop that is meant to be over once all requests were answered; otherwise that is a window cut short."""
    notes: tuple[str, ...] = ()
    """What a reader of the report has to know: lengths divided by 8, clipped at 512, times spread over ticks."""
