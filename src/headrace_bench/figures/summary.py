"""From records to a summary: `summarise` counts, and `schema` says what each field is.

    schedule, records ── only those of the window ──┬─ whole answers ── figures: percentiles with intervals
                                                    ├─ failed ones ──── counts by class; their first tokens apart
                                                    └─ all scheduled ── attainment, goodput

Rules: warm-up counts nowhere; a failure is in no latency and in every attainment, so a server cannot look better by
failing fast; a request that was due and has no record is a failure too; intervals are for 95 %, order-statistic ones
narrowed by the requests' own autocorrelation, for gaps by drawing requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec
import numpy as np

from headrace_bench.figures import stats
from headrace_bench.figures.definitions import STALL_S, RequestFigures, figures, tokens_inside
from headrace_bench.figures.schema import (
    Attainment,
    Cache,
    Chunks,
    ClientHealth,
    Counts,
    Dispersion,
    Figures,
    Lengths,
    Limit,
    Part,
    Rates,
    Split,
    Spread,
    Summary,
    TokenSources,
    Value,
)
from headrace_bench.figures.slo import Slo, apdex
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Health, Record

__all__ = ["Summary", "decode", "encode", "summarise"]

MS = 1000.0
DISPERSION_WINDOWS = (1.0, 10.0, 60.0)
NOT_STAGES = frozenset({"ttft", "cached_tokens"})


def encode(summary: Summary) -> bytes:
    """Strict JSON, for people too: two spaces, a final newline."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def decode(data: bytes) -> Summary:
    """msgspec.ValidationError for another schema's."""
    return msgspec.json.decode(data, type=Summary)


def summarise(
    schedule: Schedule, records: Iterable[Record], health: Health, slo: Slo, stall_s: float = STALL_S
) -> Summary:
    """All that a report says about one run."""
    pairs = [(record, figures(record, stall_s)) for record in records if record.phase == "measure"]
    pairs.sort(key=lambda pair: (pair[0].dispatched if pair[0].scheduled is None else pair[0].scheduled, pair[0].index))
    whole = [(record, found) for record, found in pairs if found.whole]
    done = [found for _, found in whole]
    ttfts = [found.ttft for found in done if found.ttft is not None]
    chunks = _chunks(whole)
    missing = never_sent(schedule, records=[record for record, _ in pairs])
    names = {record.tag for record, _ in pairs} | set(missing)
    return Summary(
        valid=not health.invalid,
        invalid=health.invalid,
        notes=schedule.notes + ((chunks.note,) if chunks.note else ()),
        kind=schedule.kind,
        loop="open" if schedule.users is None else "closed",
        seed=schedule.seed,
        warmup_s=schedule.warmup,
        window_s=schedule.duration,
        stall_ms=stall_s * MS,
        effective=stats.effective_n(ttfts) if ttfts else None,
        counts=_counts(pairs, missing.total()),
        attainment=_attainment([found for _, found in pairs], missing.total(), slo, schedule.duration),
        figures=_figures(done),
        tags={
            name: _part([pair for pair in pairs if pair[0].tag == name], missing[name], slo, schedule.duration)
            for name in sorted(names)
        }
        if len(names) > 1
        else {},
        rates=_rates(schedule, whole, [record for record, _ in pairs]),
        arrivals=_arrivals(schedule, [record for record, _ in pairs]),
        lengths=_lengths(schedule, whole),
        chunks=chunks,
        tokens=_token_sources(whole),
        cache=_cache([record for record, _ in whole]),
        stages=_stages([record for record, _ in whole]),
        split=_split(whole),
        health=_health(health),
    )


def never_sent(schedule: Schedule, records: Sequence[Record]) -> Counter[str]:
    """Measured requests that had a time and left no record, by tag."""
    seen = {record.index for record in records}
    due = (planned for planned in schedule.requests if planned.phase == "measure" and planned.at is not None)
    return Counter(planned.tag for planned in due if planned.index not in seen)


def spread(values: Sequence[float], scale: float = 1.0) -> Spread:
    """Of values in the order of time, one a request, multiplied by `scale`."""
    scaled = [value * scale for value in values]
    if not scaled:
        return Spread(count=0)
    counted = stats.effective_n(scaled)
    ordered = sorted(scaled)
    p50, p90, p95, p99 = (_value(stats.estimate(ordered, p, counted)) for p in (50, 90, 95, 99))
    return Spread(
        count=len(scaled), mean=_value(stats.mean(scaled, counted)), p50=p50, p90=p90, p95=p95, p99=p99, max=ordered[-1]
    )


def pooled_spread(groups: Sequence[Sequence[float]], scale: float = 1.0) -> Spread:
    """Of several values a request: the requests are drawn for the intervals. The mean has none."""
    values = list(chain.from_iterable(groups))
    if not values:
        return Spread(count=0)
    found = stats.pooled(groups, (50, 90, 95, 99), np.random.default_rng(len(values)))
    p50, p90, p95, p99 = (_value(found[p], scale) for p in (50, 90, 95, 99))
    mean = Value(sum(values) / len(values) * scale)
    return Spread(count=len(values), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=max(values) * scale)


