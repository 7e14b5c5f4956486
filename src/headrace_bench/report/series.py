"""What of a run is drawn: one point a request, in milliseconds, with its parts.

Rules: warm-up is left out. A latency belongs to requests that ended well; a failed one keeps its place in time and its
class. `at` is when it was due, or begun where nobody was to send it at a certain time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace_bench.figures.definitions import figures
from headrace_bench.record import Outcome, Record
from headrace_bench.report.stages import Split, split


@dataclass(frozen=True, slots=True)
class Point:
    """A request. None: not reached, or it failed."""

    index: int
    at: float
    """Seconds from the start of the load."""
    outcome: Outcome
    ttft: float | None
    service: float | None
    """TTFT from sent."""
    e2e: float | None
    gaps: tuple[tuple[float, float], ...]
    """(seconds from the start at which the gap ended, its length)."""
    prompt_tokens: int | None
    cached_tokens: int
    split: Split | None
    tag: str = ""
    request_id: str | None = None
    error: str | None = None


def points(records: Iterable[Record]) -> list[Point]:
    """In order of time."""
    return sorted((_point(one) for one in records if one.phase == "measure"), key=lambda point: (point.at, point.index))


def _point(record: Record) -> Point:
    found = figures(record)
    whole = found.whole
    return Point(
        index=record.index,
        at=record.dispatched if record.scheduled is None else record.scheduled,
        outcome=record.outcome,
        ttft=_ms(found.ttft) if whole else None,
        service=_ms(found.ttft_service) if whole else None,
        e2e=_ms(found.e2e),
        gaps=tuple((chunk.at, gap * 1e3) for chunk, gap in zip(record.chunks[1:], found.gaps, strict=True))
        if whole
        else (),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=_cached(record),
        split=split(record) if whole else None,
        tag=record.tag,
        request_id=record.request_id,
        error=record.error,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _cached(record: Record) -> int:
    told = (record.server or {}).get("cached_tokens")
    return int(told) if told is not None else record.cached_tokens or 0


def slowest(of: Sequence[Point], count: int = 50) -> list[Point]:
    """Those with the longest TTFT, longest first."""
    told = [point for point in of if point.ttft is not None]
    return sorted(told, key=lambda point: (-(point.ttft or 0.0), point.index))[:count]
