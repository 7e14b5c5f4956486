"""`idle`: what thousands of silent streams cost a server, in memory and in the time of those who are served."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from headrace_bench import gateways, idle
from headrace_bench.fault import Fault, Misuse
from headrace_bench.idle import Plan, Subject
from headrace_bench.lab import HEADRACE, Lab
from headrace_bench.listener import LOOPBACK, listener
from headrace_bench.report import judged
from headrace_bench.report import table as tables
from headrace_bench.report.folder import claim
from headrace_bench.report.judged import Line
from headrace_bench.report.machine import machine, versions
from headrace_bench.report.table import Table, shown
from headrace_bench.server import NotReady, Server
from headrace_bench.verbs import flags
from headrace_bench.wire import Refused

KB_BAR, TTFT_BAR, AGAIN_BAR = 40.0, 1.2, 1.1
LINES = (
    Line("streams held", "held"),
    Line("refused or not connected", "refused", "<=", 0),
    Line("ended by the server", "ended", "<=", 0),
    Line("seconds until the server had taken all", "opened_s"),
    Line("memory a stream, KB", "kb_each", "<=", KB_BAR),
    Line("TTFT with the streams ÷ without", "ttft_ratio", "<=", TTFT_BAR),
    Line("TTFT p50 before, ms", "ttft_before_ms"),
    Line("TTFT p50 with the streams, ms", "ttft_open_ms"),
    Line("TTFT p95 before, ms", "ttft_before_p95_ms"),
    Line("TTFT p95 with the streams, ms", "ttft_open_p95_ms"),
    Line("CPU while nothing comes, % of a core", "cpu_open", unit=0.01),
    Line("memory before, MB", "rss_base", unit=1e6),
    Line("memory with the streams, MB", "rss_open", unit=1e6),
    Line("memory after they closed, MB", "rss_closed", unit=1e6),
    Line("share of the streams' memory given back", "given_back"),
    Line("files that stay open", "files_left", "<=", idle.FILES_LEFT),
    Line("memory of a second opening ÷ the first's", "again_ratio", "<=", AGAIN_BAR),
)
QUEUED = {"engine.max_waiting": 65536, "engine.max_waiting_tokens": 2**31, "engine.queue_timeout_s": 3600}


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("--url", help="a server that runs; without it a Headrace is started as a gateway")
    parser.add_argument("--model", default="", help="of the server at --url")
    parser.add_argument("--key", help=f"its API key; better in {flags.KEY}")
    queued = "a Headrace with its own engine scripted:RATE, whose streams wait for a place"
    parser.add_argument("--queued", type=flags.number(0, above=True), metavar="RATE", help=queued)
    parser.add_argument("--streams", type=flags.count, default=10_000)
    parser.add_argument("--probes", type=flags.seed, default=200, help="short requests, before and meanwhile")
    parser.add_argument("--message", default=idle.SILENT, help="what a stream that is to stay silent asks")
    parser.add_argument("--probe", default=idle.PROBE, help="what a probe asks")
    parser.add_argument("--files-each", type=flags.count, help="files of a stream in the server: 2 in a gateway")
    parser.add_argument("--headrace-args", default="", help="more flags for `headrace serve`, in one argument")
    flags.add_out(parser)


def run(asked: argparse.Namespace) -> int:
    """0 measured, whatever came of it. Raises Fault."""
    if asked.url is not None and asked.queued is not None:
        raise Misuse("--url and --queued: one server or the other")
    if asked.url is not None and not asked.model:
        raise Misuse("--model: of the server at --url")
    wall = datetime.now(UTC).isoformat(timespec="seconds")
    gateway = asked.url is None and asked.queued is None
    plan = Plan(
        streams=asked.streams,
        probes=0 if asked.queued is not None else asked.probes,
        files_each=asked.files_each or (2 if gateway else 1),
        silent=asked.message,
        probe=asked.probe,
    )
    plan = idle.affordable(plan)
    if plan.streams < asked.streams:
        _say(f"{plan.streams} streams: the system's limit of open files leaves no room for {asked.streams}")
    folder = flags.out_of(asked)
    claim(folder)
    folder = folder.resolve()
    try:
        with contextlib.ExitStack() as stack:
            subject, beside = _subjects(asked, folder, stack)
            _can_hold(subject, plan)
            found = idle.measure(subject, beside, plan, _say)
    except (NotReady, Refused, OSError) as error:
        raise Fault(f"{type(error).__name__}: {error}") from None
    installed = versions()
    made = Table(
        verb="idle",
        wall=wall,
        command=shown(asked.command, {str(folder): "DIR", str(asked.out): "DIR"}),
        machine=machine(),
        versions={name: installed[name] for name in ("python", HEADRACE) if name in installed},
        columns=judged.COLUMNS,
        rows=judged.rows([line for line in LINES if plan.probes or line.key != "ttft_ratio"], found),
        notes=tuple(notes(asked, plan)),
        figures=found,
    )
    (folder / "idle.json").write_text(json.dumps(found, indent=1))
    tables.write(folder, made)
    print(tables.markdown(made))
    _say(f"in {folder}")
    return 0


def _subjects(asked: argparse.Namespace, folder: Path, stack: contextlib.ExitStack) -> tuple[Subject, Subject | None]:
    more = shlex.split(asked.headrace_args)
    if asked.url is not None:
        parts = urlsplit(asked.url)
        pid = listener(parts.port or 80) if parts.hostname in LOOPBACK else None
        if pid is None:
            raise Fault(f"--url {asked.url}: its process is not seen from here: its memory cannot be measured")
        return Subject(asked.url.rstrip("/"), asked.model, [pid], flags.key_of(asked)), None
    if asked.queued is not None:
        settings = [word for name, limit in QUEUED.items() for word in ("--set", f"{name}={limit}")]
        server = Lab(Path("scripted"), folder).headrace(*settings, *more, model=f"scripted:{asked.queued:g}")
        return _of(stack.enter_context(server), "scripted"), None
    source = stack.enter_context(gateways.upstream(folder))
    both = [gateways.headrace(folder, *more, name=name)(source.url) for name in (HEADRACE, f"{HEADRACE}-beside")]
    subject, beside = (_of(stack.enter_context(server), gateways.ALIAS) for server in both)
    return subject, beside


def _of(server: Server, model: str) -> Subject:
    return Subject(server.url, model, server.pids())


def _can_hold(subject: Subject, plan: Plan) -> None:
    """Fault: the server's own limit is too low, and it would refuse for that."""
    allowed = idle.allowed(subject.pids[0])
    needed = plan.streams * plan.files_each
    if allowed is not None and allowed < needed:
        raise Fault(f"the server may open {allowed} files and {needed} are needed: start it with a higher ulimit -n")


def notes(asked: argparse.Namespace, plan: Plan) -> Sequence[str]:
    """What a reader has to know."""
    what = (
        f"{plan.streams:,} streams, opened at {idle.pace()}; memory is the resident set of the server's processes once "
        "it no longer moves."
    )
    if plan.streams < asked.streams:
        what += f" {asked.streams:,} were asked for; the system's limit of open files leaves room for so many."
    if asked.queued is not None:
        return [what, f"The streams wait for a place at an engine of {asked.queued:g} tokens a second; no probes."]
    if asked.url is not None:
        return [what, "Probes before and meanwhile, of one server."]
    return [
        what,
        f"Headrace is a gateway before a scripted server: a stream has a connection on either side. {plan.probes} "
        "probes, each beside one of a second Headrace that has no streams, in pairs, in drawn order; the ratio is that "
        "of the pairs' medians with the streams and before.",
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
