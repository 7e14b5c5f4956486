"""`switching`: a model is exchanged while people are being answered, again and again.

    load    ─●─●─●─●─●─●─●─●─●─●─●─●─●─●─●─●─●─●─▶   a request every 20 ms, each of known text
    switch        [═══]      [═══]      [═══]        POST /admin/v1/switch, from one engine to the other and back
    around        └─────┘    └─────┘    └─────┘      from the request to switch until a second after its answer

Rules: every text is known before, so a token that is lost, or comes twice, is seen; a gap counts by what is added to
the engine's own, so that a slow engine is not a slow switch; what happens around a switch stands beside what happens
outside of all of them, in the same run; the load is open: nobody waits for a switch.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace_bench.client import stamps
from headrace_bench.client.run import Run
from headrace_bench.figures.stats import percentile
from headrace_bench.gateways import ALIAS, UPSTREAM
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Record
from headrace_bench.server import Server, free_port

ENGINES = ("a", "b")
AFTER_S = 1.0
"""A switch may still be felt so long after its answer: answers under way end at the old engine."""
SETTLE_S = 2.0
SWITCH_S = 120.0
"""A switch that takes longer has failed."""
UPSTREAM_ENGINE = """[engines.{name}]
kind = "openai"
url = "{url}/v1"
model = "{model}"
flavour = "openai"
"""
MODEL_ENGINE = """[engines.{name}]
kind = "llama"
model = "{model}"
"""
ALIAS_TABLE = """
[aliases.{alias}]
engines = {{ {first} = 1 }}
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load, and how often what is exchanged."""

    rate: float = 50.0
    """Requests a second."""
    tokens: int = 20
    first_s: float = 0.05
    gap_s: float = 0.02
    switches: int = 6
    every_s: float = 4.0
    stamped: bool = True
    """Answers come from scripted upstreams; otherwise from engines of the server's own."""

    @property
    def duration(self) -> float:
        return 2 * SETTLE_S + self.switches * self.every_s

    @property
    def message(self) -> str:
        if not self.stamped:
            return "Count."
        return f"stamped:{self.first_s * 1e3:g}:{self.gap_s * 1e3:g}:{self.tokens}"


@dataclass(frozen=True, slots=True)
class Change:
    """One switch. Seconds of the machine's monotonic clock."""

    to: str
    asked: float
    answered: float
    error: str | None
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Told:
    """One answer: (when, how much was added) of its gaps and its first token. Seconds."""

    ok: bool
    wrong: int
    """Tokens that are lost, doubled or nobody's."""
    gaps: tuple[tuple[float, float], ...]
    first: tuple[float, float] | None
    """Sent at, added."""
    error: str | None = None


def schedule(plan: Plan) -> Schedule:
    """A request every 1/rate seconds."""
    count = int(plan.duration * plan.rate)
    message = ({"role": "user", "content": plan.message},)
    extra: dict[str, Any] = {"temperature": 0}
    requests = tuple(
        Planned(
            index=n, at=n / plan.rate, messages=message, max_tokens=plan.tokens, prompt_tokens=1, extra=extra
        )
        for n in range(count)
    )  # fmt: skip
    return Schedule(
        seed=0, kind=f"constant {plan.rate:g}/s", users=None, duration=plan.duration, warmup=0.0, requests=requests
    )


def config(engines: Sequence[tuple[str, str]], stamped: bool) -> str:
    """The server's file: (name, an upstream's URL or a model) of each engine; the alias begins at the first.

    The others are declared and not loaded: that is what a switch does.
    """
    tables = [
        UPSTREAM_ENGINE.format(name=name, url=where, model=UPSTREAM)
        if stamped
        else MODEL_ENGINE.format(name=name, model=where)
        for name, where in engines
    ]
    tables[1:] = [f"{table}load = false\n" for table in tables[1:]]
    return "\n".join(tables) + ALIAS_TABLE.format(alias=ALIAS, first=engines[0][0])


def headrace(folder: Path, text: str, key: str, flags: Sequence[str]) -> Server:
    """With the file `text`, and `key` for its administration."""
    port, file = free_port(), folder / "headrace.toml"
    file.write_text(text)
    program = [sys.executable, "-m", "headrace", "serve", "--config", str(file), "--port", str(port)]
    program += ["--set", "model.measure=false"]
    url, log = f"http://127.0.0.1:{port}", folder / "headrace.log"
    return Server("headrace", [*program, "--set", f"server.admin_key={key}", *flags], url=url, ready="/readyz", log=log)


