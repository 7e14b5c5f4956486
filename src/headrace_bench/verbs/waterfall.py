"""`waterfall`: one request, and where the milliseconds of its first token went.

    client   lag        0.1 ms ▏
             connect    0.4 ms ▏
    network             0.9 ms  ▎
    server   queue      1.2 ms   ▌
             prefill   96.4 ms    ████████████████████████████
                       ───────
                       99.8 ms to the first token

Rules: a new connection and a prompt that no cache has seen, so that nothing is left out; a server that does not tell
its own time has one bar with the network, and this is said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from headrace_bench.client.request import Client
from headrace_bench.client.target import Target
from headrace_bench.fault import Fault
from headrace_bench.figures.definitions import RequestFigures, figures
from headrace_bench.load import prompts
from headrace_bench.load.schedule import Planned
from headrace_bench.record import Record
from headrace_bench.report.rows import BLANK, number
from headrace_bench.report.stages import Side, Split, split
from headrace_bench.verbs import flags

COLOURS: dict[Side, str] = {"client": "bright_black", "network": "magenta", "server": "blue"}
EIGHTHS = " ▏▎▍▌▋▊▉█"
BEFORE = 34
"""Columns left of a bar."""


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    flags.add_target(parser)
    parser.add_argument("--prompt-tokens", type=flags.count, default=256, metavar="N", help="about so many (256)")
    parser.add_argument("--max-tokens", type=flags.count, default=16, metavar="N", help="of the answer (16)")
    parser.add_argument("--seed", type=int, help="of the prompt; another one each time by default")
    parser.add_argument("--json", action="store_true", help="as JSON, in ms")


def run(asked: argparse.Namespace) -> int:
    """0 drawn; 1 the answer did not end well. Raises Fault where there is nothing to draw."""
    target = flags.target_of(asked)
    seed = time.time_ns() if asked.seed is None else asked.seed
    record = asyncio.run(send(target, planned(asked.prompt_tokens, asked.max_tokens, seed)))
    parts = split(record)
    if asked.json:
        print(json.dumps(document(record, parts), indent=1))
        return 0 if record.outcome == "ok" and parts is not None else 1
    if parts is None:
        raise Fault(f"{target.url}: {ended(record) or 'the answer had no token'}")
    show = Console(highlight=False)
    for line in [*chart(parts, show.width), *words(record, parts)]:
        show.print(line)
    return 0 if record.outcome == "ok" else 1


def planned(prompt_tokens: int, max_tokens: int, seed: int) -> Planned:
    """A prompt of `prompt_tokens` words, each about a token."""
    text = prompts.text(np.random.default_rng(abs(seed)), prompt_tokens)
    return Planned(
        index=0, at=None, messages=({"role": "user", "content": text},), max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
    )  # fmt: skip


async def send(target: Target, plan: Planned) -> Record:
    """One request on a connection of its own."""
    start = time.monotonic()
    client = Client(target, lambda: time.monotonic() - start)
    try:
        return await client.send(plan, plan.messages)
    finally:
        await client.close()


def chart(parts: Split, width: int) -> list[Text]:
    """A line a stage: side, name, ms, and its bar where it lies in the TTFT. `width` in columns."""
    room = max(10, width - BEFORE - 1)
    total = max(sum(stage.ns for stage in parts.stages), 1)
    lines: list[Text] = []
    begun, side = 0, ""
    for stage in parts.stages:
        head = stage.side if stage.side != side else ""
        side = stage.side
        name = "" if stage.name == stage.side else stage.name
        line = Text(f"{head:8} {name:14} {stage.ms:7.1f} ms ", no_wrap=True)
        line.append(_bar(begun / total * room, (begun + stage.ns) / total * room), style=COLOURS[stage.side])
        lines.append(line)
        begun += stage.ns
    return [*lines, Text(f"{'':8} {'first token':14} {parts.ttft_ms:7.1f} ms", style="bold", no_wrap=True)]


def words(record: Record, parts: Split) -> list[Text]:
    """What the bars do not say."""
    found = figures(record)
    out = [_rest(record, found)]
    if not parts.told:
        out.append("this server tells nothing of its own time up to the first token: server and network are one")
    if parts.overlap_ns:
        out.append(f"client and server overlap by {parts.overlap_ms:.2f} ms: the server began before all was sent")
    why = ended(record)
    return [Text(line) for line in [*out, *([why] if why else [])]]


def ended(record: Record) -> str | None:
    """How it failed; None where it did not."""
    if record.outcome == "ok":
        return None
    status = f", status {record.status}" if record.status is not None and record.outcome == "http" else ""
    return f"the request failed ({record.outcome}{status})" + (f": {record.error}" if record.error else "")


def document(record: Record, parts: Split | None) -> dict[str, Any]:
    """For programs. Null is not known."""
    found = figures(record)
    stages = () if parts is None else parts.stages
    return {
        "outcome": record.outcome,
        "status": record.status,
        "error": record.error,
        "request_id": record.request_id,
        "ttft_ms": None if parts is None else parts.ttft_ms,
        "server_told": parts is not None and parts.told,
        "overlap_ms": None if parts is None else parts.overlap_ms,
        "stages": [{"name": stage.name, "side": stage.side, "ms": stage.ms} for stage in stages],
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": found.tokens,
        "tpot_ms": _ms(found.tpot),
        "longest_gap_ms": _ms(found.longest_gap),
        "e2e_ms": _ms(found.e2e),
    }


def _rest(record: Record, found: RequestFigures) -> str:
    prompt = BLANK if record.prompt_tokens is None else f"{record.prompt_tokens:,}"
    cached = "" if record.cached_tokens is None else f", {record.cached_tokens:,} of them cached"
    return (
        f"{prompt} prompt tokens{cached}; {found.tokens:,} tokens in {number(_ms(found.e2e))} ms, "
        f"TPOT {number(_ms(found.tpot))}, longest gap {number(_ms(found.longest_gap))} ms"
    )


def _bar(begin: float, end: float) -> str:
    """From column `begin` to column `end`; what is shorter than an eighth of a column is one."""
    first = int(begin)
    whole = int(end) - first
    eighths = int((end - int(end)) * 8)
    if whole == 0:
        return " " * first + EIGHTHS[max(1, min(8, round((end - begin) * 8)))] if end > begin else ""
    return " " * first + "█" * whole + EIGHTHS[eighths].strip()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds * 1e3:.6g}")