def _value(estimate: stats.Estimate | None, scale: float = 1.0) -> Value | None:
    if estimate is None:
        return None
    low, high = (None if end is None else end * scale for end in (estimate.low, estimate.high))
    return Value(estimate.value * scale, low, high)


Pair = tuple[Record, RequestFigures]


def _part(pairs: Sequence[Pair], missing: int, slo: Slo, duration: float) -> Part:
    found = [found for _, found in pairs]
    return Part(
        counts=_counts(pairs, missing),
        attainment=_attainment(found, missing, slo, duration),
        figures=_figures([one for one in found if one.whole]),
    )


def _counts(pairs: Sequence[Pair], missing: int) -> Counts:
    whole = [found for _, found in pairs if found.whole]
    failed = [(record, found) for record, found in pairs if not found.whole]
    classes = Counter[str](record.outcome for record, _ in failed)
    if missing:
        classes["never_sent"] = missing
    statuses = Counter(str(record.status) for record, _ in failed if record.outcome == "http")
    return Counts(
        scheduled=len(pairs) + missing,
        completed=len(whole),
        empty=sum(found.ttft is None for found in whole),
        resent=sum(record.resent for record, _ in pairs),
        failed=len(failed) + missing,
        by_outcome=dict(sorted(classes.items())),
        by_status=dict(sorted(statuses.items())),
        tokens=sum(found.tokens for found in whole),
        partial_ttft_ms=_of([found for _, found in failed], lambda found: found.ttft, MS),
    )


def _attainment(found: Sequence[RequestFigures], missing: int, slo: Slo, duration: float) -> Attainment:
    good = sum(slo.met(one) for one in found)
    kept = Counter(name for one in found for name, ok in slo.kept(one).items() if ok)
    scheduled = len(found) + missing
    measured = [((one.ttft if slo.ttft is not None else one.e2e) if one.whole else None) for one in found]
    target = slo.ttft if slo.ttft is not None else slo.e2e
    return Attainment(
        slo=slo.name,
        good=good,
        goodput_per_s=_per_second(good, duration),
        attainment=_value(stats.wilson(good, scheduled)),
        limits={
            name: Limit(limit_ms=limit * MS, attainment=_value(stats.wilson(kept[name], scheduled)))
            for name, limit in slo.limits().items()
        },
        apdex=None if target is None else apdex([*measured, *[None] * missing], target),
    )


def _of(found: Sequence[RequestFigures], pick: Callable[[RequestFigures], float | None], scale: float = 1.0) -> Spread:
    return spread([value for one in found if (value := pick(one)) is not None], scale)


def _figures(done: Sequence[RequestFigures]) -> Figures:
    return Figures(
        ttft_ms=_of(done, lambda one: one.ttft, MS),
        ttft_service_ms=_of(done, lambda one: one.ttft_service, MS),
        ttfo_ms=_of(done, lambda one: one.ttfo, MS),
        tpot_ms=_of(done, lambda one: one.tpot, MS),
        gap_ms=pooled_spread([one.gaps for one in done], MS),
        longest_gap_ms=_of(done, lambda one: one.longest_gap, MS),
        itl_est_ms=pooled_spread([one.itl_est for one in done], MS),
        tail_ms=_of(done, lambda one: one.tail, MS),
        stalls=_of(done, lambda one: one.stalls),
        stalled_ms=_of(done, lambda one: one.stalled, MS),
        e2e_ms=_of(done, lambda one: one.e2e, MS),
        e2e_closed_ms=_of(done, lambda one: one.e2e_closed, MS),
        norm_latency_ms=_of(done, lambda one: one.norm_latency, MS),
        fluidity=_of(done, lambda one: one.fluidity),
        qoe=_of(done, lambda one: one.qoe),
    )


def _per_second(count: float, duration: float) -> float | None:
    return count / duration if duration > 0 else None


def _rates(schedule: Schedule, whole: Sequence[Pair], records: Sequence[Record]) -> Rates:
    start, duration = schedule.warmup, schedule.duration
    due = [p for p in schedule.requests if p.phase == "measure" and p.at is not None]

    def inside(at: float | None) -> bool:
        return at is not None and start <= at < start + duration

    tokens = sum(tokens_inside(record, found, start, start + duration) for record, found in whole)
    ends = [record.chunks[-1].at if record.chunks else record.closed for record, _ in whole]
    return Rates(
        asked_per_s=_per_second(len(due), duration) if schedule.users is None else None,
        sent_per_s=_per_second(sum(inside(record.dispatched) for record in _loaded(schedule, records)), duration),
        completed_per_s=_per_second(sum(map(inside, ends)), duration),
        tokens_per_s=_per_second(tokens, duration),
    )


