"""The shape of `summary.json`, version 1. Every field is explained in docs/reference/bench_summary.md.

    Summary ─ valid, invalid, notes           on top: whether the run counts
            ├ counts, attainment, figures     of all requests of the measured window
            ├ tags: name → Part               the same, of each part a load plays
            └ rates, arrivals, lengths, chunks, tokens, cache, stages, split, health

Rules: times are milliseconds and their names end in _ms; what is not known is null, never 0 and never NaN; fields are
added without a new version, and one is never renamed or given another meaning in the same version.
"""

from __future__ import annotations

import msgspec

SCHEMA = 1


class Value(msgspec.Struct, frozen=True):
    """A figure with its 95 % interval; null where the samples cannot bound it."""

    value: float
    low: float | None = None
    high: float | None = None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How a figure is spread over requests."""

    count: int
    """Samples: those in which the figure is defined."""
    mean: Value | None = None
    p50: Value | None = None
    p90: Value | None = None
    p95: Value | None = None
    p99: Value | None = None
    """Null below 368 samples."""
    max: float | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests of the window."""

    scheduled: int
    """Those that were due in it, or begun in it by a closed loop."""
    completed: int
    empty: int
    """Completed without a token."""
    resent: int = 0
    """Sent again, as a kept connection turned out closed at once."""
    failed: int
    by_outcome: dict[str, int]
    """The failed ones by class; `never_sent` are due ones that no record tells of."""
    by_status: dict[str, int]
    """Of the class http, by status."""
    tokens: int
    """Completion tokens of completed requests."""
    partial_ttft_ms: Spread
    """First tokens of answers that failed afterwards. Not in any other figure."""


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """One limit of the SLO."""

    limit_ms: float
    attainment: Value | None
    """Requests that keep it, of all scheduled."""


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """How many were good: whole, not empty, every limit kept."""

    slo: str
    good: int
    goodput_per_s: float | None
    """Good ones per second of the window."""
    attainment: Value | None
    """Good ones of all scheduled, with Wilson's interval."""
    limits: dict[str, Limit]
    apdex: float | None
    """Of the response time against the SLO's, or of the whole answer where only that has a limit."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of completed requests only."""

    ttft_ms: Spread
    ttft_service_ms: Spread
    ttfo_ms: Spread
    tpot_ms: Spread
    gap_ms: Spread
    """All gaps of all requests; the intervals draw requests, not gaps."""
    longest_gap_ms: Spread
    """Of each request."""
    itl_est_ms: Spread
    """Derived: gaps split over the tokens of their chunks."""
    tail_ms: Spread
    stalls: Spread
    """Stalls in a request."""
    stalled_ms: Spread
    e2e_ms: Spread
    e2e_closed_ms: Spread
    norm_latency_ms: Spread
    fluidity: Spread
    qoe: Spread


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one tag."""

    counts: Counts
    attainment: Attainment
    figures: Figures


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Per second of the window."""

    asked_per_s: float | None
    """Due in it; null in a closed loop."""
    sent_per_s: float | None
    """Dispatched in it; of an open loop only what had a time, as `asked_per_s`."""
    completed_per_s: float | None
    """Answers that ended inside it."""
    tokens_per_s: float | None
    """Tokens of completed requests that came inside it."""


class Dispersion(msgspec.Struct, frozen=True, kw_only=True):
    """Variance over mean of the arrivals a window; 1 is Poisson. Null below 5 windows."""

    window_s: float
    offered: float | None
    """By the schedule."""
    achieved: float | None
    """By the times of dispatch; of an open loop only of what had a time, as `offered`."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """In tokens, of completed requests."""

    prompt_asked: Spread
    prompt_counted: Spread
    """By the server's usage."""
    output_asked: Spread
    output_achieved: Spread


class Chunks(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens came bundled."""

    tokens_per_chunk: dict[str, int]
    """Tokens → chunks, of those requests that tell."""
    untold: int
    """Requests of which only the total is known."""
    mean: float | None
    """Tokens over chunks, of all."""
    note: str | None
    """Said where chunks are not tokens, beside every time between them."""


class TokenSources(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by where their token count comes from."""

    usage: int
    chunks: int
    differ: int
    """Both are known and differ."""
    by_usage: int
    """Tokens of those that differ, by usage."""
    by_chunks: int
    """And by their chunks."""


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that the server had already, where it says so."""

    requests: int
    cached_tokens: int
    share: float | None
    """Of the prompt tokens of these requests."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A TTFT in three: the client's and the connection's part up to sending, the server's own, what is left."""

    client_ms: Spread
    network_ms: Spread
    server_ms: Spread


class ClientHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the client and the machine did meanwhile."""

    lag_p50_ms: float | None
    lag_p99_ms: float | None
    lag_max_ms: float | None
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    cpu: float
    gc_pauses: int
    gc_longest_ms: float
    load_average: float
    steal: float | None
    asked_rate: float | None
    sent_rate: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`."""

    schema: int = SCHEMA
    valid: bool
    invalid: tuple[str, ...]
    """Why the run does not count."""
    notes: tuple[str, ...]
    kind: str
    loop: str
    """open or closed: what TTFT and end-to-end times count from."""
    seed: int
    warmup_s: float
    window_s: float
    stall_ms: float
    effective: float | None
    """Independent requests that tell as much about TTFT as these; the intervals count so many."""
    counts: Counts
    attainment: Attainment
    figures: Figures
    tags: dict[str, Part]
    """Empty where all requests have the same one."""
    rates: Rates
    arrivals: tuple[Dispersion, ...]
    lengths: Lengths
    chunks: Chunks
    tokens: TokenSources
    cache: Cache
    stages: dict[str, Spread]
    """The server's own stages of TTFT in ms, where it tells them."""
    split: Split | None
    health: ClientHealth
