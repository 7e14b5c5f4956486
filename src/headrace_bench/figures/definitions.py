"""What the stamps of one request say, in seconds; every figure of every report is defined here.

    base ──────────── sent ───────── first ── gap ── chunk ── gap ── … ── last ────── closed
      │                 └ ttft_service ┘└───────────── tpot · n ─────────────┘          │
      └────────────── ttft ────────────┘                                    │           │
      └──────────────────────────────── e2e ────────────────────────────────┘           │
      └───────────────────────────────────── e2e_closed ────────────────────────────────┘

base     the scheduled time in an open loop, for the client's own delay is the user's too; the dispatched one in a
         closed loop and for a later turn
chunk    an event with text: a role, an empty delta, a comment and the usage are none; reasoning and tool calls are text
gap      between two chunks, raw: two events of one read are 0 apart, and five tokens in one chunk are one gap

Rules: what cannot be told is None, never 0; an answer that did not end as it should keeps its `ttft`, `ttft_service`,
`ttfo` and gaps, `whole` is false, and nobody puts them among those of whole ones; a token count is the server's own
where it gives one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from headrace_bench.figures.stats import median
from headrace_bench.record import Outcome, Record

Source = Literal["usage", "chunks"]
STALL_S = 0.2
STALL_FACTOR = 3.0
TAIL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Pace:
    """When a reader wants the tokens: the first after `first` seconds, then one every `each`."""

    first: float = 1.0
    each: float = 0.1


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """One request. Times in seconds."""

    index: int
    outcome: Outcome
    tag: str
    whole: bool
    """It ended as it should, even without a token."""
    ttft: float | None
    """First chunk - base: the response time."""
    ttft_service: float | None
    """First chunk - sent: what the server owes."""
    ttfo: float | None
    """First chunk that is no reasoning - base."""
    tpot: float | None
    """(last - first) / (tokens - tokens of the first chunk); None when all came at once."""
    gaps: tuple[float, ...]
    longest_gap: float | None
    itl_est: tuple[float, ...]
    """Derived: each gap split over its chunk's tokens, one value a token; where only the total is known, one a gap."""
    tokens_per_chunk: tuple[int, ...] | None
    """None where the server gave a total only and the chunks are not as many."""
    tail: float | None
    """Mean of the longest 10 % of the gaps, at least one; None below 2 gaps."""
    stalls: int | None
    """Gaps longer than max(threshold, 3 · this request's median gap); None without a gap."""
    stalled: float | None
    """Their total time."""
    e2e: float | None
    """Last chunk - base."""
    e2e_closed: float | None
    """The stream was closed - base: the usage and [DONE] included."""
    norm_latency: float | None
    """e2e / tokens."""
    fluidity: float | None
    qoe: float | None
    tokens: int
    """Completion tokens, by `source`."""
    source: Source | None
    """usage: the server's count. chunks: one a chunk, or as the chunks say. None: not a chunk came, nor a count."""
    counted: int
    """What the chunks say, where usage says another number."""


def figures(record: Record, stall_s: float = STALL_S, pace: Pace | None = None) -> RequestFigures:
    """All figures of one request. `pace` (1 s, then 100 ms a token) is what fluidity and QoE are held against."""
    chunks, whole = record.chunks, record.outcome == "ok"
    base = record.dispatched if record.scheduled is None else record.scheduled
    stamps = [chunk.at for chunk in chunks]
    gaps = tuple(later - earlier for earlier, later in pairwise(stamps))
    tokens, source, counted = token_count(record)
    exact = tokens_by_chunk(record, tokens, source)
    spread = exact if exact is not None else _spread(tokens, len(chunks))
    output = next((chunk.at for chunk in chunks if chunk.kind != "reasoning"), None)
    e2e = stamps[-1] - base if whole and stamps else None
    stalls = stalled_gaps(gaps, stall_s)
    arrivals = [at - base for at, n in zip(stamps, spread, strict=True) for _ in range(n)] if whole else []
    wanted = pace or Pace()
    return RequestFigures(
        index=record.index,
        outcome=record.outcome,
        tag=record.tag,
        whole=whole,
        ttft=stamps[0] - base if stamps else None,
        ttft_service=stamps[0] - record.sent if stamps and record.sent is not None else None,
        ttfo=None if output is None else output - base,
        tpot=_tpot(stamps, tokens, spread) if whole else None,
        gaps=gaps,
        longest_gap=max(gaps, default=None),
        itl_est=_split(gaps, exact, tokens) if whole else (),
        tokens_per_chunk=exact,
        tail=tail(gaps),
        stalls=len(stalls) if gaps else None,
        stalled=sum(stalls) if gaps else None,
        e2e=e2e,
        e2e_closed=record.closed - base if whole and record.closed is not None else None,
        norm_latency=e2e / tokens if e2e is not None and tokens > 0 else None,
        fluidity=fluidity(arrivals, wanted),
        qoe=qoe(arrivals, wanted),
        tokens=tokens,
        source=source,
        counted=counted,
    )