def switch(url: str, key: str | None, alias: str, to: str) -> Change:
    """Asks for it and waits for the answer."""
    head = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = json.dumps({"alias": alias, "to": to}).encode()
    asked = time.monotonic()
    error, report = None, {}
    try:
        request = urllib.request.Request(f"{url}/admin/v1/switch", data, head, method="POST")
        with urllib.request.urlopen(request, timeout=SWITCH_S) as answer:
            report = json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as refused:
        error = f"HTTP {refused.code}: {refused.read(300).decode(errors='replace')}"
    except (OSError, ValueError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    return Change(to, asked, time.monotonic(), error, report if isinstance(report, dict) else {})


class Changer(threading.Thread):
    """Switches at its times, in a thread of its own, for an answer may take long. `changes` once it was joined."""

    def __init__(self, plan: Plan, names: Sequence[str], act: Callable[[str], Change]) -> None:
        super().__init__(daemon=True)
        self._plan = plan
        self._names = names
        self._act = act
        self._over = threading.Event()
        self.changes: list[Change] = []

    def run(self) -> None:
        began = time.monotonic()
        for turn in range(self._plan.switches):
            if self._over.wait(max(0.0, began + SETTLE_S + turn * self._plan.every_s - time.monotonic())):
                return
            self.changes.append(self._act(self._names[(turn + 1) % len(self._names)]))

    def stop(self) -> None:
        """No more; returns once the last answer is there."""
        self._over.set()
        self.join()


def told(plan: Plan, run: Run, texts: Sequence[str] = ()) -> list[Told]:
    """All answers. `texts`: what an answer of the server's own engines may say."""
    if plan.stamped:
        return [_stamped(record, run.began, plan.tokens) for record in run.records]
    gaps = [b.at - a.at for record in run.records for a, b in pairwise(record.chunks)]
    usual = percentile(gaps, 50) or 0.0
    return [_plain(record, run.began, usual, texts) for record in run.records]


def _stamped(record: Record, began: float, tokens: int) -> Told:
    heard = stamps.heard(record, began, tokens)
    gaps = tuple((b.came, b.delay - a.delay) for a, b in pairwise(heard.tokens))
    added = heard.ttft_added
    first = None if added is None or heard.sent is None else (heard.sent, added)
    wrong = heard.lost + heard.doubled + heard.foreign
    return Told(heard.ok, wrong, gaps, first, _error(record))


def _plain(record: Record, began: float, usual: float, texts: Sequence[str]) -> Told:
    ok = record.outcome == "ok"
    gaps = tuple((b.at + began, b.at - a.at - usual) for a, b in pairwise(record.chunks))
    first = None
    if record.chunks and record.sent is not None:
        first = (record.sent + began, record.chunks[0].at - record.sent)
    return Told(ok, int(ok and (record.text or "") not in texts), gaps, first, _error(record))


def _error(record: Record) -> str | None:
    return None if record.outcome == "ok" else f"{record.outcome}: {record.error or record.status}"


def summary(answers: Sequence[Told], changes: Sequence[Change]) -> dict[str, Any]:
    """What came of it. ms."""
    spans = [(change.asked, change.answered + AFTER_S) for change in changes]
    near, far = _split([gap for answer in answers for gap in answer.gaps], spans)
    first_near, first_far = _split([answer.first for answer in answers if answer.first is not None], spans)
    return {
        "requests": len(answers),
        "failed": sum(not answer.ok for answer in answers),
        "wrong": sum(answer.wrong for answer in answers),
        "switches": sum(change.error is None for change in changes),
        "switches_failed": sum(change.error is not None for change in changes),
        "switch_ms": _most([change.answered - change.asked for change in changes]),
        "gap_around_max_ms": _most(near),
        "gap_outside_max_ms": _most(far),
        "gap_around_p99_ms": _p(near, 99),
        "gap_outside_p99_ms": _p(far, 99),
        "ttft_around_max_ms": _most(first_near),
        "ttft_outside_max_ms": _most(first_far),
        "ttft_around_p50_ms": _p(first_near, 50),
        "ttft_outside_p50_ms": _p(first_far, 50),
        "errors": sorted({answer.error for answer in answers if answer.error})[:8],
        "changes": [
            {"to": c.to, "ms": (c.answered - c.asked) * 1e3, "error": c.error, "report": dict(c.report)}
            for c in changes
        ],
    }  # fmt: skip


def _split(
    found: Sequence[tuple[float, float]], spans: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    near: list[float] = []
    far: list[float] = []
    for at, value in found:
        (near if any(begin <= at <= end for begin, end in spans) else far).append(value)
    return near, far


def _most(values: Sequence[float]) -> float | None:
    return max(values) * 1e3 if values else None


def _p(values: Sequence[float], p: float) -> float | None:
    value = percentile(values, p)
    return None if value is None else value * 1e3
