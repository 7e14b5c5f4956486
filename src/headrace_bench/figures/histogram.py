"""Durations in a histogram that merges: HdrHistogram, microseconds, 1 us to an hour, 3 significant digits.

Rules: percentiles of several runs come from their merged histograms, never from a mean of percentiles; what was held
back is not guessed, for latencies count from the schedule already; 0 is kept as 0, longer than an hour as an hour.
"""

from __future__ import annotations

from collections.abc import Iterable

from hdrh.histogram import HdrHistogram

LONGEST_US = 3_600_000_000
DIGITS = 3


class Histogram:
    """Counts of durations, in seconds at the surface."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._hdr = HdrHistogram(1, LONGEST_US, DIGITS)
        self.add(seconds)

    def __len__(self) -> int:
        return int(self._hdr.get_total_count())

    def add(self, seconds: Iterable[float]) -> None:
        """ValueError for one below 0: clocks that run backwards are not to be hidden."""
        for duration in seconds:
            if not duration >= 0:
                raise ValueError(f"a duration of {duration} s")
            self._hdr.record_value(min(round(duration * 1e6), LONGEST_US))

    def merge(self, other: Histogram) -> None:
        """Add what another one counted."""
        self._hdr.add(other._hdr)

    def percentile(self, p: float) -> float | None:
        """By nearest rank, within 0.1 %, in seconds; None of nothing."""
        return self._hdr.get_value_at_percentile(p) / 1e6 if len(self) else None

    def encode(self) -> str:
        """Base64 of the compressed V2 format, which every HdrHistogram reads."""
        return bytes(self._hdr.encode()).decode("ascii")

    @classmethod
    def decode(cls, text: str) -> Histogram:
        """ValueError for what is none."""
        histogram = cls()
        try:
            histogram._hdr.decode_and_add(text.encode("ascii"))
        except Exception as error:  # The library raises binascii's, zlib's and its own.
            raise ValueError(f"not a histogram: {error}") from None
        return histogram
