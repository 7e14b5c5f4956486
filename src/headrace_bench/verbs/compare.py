"""`compare`: is B better than A? Two servers in turn with the same load, or runs that were recorded.

    flags ─▶ servers there, or started ─▶ A/A floor ─▶ pairs A B, B A … ─▶ one sentence, a table, a page
             OUT/runs/floor-01-1 …  pair-12-b: a run's folder each, written as they end

Rules: what a comparison may say is decided in `figures.claim`; a server that goes away ends it, and what was measured
up to then is in OUT and is judged as far as it goes; recorded runs are compared where they asked the same, and nothing
else.
"""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from headrace_bench.client.run import Run, now
from headrace_bench.client.target import Target
from headrace_bench.duel import Cut, Dropped, Duel, Side, duel
from headrace_bench.fault import Fault, Misuse
from headrace_bench.figures.claim import Claim, conclude
from headrace_bench.figures.paired import MIN_PAIRS
from headrace_bench.figures.slo import Slo
from headrace_bench.figures.summary import summarise
from headrace_bench.figures.trial import FIGURES, Both, Figure, Trial
from headrace_bench.listener import cpu_behind
from headrace_bench.load.schedule import Schedule
from headrace_bench.recorded import pair_up
from headrace_bench.report import console, folder, page, versus
from headrace_bench.report.series import Point, points
from headrace_bench.server import NotReady, Server, free_port
from headrace_bench.verbs import flags

PAIRS = 12
DURATION_S, WARMUP_S = 20.0, 2.0
PRIMARY = "ttft_p50"
RUNS = "runs"


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    sides = parser.add_argument_group("the sides")
    for side in "ab":
        sides.add_argument(f"--{side}", metavar="URL", help=f"server {side.upper()}, which runs")
        sides.add_argument(f"--{side}-cmd", metavar="COMMAND", help="or how to start it; {port} in it is replaced")
        sides.add_argument(f"--{side}-name", help="what to call it")
    sides.add_argument("--b-model", help="B's model, where it is another than --model")
    sides.add_argument("--ready", default="/v1/models", metavar="PATH", help="answers 200 once a started server is up")
    sides.add_argument(
        "--folders", nargs=2, metavar=("A,A2,…", "B,B2,…"), help="runs that were recorded, instead of servers"
    )
    parser.add_argument("--pairs", type=flags.count, default=PAIRS, metavar="N", help=f"at least {MIN_PAIRS} ({PAIRS})")
    parser.add_argument(
        "--floor-pairs", type=flags.count, metavar="N", help="A against itself, first (half of --pairs, at least 6)"
    )
    parser.add_argument(
        "--primary", default=PRIMARY, choices=[figure.name for figure in FIGURES], metavar="FIGURE",
        help=f"what is claimed about, chosen beforehand: {', '.join(figure.name for figure in FIGURES)} ({PRIMARY})",
    )  # fmt: skip
    flags.add_target(parser, url=False)
    flags.add_load(parser)
    flags.add_slo(parser)
    flags.add_out(parser)
    parser.set_defaults(duration=DURATION_S, warmup=WARMUP_S)
    parser.epilog = f"Runs are short here: --duration is {DURATION_S:g} and --warmup {WARMUP_S:g} unless given."


def run(asked: argparse.Namespace) -> int:
    """0 measured, whatever came of it; 1 no pair counts, or a server went away; 130 interrupted. Raises Fault."""
    slo = flags.slo_of(asked)
    if asked.folders is not None:
        return _recorded(asked, slo)
    for side in "ab":
        given = vars(asked)
        if (given[side] is None) == (given[f"{side}_cmd"] is None):
            raise Misuse(f"which server is {side.upper()}? give one of --{side} URL and --{side}-cmd COMMAND")
    for flag, count in (("--pairs", asked.pairs), ("--floor-pairs", asked.floor_pairs)):
        if count is not None and count < MIN_PAIRS:
            raise Misuse(f"{flag} {count}: below {MIN_PAIRS} no difference can be told from chance")
    plan = flags.schedule_of(asked)  # what is wrong with the load is said before a server is asked
    out = flags.out_of(asked)
    with ExitStack() as started:
        targets = {side: _asked(asked, side) for side in "ab" if vars(asked)[side] is not None}
        folder.claim(out)
        for side in "ab":
            if side not in targets:
                targets[side] = _started(asked, side, out, started)
        a, b = _sides(asked, targets["a"], targets["b"])
        return _compared(asked, a, b, slo, out, plan)


