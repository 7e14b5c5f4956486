"""`find`: the highest rate that keeps what was promised.

    flags ─▶ server there? ─▶ points, a line each ─▶ one sentence, find.json, a page
             rise, narrow, confirm: figures.search; what counts as met is decided there

Rules: a rate is named only where the lower bound of its attainment reaches the target; users of a closed loop are no
rate, and the result says so; what was measured is written after each point, so whatever ends the search keeps it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from headrace_bench.capacity import Cut, Found, capacity
from headrace_bench.client.run import now
from headrace_bench.fault import Misuse
from headrace_bench.figures.point import Point, sentence, winner
from headrace_bench.figures.search import Goal
from headrace_bench.listener import cpu_behind, settle
from headrace_bench.load import arrivals as arriving
from headrace_bench.load.arrivals import Arrivals, Closed
from headrace_bench.load.draw import draw
from headrace_bench.load.schedule import Schedule
from headrace_bench.report import folder, page
from headrace_bench.verbs import flags

SCHEMA = 1
NAME = "find.json"
POINT_S, WARMUP_S, DRAIN_S = 30.0, 5.0, 10.0
SETTLE_S = 20.0
LIMIT_S = 3600.0


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    flags.add_target(parser)
    flags.add_load(parser, "poisson:1")
    flags.add_slo(parser)
    flags.add_out(parser)
    group = parser.add_argument_group("the search")
    group.add_argument(
        "--target",
        type=flags.number(0, 0.9999, above=True),
        default=0.95,
        metavar="SHARE",
        help="good ones of all (0.95)",
    )
    group.add_argument(
        "--confidence", type=flags.number(0.5, 0.9999, above=True), default=0.95, metavar="SHARE", help="(0.95)"
    )
    group.add_argument(
        "--low",
        type=flags.number(0, above=True),
        metavar="RATE",
        help="where to begin; by default what --arrivals says",
    )
    group.add_argument(
        "--high", type=flags.number(0, above=True), metavar="RATE", help="where to stop; nowhere by default"
    )
    group.add_argument(
        "--limit", type=flags.number(0, above=True), default=LIMIT_S, metavar="S", help=f"for all of it ({LIMIT_S:g})"
    )
    parser.set_defaults(duration=POINT_S, warmup=WARMUP_S, drain=DRAIN_S)
    parser.epilog = (
        f"A point's --duration is {POINT_S:g} unless given, and longer where the rate is too low for a proof in that "
        f"time; --warmup is {WARMUP_S:g} and --drain {DRAIN_S:g}. --arrivals closed:N looks for users, not for a rate."
    )


def run(asked: argparse.Namespace) -> int:
    """0 found; 1 no load meets the target, or the server went away; 130 interrupted. Raises Fault."""
    slo = flags.slo_of(asked)
    arrivals = flags.arrivals_of(asked)
    goal = _goal(asked, arrivals)

    def scheduler(load: float, seconds: float, seed: int) -> Schedule:
        return draw(
            at_load(arrivals, load), flags.workload_of(asked, arrivals), seed=seed, duration=seconds,
            warmup=asked.warmup, hang_ups=asked.hang_ups, ignore_eos=asked.ignore_eos,
        )  # fmt: skip

    notes = scheduler(goal.low, goal.seconds_at(goal.low), asked.seed).notes
    target = flags.target_of(asked)
    out = flags.out_of(asked)
    folder.claim(out)
    config = folder.config(
        verb="find", command=asked.command, url=target.url, model=target.model, seed=asked.seed, wall=now(),
        flags={name: value for name, value in vars(asked).items() if name not in ("verb", "command")}, notes=notes,
    )  # fmt: skip
    show = Console(highlight=False)
    cpu = cpu_behind(target.url)
    points: list[Point] = []

    def told(point: Point) -> None:
        points.append(point)
        _write(out, config, points, None)
        show.print(point.text(), soft_wrap=True)

    try:
        found = capacity(
            target, scheduler, goal, slo, seed=asked.seed, drain_s=asked.drain, on_point=told,
            settle=lambda: settle([cpu], SETTLE_S),
        )  # fmt: skip
    except Cut:
        _write(out, config, points, None)
        _page(out, config, points, "it ended before its time", goal, asked.slo)
        raise
    said = _said(found, asked.slo)
    _write(out, config, points, _result(found, said))
    _page(out, config, points, said, goal, asked.slo)
    show.print(said, soft_wrap=True)
    show.print(f"{out / folder.PAGE}", soft_wrap=True)
    return 0 if found.end is not None and found.end.met is not None else 1


def at_load(arrivals: Arrivals, load: float) -> Arrivals:
    """The same arrivals at another rate, or with other users. Misuse for a kind that has no rate."""
    return replace(arrivals, users=int(load)) if isinstance(arrivals, Closed) else arriving.at_rate(arrivals, load)


def _goal(asked: argparse.Namespace, arrivals: Arrivals) -> Goal:
    if asked.requests is not None:
        raise Misuse("--requests: a search draws as many as each point needs")
    if asked.hang_ups > 0 and asked.hang_ups >= 1 - asked.target - 1e-9:
        raise Misuse(
            f"--hang-ups {asked.hang_ups:g}: who hangs up has no whole answer, so no load can reach --target "
            f"{asked.target:g}; give fewer"
        )
    closed = isinstance(arrivals, Closed)
    low = asked.low if asked.low is not None else _given(arrivals)
    if asked.high is not None and asked.high < low:
        raise Misuse(f"--high {asked.high:g}: the search begins at {low:g}; give --low below --high")
    at_load(arrivals, low)  # it can be set to a rate, or this says that it cannot
    goal = Goal(
        target=asked.target,
        confidence=asked.confidence,
        low=max(1.0, float(round(low))) if closed else low,
        high=float(int(asked.high)) if closed and asked.high is not None else asked.high,
        whole=closed,
        seconds=asked.duration,
        overhead=asked.warmup + asked.drain + SETTLE_S,
        limit=asked.limit,
    )
    least = goal.seconds_at(goal.low) + goal.overhead
    if least > goal.limit:
        raise Misuse(f"--limit {goal.limit:g}: the first point alone may take {least:.0f} s; raise it, or --low")
    return goal


def _given(arrivals: Arrivals) -> float:
    """The rate, or the users, that `--arrivals` names; 1 where it names none."""
    value = getattr(arrivals, "users", None) or getattr(arrivals, "rate", None) or 1.0
    return float(value)


def _said(found: Found, slo: str) -> str:
    assert found.end is not None
    return sentence(found.points, found.end, found.goal, slo, found.closed)


def _result(found: Found, said: str) -> dict[str, Any]:
    assert found.end is not None
    won = winner(found.points, found.end)
    return {
        "sentence": said,
        "unit": "users" if found.closed else "requests/s",
        "concurrency_limited": found.closed,
        "met": found.end.met,
        "unmet": found.end.unmet,
        "unmet_because": found.end.because,
        "confirmed": found.end.confirmed,
        "ended": found.end.why,
        "attainment": None if won is None else won.good / won.scheduled,
        "attainment_low": None if won is None else won.low,
        "attainment_high": None if won is None else won.high,
        "slo": found.slo.text(),
        "target": found.goal.target,
        "confidence": found.goal.confidence,
    }


def _write(out: Path, config: folder.Config, points: Sequence[Point], result: dict[str, Any] | None) -> None:
    told = {"schema": SCHEMA, "result": result, "points": list(points), "config": config}
    folder.save(out / NAME, msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")


def _page(out: Path, config: folder.Config, points: Sequence[Point], said: str, goal: Goal, slo: str) -> None:
    from headrace_bench.report import plots  # half a second to load

    tried = [
        plots.RatePoint(one.load, one.goodput, one.load * one.low, one.load * one.high, one.verdict == "met")
        for one in points
        if one.goodput is not None and one.verdict != "invalid"
    ]
    drawn = [] if goal.whole else [plots.goodput(tried, slo)]
    plots.write(out / folder.PLOTS, drawn)
    head = ("load", "for", "verdict", "attainment", f"{100 * goal.confidence:g} %", "of", "backlog / s")
    body = [
        (
            f"{one.load:.4g}", one.purpose, one.verdict,
            f"{'at most ' if one.stopped else ''}{100 * one.good / max(1, one.scheduled):.1f} %",
            f"{100 * one.low:.1f} to {100 * one.high:.1f}", str(one.scheduled),
            "–" if one.backlog_per_s is None else f"{one.backlog_per_s:+.2g}",
        )
        for one in points
    ]  # fmt: skip
    sections = [
        ("Result", page.paragraph(said)),
        ("Points", page.table(head, body)),
        ("Plots", page.joined(page.figure(plot) for plot in drawn)),
        ("Notes", page.listed(config.notes)),
    ]
    whole = page.document(
        f"The highest {'number of users' if goal.whole else 'rate'} for {config.model} at {config.url}",
        f"seed {config.seed}, begun {config.wall}", (), sections,
    )  # fmt: skip
    folder.save(out / folder.PAGE, whole.encode())