def token_count(record: Record) -> tuple[int, Source | None, int]:
    """(tokens, where they come from, what the chunks alone say). A chunk that does not say counts as one token."""
    counted = sum(1 if chunk.tokens is None else chunk.tokens for chunk in record.chunks)
    if record.completion_tokens is not None:
        return record.completion_tokens, "usage", counted
    return counted, "chunks" if record.chunks else None, counted


def tokens_by_chunk(record: Record, tokens: int, source: Source | None) -> tuple[int, ...] | None:
    """Tokens of each chunk where known: as the chunks say, all of a single chunk, or one each where as many came.

    Without any count one each is all there is to say, and `source` says so.
    """
    said = tuple(chunk.tokens for chunk in record.chunks)
    known = tuple(count for count in said if count is not None)
    if not said:
        return ()
    if len(known) == len(said):
        return known
    if source == "usage" and len(said) == 1:
        return (tokens,)
    if source == "chunks" or tokens == len(said):
        return tuple(1 if count is None else count for count in said)
    return None


def tokens_inside(record: Record, found: RequestFigures, start: float, end: float) -> int:
    """Of its tokens, those that came from `start` until `end`; where chunks do not tell, by the share of its chunks."""
    came = [start <= chunk.at < end for chunk in record.chunks]
    by_chunk = tokens_by_chunk(record, found.tokens, found.source)
    if by_chunk is not None:
        return sum(count for count, inside in zip(by_chunk, came, strict=True) if inside)
    return round(found.tokens * sum(came) / len(came))


def _spread(tokens: int, chunks: int) -> tuple[int, ...]:
    """A known total over chunks that do not say: one for the first, the rest as evenly as whole tokens go."""
    if chunks <= 1:
        return (tokens,) * chunks
    rest = max(0, tokens - 1)
    edges = [rest * i // (chunks - 1) for i in range(chunks)]
    return (1, *(later - earlier for earlier, later in pairwise(edges)))


def _tpot(stamps: list[float], tokens: int, spread: tuple[int, ...]) -> float | None:
    if len(stamps) < 2 or tokens <= spread[0]:
        return None
    return (stamps[-1] - stamps[0]) / (tokens - spread[0])


def _split(gaps: tuple[float, ...], exact: tuple[int, ...] | None, tokens: int) -> tuple[float, ...]:
    if exact is not None:
        return tuple(gap / n for gap, n in zip(gaps, exact[1:], strict=True) for _ in range(n)) if gaps else ()
    each = (tokens - 1) / len(gaps) if gaps else 0.0
    return tuple(gap / each for gap in gaps) if each > 0 else ()


def tail(gaps: tuple[float, ...]) -> float | None:
    """Mean of the longest 10 % of a request's gaps, rounded up to whole gaps (Mooncake's time between tokens)."""
    if len(gaps) < 2:
        return None
    longest = sorted(gaps)[-math.ceil(TAIL_SHARE * len(gaps)) :]
    return sum(longest) / len(longest)


def stalled_gaps(gaps: tuple[float, ...], threshold: float = STALL_S) -> list[float]:
    """The gaps a reader sees as a stop: longer than `threshold` and than three times the median of the request."""
    if not gaps:
        return []
    limit = max(threshold, STALL_FACTOR * median(gaps))
    return [gap for gap in gaps if gap > limit]


def fluidity(arrivals: list[float], pace: Pace) -> float | None:
    """Share of deadlines kept, 0 to 1 (Etalon's fluidity index, arXiv 2407.07000); None without a token.

    The first deadline is `pace.first`, then one comes every `pace.each`. A token that is early leaves the rest of its
    time to the next ones; one that is late by x beyond what was left misses floor(x / each) + 1 deadlines, and the
    next deadline counts from when it came. All deadlines that passed are counted, so the share cannot fall below 0.
    """
    if not arrivals:
        return None
    kept, missed, deadline = 0, 0, pace.first
    for at in arrivals:
        # A stamp that is on its deadline but for the rounding of floats is on time.
        late = at - deadline
        if late <= 1e-9:
            kept += 1
            deadline += pace.each
        else:
            missed += math.floor(late / pace.each + 1e-9) + 1
            deadline = at + pace.each
    return kept / (kept + missed)


def qoe(arrivals: list[float], pace: Pace) -> float | None:
    """1 - S_delay / S_whole, 0 to 1 (Andes' quality of experience, arXiv 2404.16283); None without a token.

    Expected: token i at e_i = first + i · each. Read: at r_i = max(its arrival, r_(i-1) + each), for nobody reads
    faster than the pace, however the tokens are bunched. With the end T = max(last r, last e), S_whole is the sum of
    T - e_i, the area under the expected curve up to T, and S_delay the sum of max(0, r_i - e_i), the area between it
    and what was read where that is behind. A single token is 1 in time and 0 late.
    """
    if not arrivals:
        return None
    expected = [pace.first + i * pace.each for i in range(len(arrivals))]
    read = list(accumulate(arrivals, lambda before, at: max(at, before + pace.each)))
    end = max(read[-1], expected[-1])
    whole = sum(end - e for e in expected)
    delay = sum(max(0.0, r - e) for r, e in zip(read, expected, strict=True))
    return 1.0 if delay <= 1e-9 else min(1.0, max(0.0, 1 - delay / whole))
