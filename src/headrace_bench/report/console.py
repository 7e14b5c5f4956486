"""What a terminal shows: how a load goes on, then one table.

    on_record ─► counts, log buckets ─┐           the loop's thread; microseconds
                                      ├─► a line  a thread of its own, 4 times a second
    elapsed, schedule ────────────────┘

Rules: the display lives in the client's process, so it must cost next to nothing there: a record's cost is bounded and
measured in the tests, percentiles are read from buckets of 2 % (an HDR histogram takes 4 ms to tell one, in which no
stamp would be right), and a line is painted in under a millisecond. Final figures come from the samples, not from here.
"""

from __future__ import annotations

import bisect
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace_bench.figures.schema import Summary
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Record
from headrace_bench.report import rows
from headrace_bench.report.rows import BLANK, Compared, number

REDRAW_S = 0.25
PLAIN_S = 5.0
"""Between two lines where nothing can be drawn over."""
VERDICTS = {"better": "green", "worse": "red", "no difference": "", "too few": "yellow"}


class Running:
    """Durations in buckets of 2 %, from 1 us to an hour: percentiles while a load runs."""

    STEP = math.log(1.02)
    COUNT = 1113

    def __init__(self) -> None:
        self._counts = np.zeros(self.COUNT, dtype=np.int64)

    def add(self, seconds: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
        places = (np.log(np.maximum(seconds, 1e-6) * 1e6) / self.STEP).astype(np.int64)
        np.minimum(places, self.COUNT - 1, out=places)
        self._counts += np.bincount(places, minlength=self.COUNT)

    def percentile(self, p: float) -> float | None:
        """Seconds, the middle of its bucket."""
        sums = np.cumsum(self._counts)
        if not sums[-1]:
            return None
        place = int(np.searchsorted(sums, math.ceil(p / 100 * sums[-1])))
        return math.exp((place + 0.5) * self.STEP) / 1e6


class Progress:
    """A load's progress. Enter it around `client.run.run` and give it as, or call it from, `on_record`."""

    def __init__(
        self, schedule: Schedule, console: Console | None = None, clock: Callable[[], float] = time.monotonic,
        every_s: float | None = None,
    ) -> None:  # fmt: skip
        self._console = console or Console(stderr=True, highlight=False)
        self._plain = not self._console.is_terminal or bool(os.environ.get("NO_COLOR"))
        self._every = every_s or (PLAIN_S if self._plain else REDRAW_S)
        self._clock = clock
        self._users = schedule.users
        self._length = schedule.warmup + schedule.duration
        self._due = sorted(planned.at for planned in schedule.requests if planned.at is not None)
        self._start = clock()
        self._ended = 0
        self._failed = Counter[str]()
        self._ttft, self._gaps = Running(), Running()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None

    def __call__(self, record: Record) -> None:
        """Count one that has ended."""
        self._ended += 1
        if record.outcome != "ok":
            self._failed[record.outcome] += 1
            return
        if record.phase == "measure" and record.chunks:
            stamps = np.array([chunk.at for chunk in record.chunks])
            start = record.dispatched if record.scheduled is None else record.scheduled
            self._ttft.add(stamps[:1] - start)
            if len(stamps) > 1:
                self._gaps.add(np.diff(stamps))

    def line(self) -> str:
        """`12.3 of 60 s · 99 due, 94 done, 2 failed, 3 in flight · 9.6/s · TTFT p50 201, p95 420 · gap p99 18.3 ms`."""
        elapsed = self._clock() - self._start
        done, failed = self._ended - self._failed.total(), self._failed.total()
        if self._users is None:
            due = max(bisect.bisect_right(self._due, elapsed), self._ended)
            asked = f"{due:,} due, {done:,} done, {failed:,} failed, {due - self._ended:,} in flight"
        else:
            asked = f"{self._users:,} users, {done:,} done, {failed:,} failed"
        rate = self._ended / elapsed if elapsed > 0 else 0.0
        p50, p95, p99 = self._ttft.percentile(50), self._ttft.percentile(95), self._gaps.percentile(99)
        return (
            f"{elapsed:.1f} of {self._length:g} s · {asked} · {number(rate)}/s · "
            f"TTFT p50 {_ms(p50)}, p95 {_ms(p95)} · gap p99 {_ms(p99)} ms"
        )

    def __enter__(self) -> Self:
        self._start = self._clock()
        if not self._plain:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._thread = threading.Thread(target=self._paint, name="progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    def _paint(self) -> None:
        while not self._stop.wait(self._every):
            if self._live is not None:
                self._live.update(Text(self.line(), overflow="ellipsis", no_wrap=False), refresh=True)
            else:
                # Not through the console: it would fold a line for a width that nobody looks at.
                print(self.line(), file=sys.stderr if self._console.stderr else self._console.file, flush=True)


def final(summary: Summary) -> Group:
    """All that a run says at its end; INVALID on top."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure, ms", no_wrap=True)
    for name in ("n", *rows.PERCENTILES, "max"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows.rows(summary.figures, rows.GLANCE):
        table.add_row(*map(Text, (row.label, *row.cells())))
    for row in rows.parts(summary)[:3]:
        table.add_row(*map(Text, (f"  TTFT, {row.label}", *row.cells())), style="dim")
    return Group(*_invalid(summary.invalid), *_heads(summary), table, *_tails(summary))


def compared(a: str, b: str, found: Sequence[Compared], invalid: Sequence[str] = ()) -> Group:
    """B against A, a figure a line. The effect is that of B: less is better for times."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "figure",
        f"A: {a}",
        f"B: {b}",
        "B against A, 95 % interval",
        "A/A floor",
        "p",
        "pairs",
        "verdict for B",
    ):
        table.add_column(Text(name), justify="left" if name in ("figure", "verdict for B") else "right")
    for row in found:
        style = VERDICTS[row.comparison.verdict]
        p = BLANK if row.comparison.p is None else f"{row.comparison.p:.3g}"
        table.add_row(
            Text(_named(row.label, row.unit)), number(row.a), number(row.b),
            Text(row.effect()), row.floor(), p, str(row.comparison.pairs), Text(row.comparison.verdict, style=style),
        )  # fmt: skip
    return Group(*_invalid(invalid), table)


def _invalid(reasons: Sequence[str]) -> list[RenderableType]:
    if not reasons:
        return []
    return [
        Text("INVALID: this run does not count", style="bold white on red"),
        *(Text(f"  {one}", style="red") for one in reasons),
    ]


def _heads(summary: Summary) -> list[RenderableType]:
    counts, rates, good = summary.counts, summary.rates, summary.attainment
    asked = "" if rates.asked_per_s is None else f"asked {number(rates.asked_per_s)}/s, "
    lines = [
        f"{summary.kind} for {summary.window_s:g} s, seed {summary.seed}: {counts.scheduled:,} requests, "
        f"{counts.completed:,} completed, {counts.failed:,} failed",
        f"{asked}sent {number(rates.sent_per_s)}/s, completed {number(rates.completed_per_s)}/s, "
        f"{number(rates.tokens_per_s)} tokens/s",
        f"good by {good.slo}: {rows.share(good.attainment)} of all scheduled; goodput {number(good.goodput_per_s)}/s",
    ]
    return [Text(line) for line in lines]


def _tails(summary: Summary) -> list[RenderableType]:
    out = [
        f"  {name} ≤ {limit.limit_ms:g} ms: {rows.share(limit.attainment)}"
        for name, limit in summary.attainment.limits.items()
    ]
    failed = rows.failures(summary)
    if failed:
        out.append(f"failed: {failed}")
    if summary.counts.empty:
        out.append(f"completed without a token: {summary.counts.empty:,}")
    health = summary.health
    out.append(
        f"client: lag p50 {number(health.lag_p50_ms)}, p99 {number(health.lag_p99_ms)} ms, loop lag p99 "
        f"{number(health.loop_lag_p99_ms)} ms, CPU {health.cpu * 100:.0f} % of a core"
    )
    out += [f"note: {note}" for note in summary.notes]
    return [Text(line) for line in out]


def _named(label: str, unit: str) -> str:
    return f"{label} [{unit}]" if unit else label


def _ms(seconds: float | None) -> str:
    return number(None if seconds is None else float(f"{seconds * 1e3:.3g}"))
