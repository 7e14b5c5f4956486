"""Does this client say what another one says of the same server? `single` of a neutral client, and the same with ours.

    round 1  theirs ── ten chats, one after another ──   ours ── ten such chats ──
    round 2  ours                                        theirs

Rules: the other client is a program of its own that shares no code with this one; both open a connection a request and
count from its last byte; both percentiles are by rank, but its 50th of ten is the sixth and ours the fifth, so ours is
taken as it takes its own; both draw from the same words, for guesses and so gaps depend on them, and no round repeats
a text; the figure is the median over rounds of the ratio within a round. A server that keeps prompts on a disk has to
start with an empty one.
"""

from __future__ import annotations

import ast
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
from headrace_bench.lab import WORDS
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Record

CHATS = 10
SEED = 7_100_000
"""Of the first round: the other client's usual seeds are small, and its texts may be known to the server."""
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
                ours.append((mine or (lambda at, seed: measured(at, seed, peerload)))(target, SEED + turn))
            else:
                theirs.append((other or reported)(target, peerload, SEED + 500_000 + turn))
    return Agreement(tuple(ours), tuple(theirs))


def vocabulary(peerload: Path) -> Sequence[str]:
    """The other client's words, if its source has a list of that name; our own otherwise."""
    for node in ast.walk(ast.parse(peerload.read_text())):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["WORDS"]:
            texts = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
            return [word for text in texts if isinstance(text, str) for word in text.split()]
    return WORDS


def chats(seed: int, vocabulary: Sequence[str] = WORDS) -> Schedule:
    """Ten short chats of one person, as the other client has them."""
    rng = random.Random(seed)

    def words(n: int) -> str:
        return " ".join(rng.choice(vocabulary) for _ in range(n))

    requests = tuple(
        Planned(
            index=i,
            at=None,
            messages=(
                {"role": "system", "content": f"You are a helper. {words(6)}"},
                {"role": "user", "content": f"Tell me a story about {words(20)}"},
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


def measured(target: Target, seed: int, peerload: Path | None = None) -> Seen:
    """By this client. Raises Fault, and KeyboardInterrupt: a load that is interrupted ends without."""
    ran = run(target, chats(seed, WORDS if peerload is None else vocabulary(peerload)))
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
    key = [] if target.key is None else ["--key", target.key]
    try:
        ran = subprocess.run(
            [*command, *key, "--seed", str(seed)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Fault(f"{peerload.name} did not end within {LIMIT_S:g} s") from None
    try:
        single: dict[str, Any] = json.loads(ran.stdout)["single"]
        return Seen(float(single["ttft"]["p50"]), float(single["gap"]["max"]))
    except (ValueError, KeyError, TypeError):
        why = (ran.stderr or ran.stdout).strip().splitlines()
        raise Fault(f"{peerload.name} measured nothing: {why[-1] if why else 'it said nothing'}") from None
