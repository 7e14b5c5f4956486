"""`memory`, first half: KV that left the pool and comes back, from RAM, from the disk, after a restart.

    restore   1,000 tokens back from RAM and from the disk, against computing them
    turns     64 conversations of 1,000 tokens in turn over 16,000 cells, with tiers and without
    template  TTFT on a pinned template right after a restart, against the same once it is resident

Rules: every time is the server's own timeline of a stage, or TTFT at this end of the socket; a conversation goes on
as a person's does, with the answer it got; the disk's pages are dropped from the page cache before they are read back,
as after a real restart; what the cache did not give back is counted and never timed as a restore.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace_bench.lab import Lab, words
from headrace_bench.server import Server
from headrace_bench.figures.stats import median, percentile
from headrace_bench.wire import Answer, Refused, chat

TOKENS = 1000
CELLS = 16_000
ANSWER = 8
HIT = 0.9
"""Share of a conversation's tokens that the cache must give for a visit to count as one that was restored."""
MOVED_MS = 1.0
"""Below this nothing was moved: the KV of 1,000 tokens is 20 MB and more, and what is resident takes up to 0.7 ms."""

TEMPLATE = """[templates.bench]
system = "{system}"
"""


class Conversation:
    """A chat of about `TOKENS` tokens from its first question on, that nobody else shares a word of."""

    def __init__(self, seed: int, tokens: int = TOKENS) -> None:
        rng = random.Random(seed)
        self._rng = rng
        self.messages = [{"role": "system", "content": f"{seed}. {words(rng, tokens - 40)}"}]

    def ask(self, server: Server, model: str) -> Answer:
        """One more question; the answer joins the conversation."""
        self.messages.append({"role": "user", "content": f"Tell me about the {words(self._rng, 6)}."})
        answer = asyncio.run(chat(server.url, body(model, self.messages)))
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer


def body(model: str, messages: Sequence[dict[str, str]], max_tokens: int = ANSWER) -> dict[str, Any]:
    """A greedy request that is answered with its timeline and its usage."""
    return {
        "model": model,
        "messages": list(messages),
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream_options": {"include_usage": True},
        "headrace": {"timings": True},
    }


def visit(answer: Answer) -> dict[str, float]:
    """What is kept of an answer: TTFT here, the server's stages, what came from the cache. Raises Refused: no text."""
    if not answer.stamps:
        raise Refused(f"an answer without text ({answer.finish}): there is nothing to time")
    t = answer.timeline or {}
    stages = {name: float(t.get(name) or 0.0) for name in ("queue", "restore", "prefill")}
    return {
        "ttft_ms": answer.stamps[0] * 1e3,
        "prompt_tokens": float(answer.prompt_tokens or 0),
        "cached_tokens": float(t.get("cached_tokens") or 0),
        **stages,
    }


def computing_ms(visits: Sequence[dict[str, float]]) -> float:
    """Median prefill time of 1,000 tokens, of visits that found nothing in the cache."""
    per_token = [v["prefill"] / (v["prompt_tokens"] - v["cached_tokens"]) for v in visits]
    return median(per_token) * TOKENS


def restored(seen: dict[str, float], known: float = TOKENS) -> bool:
    """Its KV had left the pool and came back: not computed again, and not there all along."""
    return seen["queue"] + seen["restore"] >= MOVED_MS and seen["cached_tokens"] >= HIT * known


def restoring_ms(visits: Sequence[dict[str, float]], known: float = TOKENS) -> float | None:
    """Median time of bringing 1,000 tokens back: waiting for them counts, so `queue` and `restore` together.

    None where no visit was restored.
    """
    per_token = [(v["queue"] + v["restore"]) / v["cached_tokens"] for v in visits if restored(v, known)]
    return median(per_token) * TOKENS if per_token else None