def _loaded(schedule: Schedule, records: Sequence[Record]) -> list[Record]:
    """What the load itself sent: of an open loop what had a time, for later turns come when the server has answered."""
    return [record for record in records if schedule.users is not None or record.scheduled is not None]


def _arrivals(schedule: Schedule, records: Sequence[Record]) -> tuple[Dispersion, ...]:
    offered = [p.at for p in schedule.requests if p.phase == "measure" and p.at is not None]
    achieved = [record.dispatched for record in _loaded(schedule, records)]
    start, end = schedule.warmup, schedule.warmup + schedule.duration
    return tuple(
        Dispersion(
            window_s=window,
            offered=stats.dispersion(offered, window, start, end) if schedule.users is None else None,
            achieved=stats.dispersion(achieved, window, start, end),
        )
        for window in DISPERSION_WINDOWS
    )


def _lengths(schedule: Schedule, whole: Sequence[Pair]) -> Lengths:
    asked = {planned.index: planned.prompt_tokens for planned in schedule.requests}
    return Lengths(
        prompt_asked=spread([asked[record.index] for record, _ in whole if record.index in asked]),
        prompt_counted=spread([n for record, _ in whole if (n := record.prompt_tokens) is not None]),
        output_asked=spread([record.max_tokens for record, _ in whole]),
        output_achieved=spread([found.tokens for _, found in whole if found.source is not None]),
    )


def _chunks(whole: Sequence[Pair]) -> Chunks:
    found = [found for record, found in whole if record.chunks]
    count = sum(len(record.chunks) for record, _ in whole)
    told = Counter(n for one in found for n in one.tokens_per_chunk or ())
    untold = sum(one.tokens_per_chunk is None for one in found)
    mean = sum(one.tokens for one in found) / count if count else None
    p99 = stats.percentile(list(told.elements()), 99)
    note = None
    if p99 is not None and p99 > 1:
        note = f"chunks carry up to {p99:.0f} tokens (p99): gaps are between chunks, not between tokens"
    elif untold and mean is not None and abs(mean - 1) > 0.01:
        note = f"{mean:.2f} tokens a chunk in the mean: gaps are between chunks, not between tokens"
    return Chunks(tokens_per_chunk={str(n): told[n] for n in sorted(told)}, untold=untold, mean=mean, note=note)


def _token_sources(whole: Sequence[Pair]) -> TokenSources:
    sources = Counter(found.source for _, found in whole)
    differ = [found for _, found in whole if found.source == "usage" and found.tokens != found.counted]
    return TokenSources(
        usage=sources["usage"],
        chunks=sources["chunks"],
        differ=len(differ),
        by_usage=sum(found.tokens for found in differ),
        by_chunks=sum(found.counted for found in differ),
    )


def _cache(records: Sequence[Record]) -> Cache:
    told = [(r.cached_tokens, r.prompt_tokens) for r in records if r.cached_tokens is not None and r.prompt_tokens]
    cached, prompts = sum(c for c, _ in told if c is not None), sum(p for _, p in told if p is not None)
    return Cache(requests=len(told), cached_tokens=cached, share=cached / prompts if prompts else None)


def _stages(records: Sequence[Record]) -> dict[str, Spread]:
    values: dict[str, list[float]] = {}
    for record in records:
        for name, ms in (record.server or {}).items():
            if ms is not None and name not in NOT_STAGES:
                values.setdefault(name, []).append(ms)
    return {name: spread(found) for name, found in values.items()}


def _split(whole: Sequence[Pair]) -> Split | None:
    """client: base to sent. server: its own TTFT. network: what is left, and so every error of the other two."""
    client, network, server = list[float](), list[float](), list[float]()
    for record, found in whole:
        own = (record.server or {}).get("ttft")
        if own is None or found.ttft is None or found.ttft_service is None:
            continue
        client.append(found.ttft - found.ttft_service)
        server.append(own / MS)
        network.append(found.ttft_service - own / MS)
    if not server:
        return None
    return Split(client_ms=spread(client, MS), network_ms=spread(network, MS), server_ms=spread(server, MS))


def _health(health: Health) -> ClientHealth:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * MS

    return ClientHealth(
        lag_p50_ms=ms(health.lag_p50),
        lag_p99_ms=ms(health.lag_p99),
        lag_max_ms=ms(health.lag_max),
        loop_lag_p99_ms=health.loop_lag_p99 * MS,
        loop_lag_max_ms=health.loop_lag_max * MS,
        cpu=health.cpu,
        gc_pauses=health.gc_pauses,
        gc_longest_ms=health.gc_longest * MS,
        load_average=health.load_average,
        steal=health.steal,
        asked_rate=health.asked_rate,
        sent_rate=health.sent_rate,
    )
