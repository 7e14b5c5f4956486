"""Does a server keep up? What is in flight over the window, and whether it rises more than chance explains.

    in flight            ╱ a server that falls behind: no length of run has a steady state
        ▁▃▂▅▃▆▅▇▆█▇█ ──╱──
        ▃▅▂▄▃▅▂▃▄▂▅▃ ───── one that keeps up, with the same load

Rules: the line goes through the means of equal blocks of time; neighbouring blocks resemble each other, so the error of
the slope is widened by their lag-1 autocorrelation; a rise has to be significant at 1 %, and large: two requests and a
quarter of the mean. A queue of requests that nobody answers is in flight until the load ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headrace_bench.figures.stats import Array, t_quantile
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Record

BLOCKS = 20
SURE = 0.99
LEAST_RISE = 2.0
LEAST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Backlog:
    """Of one run."""

    mean: float
    """Requests in flight, over the window."""
    slope: float
    """Requests more in flight, per second."""
    low: float
    """The one-sided 99 % bound of the slope; above 0 it rises."""
    growing: bool


def backlog(schedule: Schedule, records: Sequence[Record]) -> Backlog | None:
    """Of an open loop's window; None for a closed loop, which has its users and no more, and without requests."""
    if schedule.users is not None or not records or schedule.duration <= 0:
        return None
    start, end = schedule.warmup, schedule.warmup + schedule.duration
    spans = [
        (
            record.dispatched if record.scheduled is None else record.scheduled,
            _left(record),
        )
        for record in records
    ]
    edges = np.linspace(start, end, BLOCKS + 1)
    levels = _means(np.array([span[0] for span in spans]), np.array([span[1] for span in spans]), edges)
    return _trend(levels, (end - start) / BLOCKS)


def _left(record: Record) -> float:
    """When it was over: an answer that was done and whose message never ended holds nothing up."""
    if record.closed is not None:
        return record.closed
    return math.inf if record.done is None else record.done


def _means(begun: Array, ended: Array, edges: Array) -> Array:
    """Requests in flight on average, block by block."""
    inside = [
        np.clip(np.minimum(ended, right) - np.maximum(begun, left), 0.0, None).sum() for left, right in pairwise(edges)
    ]
    return np.array(inside) / np.diff(edges)


def _trend(levels: Array, step: float) -> Backlog:
    n = len(levels)
    t = (np.arange(n) - (n - 1) / 2) * step
    mean = float(levels.mean())
    spread = float(t @ t)
    slope = float(t @ levels) / spread
    rest = levels - mean - slope * t
    noise = float(rest @ rest)
    memory = 0.0 if noise <= 1e-12 else max(0.0, min(0.9, float(rest[1:] @ rest[:-1]) / noise))
    error = math.sqrt(noise / (n - 2) / spread * (1 + memory) / (1 - memory))
    low = slope - t_quantile(SURE, n - 2) * error
    rise = slope * step * n
    return Backlog(mean, slope, low, low > 0 and rise >= max(LEAST_RISE, LEAST_SHARE * mean))
