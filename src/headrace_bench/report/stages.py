"""Where the milliseconds of one TTFT went: this client, the way, the server.

    scheduled    dispatched   connected      sent                                          first token
        │── lag ─────│─ connect ──│─── send ───│─ network ─│ receive … prefill, sample, deliver │
        └────────────── client ────────────────┘           └────────── as the server says ──────┘

Rules: the parts add up to the TTFT, to the nanosecond, and none is negative. The network is what is left when the
server's own time is taken from sent → first token; both ways are in it, and what the client's reading took. A server
that says nothing has one part, `server+network`. Where a server's time is longer than ours (its clock began while we
were still sending), the network is 0 and the difference is named as `overlap` and taken from what stands before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headrace_bench.record import Record

Side = Literal["client", "network", "server"]

CLIENT = ("lag", "connect", "send")
NETWORK = "network"
SERVER = ("receive", "route", "tokenize", "queue", "restore", "prefill", "sample", "deliver")
"""A Headrace's own names, in the order of time."""
UNTOLD = "server+network"
REST = "rest"
"""Of the server's own TTFT, what its stages leave out."""

ROUNDING = 50_000
"""Nanoseconds by which a server's TTFT and the sum of its stages may differ: each is rounded for itself."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a TTFT."""

    name: str
    side: Side
    ns: int
    """Whole nanoseconds, so that a sum is exact; >= 0."""

    @property
    def ms(self) -> float:
        return self.ns / 1e6


@dataclass(frozen=True, slots=True)
class Split:
    """A TTFT in its parts, in the order of time."""

    stages: tuple[Stage, ...]
    told: bool
    """The server said how long its stages took."""
    overlap_ns: int = 0
    """By how much the server's time and the client's were longer than the TTFT together."""

    @property
    def ttft_ms(self) -> float:
        return sum(stage.ns for stage in self.stages) / 1e6

    @property
    def overlap_ms(self) -> float:
        return self.overlap_ns / 1e6

    def side_ms(self, side: Side) -> float:
        return sum(stage.ns for stage in self.stages if stage.side == side) / 1e6

    def by_name(self) -> dict[str, float]:
        """Stage → ms."""
        return {stage.name: stage.ms for stage in self.stages}


def split(record: Record) -> Split | None:
    """The stages of `record`'s TTFT; None where no token came. TTFT: from scheduled, or dispatched where it is None."""
    if not record.chunks:
        return None
    first = _ns(record.chunks[0].at)
    start = min(_ns(record.dispatched if record.scheduled is None else record.scheduled), first)
    client: list[Stage] = []
    reached = start
    for name, stamp in zip(CLIENT, (record.dispatched, record.connected, record.sent), strict=True):
        # A stamp that is missing or out of order lends its stage no time: the next one has it.
        ends = reached if stamp is None else min(max(_ns(stamp), reached), first)
        client.append(Stage(name, "client", ends - reached))
        reached = ends
    server = _server(record.server)
    if not server:
        return Split((*client, Stage(UNTOLD, "server", first - reached)), told=False)
    network = first - reached - sum(stage.ns for stage in server)
    if network >= 0:
        return Split((*client, Stage(NETWORK, "network", network), *server), told=True)
    parts = _shortened([*reversed(client), *server], -network)
    cut = [*reversed(parts[: len(client)]), Stage(NETWORK, "network", 0), *parts[len(client) :]]
    return Split(tuple(cut), told=True, overlap_ns=-network)


def _server(told: Mapping[str, float | None] | None) -> list[Stage]:
    """The stages that a server tells, known ones in order; a TTFT without stages, or more than they give, is `rest`."""
    if not told:
        return []
    stages = [Stage(name, "server", max(0, round(ms * 1e6))) for name in SERVER if (ms := told.get(name)) is not None]
    total = told.get("ttft")
    rest = 0 if total is None else round(total * 1e6) - sum(stage.ns for stage in stages)
    if rest > ROUNDING:
        stages.append(Stage(REST, "server", rest))
    return stages


def _shortened(stages: list[Stage], excess: int) -> list[Stage]:
    """`excess` nanoseconds taken away from the first stages on; all of them together are longer than that."""
    out: list[Stage] = []
    for stage in stages:
        taken = min(stage.ns, excess)
        excess -= taken
        out.append(Stage(stage.name, stage.side, stage.ns - taken))
    return out


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
