"""What is known of one request once it is over: the access log and the metrics are both written from this.

Holds numbers, our own names and nothing that a client wrote, so that it may go anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.core.errors import HeadraceError, Limit, Reason, RequestError, ServiceError
from headrace.core.timeline import Timeline

Outcome = Literal["ok", "error", "cancelled", "rejected", "invalid"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "cancelled", "rejected", "invalid")

OTHER = "other"
"""Stands for every path, method and model that is not ours."""

CLIENT_GONE = 499
"""The status in the log when the client left before there was one."""


@dataclass(slots=True)
class Record:
    """Owned by one exchange, complete when its last byte is handed over or its client is gone."""

    request_id: str
    method: str
    route: str
    """A path of the path table, with `{name}` where it takes one; else `OTHER`."""
    timeline: Timeline
    status: int = CLIENT_GONE
    outcome: Outcome = "ok"
    reason: Reason | None = None
    """Why it was refused, if the queue was the reason."""
    limit: Limit | None = None
    """Why it was refused, if a limit of its key was the reason."""
    model: str | None = None
    """A served name; `OTHER` if the client asked for one that is not served; None if the route has no model."""
    engine: str | None = None
    """The one that answered, or was tried last."""
    key: str | None = None
    """The name of the caller's key."""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Between writes that carried text, in s."""
    delays: list[float] = field(default_factory=list)
    """By which pacing held each piece of text back, in s; empty without it."""


def outcome_of(error: HeadraceError) -> Outcome:
    """Whose fault an error is: the caller's, our refusal, or our failure."""
    if isinstance(error, RequestError):
        return "invalid"
    if isinstance(error, ServiceError) and error.status == 503:
        return "rejected"
    return "error"
