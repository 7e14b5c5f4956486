"""The access log: one JSON object a line for every request, never with content.

Everything in a line is a number or one of our own names; the request id is the one exception, and it was either made by
us or matched a strict pattern. JSON escapes control characters, so a line is a line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.observe.record import Record

LOGGER = "headrace.access"


def entry(record: Record, at: float) -> dict[str, Any]:
    """The line's object. `at`: Unix time of the end of the request, in s. Times inside are in ms."""
    ttft = record.timeline.ttft()
    return {
        "ts": round(at, 3),
        "request_id": record.request_id,
        "method": record.method,
        "path": record.route,
        "status": record.status,
        "outcome": record.outcome,
        "model": record.model,
        "engine": record.engine,
        "attempts": len(record.timeline.attempts),
        "key": record.key,
        "stream": record.stream,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "stages": {name: round(ms, 3) for name, ms in record.timeline.stages().items()},
        "ttft_ms": None if ttft is None else round(ttft, 3),
        "total_ms": round(record.total_s * 1e3, 3),
    }


class AccessLog:
    """Writes records to the logger `headrace.access` at INFO. `wall` gives Unix time in s."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._logger = logging.getLogger(LOGGER)

    def write(self, record: Record) -> None:
        if self._logger.isEnabledFor(logging.INFO):
            self._logger.info("%s", msgspec.json.encode(entry(record, self._wall())).decode())