def _asked(asked: argparse.Namespace, side: str, url: str | None = None) -> Target:
    given = vars(asked)
    model = asked.b_model if side == "b" and asked.b_model is not None else asked.model
    try:
        return flags.target_of(argparse.Namespace(**{**given, "model": model}), url or given[side])
    except Fault as fault:
        raise type(fault)(f"{side.upper()}: {fault}") from None


def _started(asked: argparse.Namespace, side: str, out: Path, until: ExitStack) -> Target:
    """Runs until the stack is left."""
    text, port = vars(asked)[f"{side}_cmd"], free_port()
    if "{port}" not in text:
        raise Misuse(f"--{side}-cmd {text}: where does it listen? write {{port}} where its port goes")
    url = f"http://127.0.0.1:{port}"
    try:
        command = shlex.split(text.replace("{port}", str(port)))
        server = Server(side.upper(), command, url=url, ready=asked.ready, log=out / f"{side}.log")
        until.enter_context(server)
    except (NotReady, OSError, ValueError) as error:
        raise Fault(f"--{side}-cmd {text}: {error}; its log is {out / f'{side}.log'}") from None
    return _asked(asked, side, url)


def _sides(asked: argparse.Namespace, a: Target, b: Target) -> tuple[Side, Side]:
    names = [asked.a_name, asked.b_name]
    defaults = ("A", "B") if a.url == b.url and a.model == b.model else (_called(a, b), _called(b, a))
    names = [name or default for name, default in zip(names, defaults, strict=True)]
    if names[0] == names[1]:
        raise Misuse(f"both sides are called {names[0]}: give --a-name and --b-name")
    return Side(names[0], a, cpu_behind(a.url)), Side(names[1], b, cpu_behind(b.url))


def _called(one: Target, other: Target) -> str:
    """By what differs."""
    return one.model if one.url == other.url else str(one.place).removeprefix("http://").removeprefix("127.0.0.1")


class _Keeper:
    """Writes each run down as it ends, and says a line."""

    def __init__(self, out: Path, config: folder.Config, slo: Slo, primary: Figure, console: Console) -> None:
        self._out = out
        self._config = config
        self._slo = slo
        self._primary = primary
        self._console = console
        self.points: dict[tuple[int, str], list[Point]] = {}
        """Of real pairs: (pair, which) → its requests."""

    def __call__(self, trial: Trial, ran: Run) -> None:
        place = trial.place
        name = f"{place.kind}-{place.pair + 1:02}-{place.which if place.kind == 'pair' else place.nth + 1}"
        config = msgspec.structs.replace(
            self._config, url=folder.without_user(ran.target.url), model=ran.target.model, seed=trial.seed,
            wall=ran.wall, notes=ran.schedule.notes,
        )  # fmt: skip
        with folder.Journal(self._out / RUNS / name, config, ran.schedule) as journal:
            for record in ran.records:
                journal(record)
            summary = summarise(ran.schedule, ran.records, ran.health, self._slo)
            journal.finish(ran.records, ran.health, summary)
        if place.kind == "pair":
            self.points[place.pair, place.which] = points(ran.records)
        value = versus.valued(trial, self._primary)
        ends = ", ".join(f"{count} {outcome}" for outcome, count in sorted(trial.outcomes.items()))
        bad = f"  INVALID: {trial.invalid[0]}" if trial.invalid else ""
        self._console.print(f"{name:12} {trial.side:24} {self._primary.name} {value}  {ends}{bad}", soft_wrap=True)