def restore(lab: Lab, conversations: int = 8) -> dict[str, Any]:
    """Bars: from RAM >= 100 times as fast as computing, from the disk >= 30 times."""
    model = lab.model.stem
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as ssd:
        talks = [Conversation(i) for i in range(conversations)]
        with lab.headrace(ssd=Path(ssd)) as server:
            cold = [visit(talk.ask(server, model)) for talk in talks]
            # Each was followed by all the others: what the pool keeps of idle conversations is less than that.
            ram = [visit(talk.ask(server, model)) for talk in talks]
            again = [visit(talk.ask(server, model)) for talk in talks for _ in range(2)][1::2]
        forget(Path(ssd))
        with lab.headrace(ssd=Path(ssd)) as server:
            disk = [visit(talk.ask(server, model)) for talk in talks]
    computed = computing_ms(cold)
    found: dict[str, Any] = {"computing_ms": computed}
    for name, visits in (("ram", ram), ("ssd", disk)):
        ms = restoring_ms(visits)
        found |= {
            f"{name}_ms": ms,
            f"{name}_times": None if ms is None else computed / ms,
            f"{name}_restored": sum(map(restored, visits)),
            f"{name}_ttft_p50_ms": percentile([v["ttft_ms"] for v in visits], 50),
        }
    found["resident_ttft_p50_ms"] = percentile([v["ttft_ms"] for v in again], 50)
    found["cold_ttft_p50_ms"] = percentile([v["ttft_ms"] for v in cold], 50)
    return {**found, "visits": {"cold": cold, "ram": ram, "resident": again, "ssd": disk}}


def forget(folder: Path) -> None:
    """Drop a directory's files from the page cache, so that reading them is reading the disk."""
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError), file.open("rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def turns(lab: Lab, conversations: int = 64) -> dict[str, Any]:
    """Bar: TTFT p95 of the second visits with tiers <= 0.2 of without."""
    found: dict[str, Any] = {}
    for name, flags in (("with", ()), ("without", ("--set", "optimizations.tiers=false"))):
        talks = [Conversation(i) for i in range(conversations)]
        with lab.headrace("--set", f"engine.cells={CELLS}", *flags) as server:
            for talk in talks:
                talk.ask(server, lab.model.stem)
            seconds = [visit(talk.ask(server, lab.model.stem)) for talk in talks]
        times = [v["ttft_ms"] for v in seconds]
        found |= {
            f"{name}_ttft_p50_ms": percentile(times, 50),
            f"{name}_ttft_p95_ms": percentile(times, 95),
            f"{name}_from_cache": sum(v["cached_tokens"] >= HIT * TOKENS for v in seconds),
            f"{name}_visits": seconds,
        }
    found["p95_ratio"] = found["with_ttft_p95_ms"] / found["without_ttft_p95_ms"]
    return found


def template(lab: Lab, restarts: int = 5, resident: int = 5) -> dict[str, Any]:
    """Bar: TTFT of the first request after a restart <= 1.5 of a resident template's."""
    rng = random.Random(11)
    system = words(rng, TOKENS)
    first: list[dict[str, float]] = []
    later: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        file, ssd = Path(folder, "templates.toml"), Path(folder, "ssd")
        file.write_text(TEMPLATE.format(system=system))
        ssd.mkdir()
        for start in range(restarts + 1):
            forget(ssd)
            with lab.headrace("--set", f"templates.file={file}", ssd=ssd) as server:
                visits = [visit(answer) for answer in _questions(server, lab.model.stem, system, rng, resident + 1)]
            if start:  # the first start of all has nothing on its disk
                first.append(visits[0])
                later += visits[1:]
    ratio = median([v["ttft_ms"] for v in first]) / median([v["ttft_ms"] for v in later])
    return {
        "restart_ratio": ratio,
        "first_ttft_p50_ms": percentile([v["ttft_ms"] for v in first], 50),
        "resident_ttft_p50_ms": percentile([v["ttft_ms"] for v in later], 50),
        "first_from_cache": sum(v["cached_tokens"] >= HIT * TOKENS for v in first),
        "visits": {"first": first, "resident": later},
    }


def _questions(server: Server, model: str, system: str, rng: random.Random, n: int) -> Iterator[Answer]:
    for _ in range(n):
        question = f"Tell me about the {words(rng, 6)}."
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        yield asyncio.run(chat(server.url, body(model, messages)))
