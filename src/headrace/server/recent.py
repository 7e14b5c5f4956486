"""The latest requests, so that somebody who has only a request's id can ask where its milliseconds went.

Rules: bounded; a caller finds its own requests only; nothing that a client wrote is kept but the id.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from headrace.observe.record import Record

KEPT = 1000
"""Requests; about 1 KB each."""


class Recent:
    """Of two requests with one id, the later one is found."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._reports: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, caller: str, record: Record) -> None:
        """`record` is complete. `caller`: whose it was, as `owner_of` says."""
        key = caller, record.request_id
        self._reports[key] = _report(record)
        self._reports.move_to_end(key)
        if len(self._reports) > self._kept:
            self._reports.popitem(last=False)

    def find(self, caller: str, request_id: str) -> dict[str, Any] | None:
        """What is known of it, times in ms; None: it was none of this caller's, or it is long ago."""
        return self._reports.get((caller, request_id))


def _report(record: Record) -> dict[str, Any]:
    # The record itself would keep a number for every token.
    return {
        "request_id": record.request_id,
        "model": record.model,
        "engine": record.engine,
        "status": record.status,
        "outcome": record.outcome,
        "stream": record.stream,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "total_ms": round(record.total_s * 1e3, 3),
        "longest_gap_ms": round(max(record.gaps) * 1e3, 3) if record.gaps else None,
        "timeline": record.timeline.report(),
    }
