"""`switching`: a model exchanged under load."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from headrace_bench import gateways, switching
from headrace_bench.client.run import run as run_load
from headrace_bench.client.target import Target
from headrace_bench.fault import Fault, Misuse
from headrace_bench.lab import HEADRACE
from headrace_bench.report import judged
from headrace_bench.report import table as tables
from headrace_bench.report.folder import claim
from headrace_bench.report.judged import Line
from headrace_bench.report.machine import machine, versions
from headrace_bench.report.table import Table, scrubbed, shown
from headrace_bench.server import NotReady
from headrace_bench.switching import ENGINES, Change, Changer, Plan
from headrace_bench.verbs import flags
from headrace_bench.wire import Refused, chat

ADMIN_KEY = "HEADRACE_BENCH_ADMIN_KEY"
GAP_BAR_MS = 200.0
DRAIN_S = 60.0
LINES = (
    Line("requests", "requests"),
    Line("failed", "failed", "<=", 0),
    Line("tokens lost, doubled or nobody's", "wrong", "<=", 0),
    Line("switches", "switches"),
    Line("switches that failed", "switches_failed", "<=", 0),
    Line("longest added gap around a switch, ms", "gap_around_max_ms", "<=", GAP_BAR_MS),
    Line("the same outside", "gap_outside_max_ms"),
    Line("added gap p99 around a switch, ms", "gap_around_p99_ms"),
    Line("the same outside", "gap_outside_p99_ms"),
    Line("longest added TTFT around a switch, ms", "ttft_around_max_ms"),
    Line("the same outside", "ttft_outside_max_ms"),
    Line("added TTFT p50 around a switch, ms", "ttft_around_p50_ms"),
    Line("the same outside", "ttft_outside_p50_ms"),
    Line("longest time until a switch was answered, ms", "switch_ms"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument(
        "--url", help="a Headrace that runs, whose engines relay to scripted servers; else one is started"
    )
    parser.add_argument("--alias", default=gateways.ALIAS, help="of the server at --url")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), metavar="A,B", help="of the server at --url; A serves now"
    )
    parser.add_argument("--key", help=f"its API key; better in {flags.KEY}")
    parser.add_argument("--admin-key", help=f"for the switch; better in {ADMIN_KEY}")
    parser.add_argument("--models", metavar="A,B", help="engines of its own instead: scripted:RATE, names or files")
    parser.add_argument("--rate", type=flags.number(0, above=True), default=50.0, help="requests a second")
    parser.add_argument("--tokens", type=flags.count, default=20, help="of an answer")
    parser.add_argument("--switches", type=flags.count, default=6)
    parser.add_argument(
        "--every", type=flags.number(0, above=True), default=4.0, metavar="S", help="between two switches"
    )
    parser.add_argument("--headrace-args", default="", help="more flags for `headrace serve`, in one argument")
    flags.add_out(parser)


def run(asked: argparse.Namespace) -> int:
    """0 measured, whatever came of it. Raises Fault."""
    models = _two("--models", asked.models) if asked.models else None
    if models and asked.url:
        raise Misuse("--models and --url: engines of a server that is started, or a server that runs")
    plan = Plan(
        rate=asked.rate,
        tokens=asked.tokens,
        switches=asked.switches,
        every_s=asked.every,
        stamped=models is None,
    )
    wall = datetime.now(UTC).isoformat(timespec="seconds")
    folder = flags.out_of(asked)
    claim(folder)
    folder = folder.resolve()
    try:
        with contextlib.ExitStack() as stack:
            url, alias, names, key = _started(asked, models, folder, stack)
            target = Target(url, alias, key=flags.key_of(asked))
            texts = _texts(target, names, key, plan) if models else []
            changer = Changer(plan, names, lambda to: switching.switch(url, key, alias, to))
            changer.start()
            try:
                ran = run_load(target, switching.schedule(plan), drain_s=DRAIN_S, keep_text=True)
            finally:
                changer.stop()
    except (NotReady, Refused, OSError) as error:
        raise Fault(f"{type(error).__name__}: {error}") from None
    found = switching.summary(switching.told(plan, ran, texts), changer.changes)
    found["invalid"] = list(ran.health.invalid)
    installed = versions()
    made = Table(
        verb="switching",
        wall=wall,
        command=shown(asked.command, {str(folder): "DIR", str(asked.out): "DIR"}),
        machine=machine(),
        versions={name: installed[name] for name in ("python", HEADRACE) if name in installed},
        columns=judged.COLUMNS,
        rows=judged.rows(LINES, found),
        notes=tuple(notes(plan, models, found["invalid"], changer.changes)),
        figures=found,
    )
    (folder / "switching.json").write_text(json.dumps(found, indent=1))
    tables.write(folder, made)
    print(tables.markdown(made))
    for line in found["errors"]:
        _say(f"failed: {line}")
    _say(f"in {folder}")
    return int(bool(found["invalid"]) or not found["switches"])


def _two(flag: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) != 2:
        raise Misuse(f"{flag} {text}: two of them, as in A,B")
    return words


def _started(
    asked: argparse.Namespace, models: list[str] | None, folder: Path, stack: contextlib.ExitStack
) -> tuple[str, str, list[str], str | None]:
    """URL, alias, the engines' names, the key for switching."""
    if asked.url is not None:
        key = asked.admin_key or os.environ.get(ADMIN_KEY) or None
        return asked.url.rstrip("/"), asked.alias, _two("--engines", asked.engines), key
    if models is None:
        where = [stack.enter_context(gateways.upstream(folder, f"upstream-{name}")).url for name in ENGINES]
    else:
        where = models
    made = secrets.token_urlsafe(16)
    text = switching.config(list(zip(ENGINES, where, strict=True)), models is None)
    server = stack.enter_context(switching.headrace(folder, text, made, shlex.split(asked.headrace_args)))
    return server.url, gateways.ALIAS, list(ENGINES), made


def _texts(target: Target, names: Sequence[str], key: str | None, plan: Plan) -> list[str]:
    """What each engine says when nothing else happens; the first serves again afterwards. Raises Fault, Refused."""
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": plan.message}],
        "max_tokens": plan.tokens,
        "temperature": 0,
    }
    found = []
    for to in (*names[1:], names[0]):
        change = switching.switch(target.url, key, target.model, to)
        if change.error is not None:
            raise Fault(f"switching to {to} before the load: {change.error}")
        found.append(asyncio.run(chat(target.url, body, key=target.key)).text)
    return found


def notes(plan: Plan, models: list[str] | None, invalid: Sequence[str], changes: Sequence[Change]) -> list[str]:
    """What a reader has to know."""
    if models is None:
        engines = "two scripted servers, each behind an engine of kind `openai`"
        what = f"the first token after {plan.first_s * 1e3:g} ms, then one every {plan.gap_s * 1e3:g}"
    else:
        engines = "two engines of its own: " + ", ".join(f"`{scrubbed(Path(model).name)}`" for model in models)
        what = "TTFT is the whole of it, a gap what is more than the run's median"
    lines = [
        f"{plan.rate:g} requests a second, {plan.tokens} tokens each ({what}); the alias goes from one engine to the "
        f"other and back, {plan.switches} times, {plan.every_s:g} s apart; {engines}.",
        f"Around a switch: from its request until {switching.AFTER_S:g} s after its answer.",
    ]
    lines += [f"the switch to `{c.to}` failed: {scrubbed(c.error)}" for c in changes if c.error is not None]
    return lines + [f"does not count: {scrubbed(why)}" for why in invalid]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