def _compared(asked: argparse.Namespace, a: Side, b: Side, slo: Slo, out: Path, plan: Schedule) -> int:
    show = Console(highlight=False)
    primary = next(figure for figure in FIGURES if figure.name == asked.primary)
    config = folder.config(
        verb="compare", command=asked.command, url=a.target.url, model=a.target.model, seed=asked.seed, wall=now(),
        flags={name: value for name, value in vars(asked).items() if name not in ("verb", "command")},
        notes=plan.notes,
    )  # fmt: skip
    keeper = _Keeper(out, config, slo, primary, show)
    ended: Cut | None = None
    runs = 2 * (
        asked.pairs + (max(MIN_PAIRS, -(-asked.pairs // 2)) if asked.floor_pairs is None else asked.floor_pairs)
    )
    minutes = runs * (plan.warmup + plan.duration) / 60
    show.print(
        f"{runs} runs of {plan.warmup + plan.duration:g} s: {minutes:.0f} minutes, and what answers take after that"
    )

    def scheduler(seed: int) -> Schedule:
        return flags.schedule_of(asked, seed)

    try:
        made = duel(
            a, b, scheduler, pairs=asked.pairs, floor_pairs=asked.floor_pairs, seed=asked.seed, slo=slo,
            drain_s=asked.drain, on_run=keeper,
        )  # fmt: skip
    except Cut as cut:
        made, ended = cut.duel, cut
    if ended is not None:
        made.notes.append(f"it ended before its time: {ended}")
    claim = conclude(a.name, b.name, made.pairs, made.floor, FIGURES, asked.primary, asked.seed)
    _told(made, claim, config, keeper, out, show)
    if ended is not None:
        raise ended
    return 0 if made.pairs else 1


def _told(made: Duel, claim: Claim, config: folder.Config, keeper: _Keeper, out: Path, show: Console) -> None:
    """JSON, table, page and plots of what there is."""
    from headrace_bench.report import plots  # half a second to load

    dropped = [{"kind": one.kind, "pair": one.pair + 1, "reasons": list(one.reasons)} for one in made.dropped]
    if dropped:
        made.notes.append(f"pairs that do not count: {len(dropped)}, as the client or an idle server was not in order")
    invalid = [] if made.pairs else ["no pair counts", *_counted(made.dropped)]
    about: dict[str, Any] = {"seed": made.seed, "slo": made.slo.text() if made.slo.limits() else made.slo.name,
                             "config": config}  # fmt: skip
    versus.write(
        out, versus.document(made.a.name, made.b.name, claim, made.pairs, made.floor, dropped, made.notes, about)
    )
    rows = versus.compared(claim)
    show.print(console.compared(made.a.name, made.b.name, rows, invalid))
    for line in (*map(versus.merged, claim.merged), *made.notes, claim.sentence):
        show.print(line, soft_wrap=True)
    drawn = plots.overlay(made.a.name, made.b.name, _points(made.pairs, keeper, "a"), _points(made.pairs, keeper, "b"))
    plots.write(out / folder.PLOTS, drawn)
    a, b = (page.Side(side.name, folder.without_user(side.target.url)) for side in (made.a, made.b))
    notes = [claim.sentence, *map(versus.merged, claim.merged), *made.notes]
    folder.save(
        out / folder.PAGE,
        page.compare_page(a, b, rows, drawn, config=config, invalid=invalid, notes=notes).encode(),
    )
    show.print(f"{out / folder.PAGE}", soft_wrap=True)


def _counted(dropped: Sequence[Dropped]) -> list[str]:
    """Reasons by what they begin with, for their numbers differ, and how many pairs have each."""
    kinds = Counter(kind for one in dropped for kind in {line.partition(":")[0] for line in one.reasons})
    return [f"{count} pairs: {kind}" for kind, count in kinds.most_common()]


def _points(pairs: Sequence[Both], keeper: _Keeper, which: str) -> list[Point]:
    """Of one side, in pairs that count."""
    return [point for one, _ in pairs for point in keeper.points.get((one.place.pair, which), [])]


def _recorded(asked: argparse.Namespace, slo: Slo) -> int:
    """1: no two runs asked the same."""
    a, b = ([Path(name) for name in text.split(",") if name] for text in asked.folders)
    if not a or not b:
        raise Misuse("--folders: give at least one folder on each side, several with commas")
    found = pair_up(a, b, slo)
    show = Console(highlight=False)
    left, right = (str(side[0]) if len(side) == 1 else f"{side[0]} and {len(side) - 1} more" for side in (a, b))
    for one, other, reasons in found.dropped:
        show.print(f"{one} and {other} do not count: {'; '.join(reasons)}", soft_wrap=True)
    if found.alone:
        show.print(f"not the same load as any of the other side: {', '.join(found.alone)}", soft_wrap=True)
    if not found.pairs:
        raise Fault("nothing can be claimed: no run of A asked the same as a run of B; record both with one --seed")
    claim = conclude(left, right, found.pairs, [], FIGURES, asked.primary, asked.seed)
    show.print(console.compared(left, right, versus.compared(claim)))
    for line in (*map(versus.merged, claim.merged), claim.sentence):
        show.print(line, soft_wrap=True)
    if asked.out is not None:
        folder.claim(asked.out)
        about: dict[str, Any] = {"folders": {"a": [str(one) for one in a], "b": [str(one) for one in b]}}
        dropped = [{"a": one, "b": other, "reasons": list(why)} for one, other, why in found.dropped]
        versus.write(asked.out, versus.document(left, right, claim, found.pairs, [], dropped, found.alone, about))
    return 0
