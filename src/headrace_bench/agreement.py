"""Does this client say what another one says of the same server? `single` of a neutral client, and the same with ours.

    round 1  theirs ── ten chats, one after another ──   ours ── ten such chats ──
    round 2  ours                                        theirs

Rules: the other client is a program of its own that shares no code with this one; both open a connection a request and
count from its last byte; both percentiles are by rank, but its 50th of ten is the sixth and ours the fifth, so ours is
taken as it takes its own; the figure is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_bench.client.run import run
from headrace_bench.client.target import Target
from headrace_bench.fault import Fault
from headrace_bench.figures.definitions import figures
from headrace_bench.figures.stats import median
from headrace_bench.lab import words
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Record

CHATS = 10
TOKENS = 48
TOLERANCE = 0.03
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client says of ten chats, in ms."""

    ttft_p50: float
    longest_gap: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Ours against theirs."""

    ours: tuple[Seen, ...]
    theirs: tuple[Seen, ...]

    @property
    def ttft_ratio(self) -> float:
        """Median over rounds."""
        return median([a.ttft_p50 / b.ttft_p50 for a, b in zip(self.ours, self.theirs, strict=True)])

    @property
    def gap_ratio(self) -> float:
        """Median over rounds."""
        return median([a.longest_gap / b.longest_gap for a, b in zip(self.ours, self.theirs, strict=True)])

    @property
    def agrees(self) -> bool:
        """Both within 3 %."""
        return all(abs(ratio - 1) <= TOLERANCE + 1e-9 for ratio in (self.ttft_ratio, self.gap_ratio))


def agree(
    target: Target,
    peerload: Path,
    rounds: int,
    *,
    mine: Callable[[Target, int], Seen] | None = None,
    other: Callable[[Target, Path, int], Seen] | None = None,
) -> Agreement:
    """Both clients in turn. Raises Fault: one of them got no answers."""
    ours, theirs = list[Seen](), list[Seen]()
    for turn in range(rounds):
        for which in ("mine", "other") if turn % 2 else ("other", "mine"):
            if which == "mine":
                ours.append((mine or measured)(target, turn + 1))
            else:
                theirs.append((other or reported)(target, peerload, turn + 1))
    return Agreement(tuple(ours), tuple(theirs))


def chats(seed: int) -> Schedule:
    """Ten short chats of one person, as the other client has them."""
    rng = random.Random(seed)
    requests = tuple(
        Planned(
            index=i,
            at=None,
            messages=(
                {"role": "system", "content": f"You are a helper. {words(rng, 6)}"},
                {"role": "user", "content": f"Tell me a story about {words(rng, 20)}"},
            ),
            max_tokens=TOKENS,
            prompt_tokens=35,
            extra={"temperature": 0},
        )
        for i in range(CHATS)
    )
    return Schedule(
        seed=seed, kind="closed 1 user", users=1, duration=LIMIT_S, warmup=0.0, requests=requests, finite=True
    )


def measured(target: Target, seed: int) -> Seen:
    """By this client. Raises Fault, and KeyboardInterrupt: a load that is interrupted ends without."""
    ran = run(target, chats(seed))
    if ran.interrupted:
        raise KeyboardInterrupt
    return seen(ran.records)


def seen(records: Sequence[Record]) -> Seen:
    """Raises Fault for anything but whole answers."""
    found = [figures(record) for record in records]
    failed = [one.outcome for one in found if not one.whole or one.ttft_service is None]
    gaps = [gap for one in found for gap in one.gaps]
    if failed or not gaps:
        raise Fault(f"{len(failed)} of {len(found)} chats failed ({', '.join(sorted(set(failed))) or 'no gaps'})")
    ttfts = sorted(one.ttft_service for one in found if one.ttft_service is not None)
    return Seen(ttfts[len(ttfts) // 2] * 1e3, max(gaps) * 1e3)


def reported(target: Target, peerload: Path, seed: int) -> Seen:
    """By the other one. Raises Fault."""
    command = [sys.executable, str(peerload), "--url", target.url, "--model", target.model, "--only", "single"]
    ran = subprocess.run([*command, "--seed", str(seed)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    try:
        single: dict[str, Any] = json.loads(ran.stdout)["single"]
        return Seen(float(single["ttft"]["p50"]), float(single["gap"]["max"]))
    except (ValueError, KeyError, TypeError):
        why = (ran.stderr or ran.stdout).strip().splitlines()
        raise Fault(f"{peerload.name} measured nothing: {why[-1] if why else 'it said nothing'}") from None
