"""`report.html`: one file that needs nothing else, and no network, to be read.

    document ┬ INVALID, where the run does not count
             ├ at a glance, figures with intervals, limits, parts of the TTFT
             ├ plots: SVG inside the page, in its own ink
             └ failures, slowest requests, notes, machine, command, definitions

Rules: all text that comes from outside (a server's words, names, commands) is escaped here and nowhere else; the page
has no script, and its policy forbids to load anything; it is readable on a phone, on light and on dark ground.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_bench.figures import slo
from headrace_bench.figures.schema import Figures, Summary
from headrace_bench.figures.summary import summarise
from headrace_bench.record import Health
from headrace_bench.report import rows
from headrace_bench.report.folder import PAGE, PLOTS, Config, Folder, read, save
from headrace_bench.report.rows import BLANK, Compared, Row, number
from headrace_bench.report.series import Point, points, slowest

if TYPE_CHECKING:
    from headrace_bench.report.plots import Plot

STYLE = """
:root { color-scheme: light dark; --ink: #20242b; --faint: #6a7280; --grid: #d9dde3; --paper: #fff; --card: #f5f6f8;
  --blue: #0072b2; --sky: #56b4e9;
  --bad: #b3261e; --bad-ink: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --faint: #9aa3b0; --grid: #343a45; --paper: #14171c;
  --card: #1d2128; --bad: #c4392f; --blue: #3b93dd; --sky: #a6dcf7; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .6rem 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p.lead, .faint, figcaption, caption { color: var(--faint); }
.invalid { background: var(--bad); color: var(--bad-ink); padding: .8rem 1rem; border-radius: .5rem; }
.invalid strong { font-size: 1.15rem; } .invalid ul { margin: .3rem 0 0; padding-left: 1.2rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--faint); font-size: .85rem; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td small { color: var(--faint); display: block; }
td.text, th.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 10rem; }
figure { margin: 1.6rem 0; max-width: 46rem; }
figure svg { width: 100%; height: auto; min-width: 34rem; display: block; }
figcaption { font-size: .9rem; }
pre { background: var(--card); padding: .7rem .9rem; border-radius: .5rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SHOWN = 50
"""Failures and slowest requests in a table."""


@dataclass(frozen=True, slots=True)
class Html:
    """Markup that is safe to put into a page: made here, of escaped text."""

    markup: str


@dataclass(frozen=True, slots=True)
class Side:
    """One of two that are compared."""

    name: str
    url: str


def make(path: Path) -> Path:
    """Draws the plots and the page of a run's folder, again or for the first time; the page's path.

    A run that was cut short has no summary: one is made of what there is, and marked.
    """
    from headrace_bench.report import plots  # matplotlib takes half a second to load: only who draws waits for it

    folder = read(path)
    summary = summary_of(folder)
    drawn = plots.of_run(points(folder.records))
    plots.write(path / PLOTS, drawn)
    save(path / PAGE, run_page(folder, summary, drawn).encode())
    return path / PAGE


def summary_of(folder: Folder) -> Summary:
    """As it was stored; of a run that was cut short made of what there is, and marked."""
    return folder.summary or _cut_short(folder)


def run_page(folder: Folder, summary: Summary, plots: Sequence[Plot]) -> str:
    """The page of one run."""
    config, every = folder.config, points(folder.records)
    lead = f"{summary.kind}, {summary.window_s:g} s after {summary.warmup_s:g} s of warm-up, seed {summary.seed}, "
    return document(
        f"{config.model} at {config.url}",
        lead + f"{summary.loop} loop, begun {config.wall}",
        summary.invalid,
        [
            ("At a glance", _tiles(summary)),
            ("Figures", _figures(summary.figures)),
            ("Limits", _limits(summary)),
            ("Where the time to the first token went", _parts(summary)),
            *((f"Requests tagged {name}", _figures(part.figures)) for name, part in summary.tags.items()),
            ("Plots", joined(figure(plot) for plot in plots)),
            ("Failures", _failures(summary, every)),
            ("Slowest first tokens", _slowest(every)),
            ("Notes", listed(tuple(dict.fromkeys((*summary.notes, *config.notes))))),
            ("Client and load", _load(summary)),
            ("Machine and command", _machine(config)),
            ("What the figures mean", _definitions()),
        ],
    )


def compare_page(
    a: Side, b: Side, found: Sequence[Compared], plots: Sequence[Plot], *,
    config: Config, invalid: Sequence[str] = (), notes: Sequence[str] = (),
) -> str:  # fmt: skip
    """The page of A against B: verdicts with intervals, the A/A floor beside them, the curves over each other."""
    head = ("figure", f"A: {a.name}", f"B: {b.name}", "B against A", "A/A floor", "p", "pairs", "verdict for B")
    body = [
        (_named(row.label, row.unit), number(row.a), number(row.b), row.effect(), row.floor(),
         BLANK if row.comparison.p is None else f"{row.comparison.p:.3g}", str(row.comparison.pairs),
         row.comparison.verdict)
        for row in found
    ]  # fmt: skip
    how = (
        "B against A: over pairs of interleaved runs, with a 95 % interval. The A/A floor is how far one side strays "
        "from itself in the same protocol. Better or worse is said only where the interval excludes no change and the "
        "effect is larger than the floor."
    )
    sides = definitions({f"{letter}: {side.name}": side.url for letter, side in (("A", a), ("B", b))})
    return document(
        f"{a.name} against {b.name}", f"seed {config.seed}, begun {config.wall}", invalid,
        [("Comparison", joined([table(head, body), paragraph(how)])), ("Sides", sides),
         ("Plots", joined(figure(plot) for plot in plots)), ("Notes", listed((*notes, *config.notes))),
         ("Machine and command", _machine(config)), ("What the figures mean", _definitions())],
    )  # fmt: skip


def document(title: str, lead: str, invalid: Sequence[str], sections: Iterable[tuple[str, Html]]) -> str:
    """A whole page. Sections without anything in them are left out."""
    banner = ""
    if invalid:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in invalid)
        head = "<strong>INVALID: this run does not count</strong>"
        banner = f'<div class="invalid" role="alert">{head}<ul>{reasons}</ul></div>'
    body = "".join(f"<h2>{escape(head)}</h2>\n{html.markup}\n" for head, html in sections if html.markup)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{'INVALID: ' if invalid else ''}{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        "<body>\n<main>\n"
        f'{banner}\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{body}</main>\n</body>\n</html>\n'
    )


def table(head: Sequence[str], body: Iterable[Sequence[str]], text: Sequence[int] = ()) -> Html:
    """`text`: columns of words, which may fold. A second line in a cell, after a newline, is small."""

    def cell(kind: str, place: int, value: str) -> str:
        first, _, small = value.partition("\n")
        more = f"<small>{escape(small)}</small>" if small else ""
        mark = ' class="text"' if place in text else ""
        return f"<{kind}{mark}>{escape(first)}{more}</{kind}>"

    lines = ["".join(cell("td", place, value) for place, value in enumerate(row)) for row in body]
    if not lines:
        return Html("")
    top = "".join(cell("th", place, value) for place, value in enumerate(head))
    rest = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return Html(f'<div class="scroll"><table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{rest}</tbody>\n</table></div>')


def figure(plot: Plot) -> Html:
    """A plot inside the page, with its caption."""
    from headrace_bench.report import palette

    drawn = palette.inline(palette.svg(plot.figure), plot.name, escape(plot.title))
    caption = f"<figcaption>{escape(plot.caption)}</figcaption>"
    return Html(f'<figure id="plot-{plot.name}"><div class="scroll">{drawn}</div>{caption}</figure>')


def definitions(entries: Mapping[str, str]) -> Html:
    return Html("<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in entries.items()) + "</dl>")


def listed(lines: Sequence[str]) -> Html:
    return Html("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else "")


def paragraph(text: str) -> Html:
    return Html(f'<p class="faint">{escape(text)}</p>')


def joined(parts: Iterable[Html]) -> Html:
    return Html("\n".join(part.markup for part in parts))


def _tiles(summary: Summary) -> Html:
    good, found, counts = summary.attainment, summary.figures, summary.counts

    def tile(value: str, label: str) -> str:
        first, _, rest = value.partition(" [")
        more = f" [{rest}" if rest else ""
        return f'<div class="tile"><b>{escape(first)}</b><span>{escape(more)}</span><span>{escape(label)}</span></div>'

    tiles = [
        tile(rows.share(good.attainment), f"good by {good.slo}, of all scheduled"),
        tile(number(good.goodput_per_s), "good requests a second"),
        tile(rows.interval(found.ttft_ms.p50), "TTFT p50, ms"),
        tile(rows.interval(found.ttft_ms.p95), "TTFT p95, ms"),
        tile(rows.interval(found.gap_ms.p99), "gap p99, ms"),
        tile(f"{counts.failed:,}", f"failed of {counts.scheduled:,}"),
    ]
    return Html(f'<div class="tiles">{"".join(tiles)}</div>')


def _figures(figures: Figures) -> Html:
    return _spreads(rows.rows(figures))


def _spreads(found: Sequence[Row]) -> Html:
    head = ("figure", "n", *rows.PERCENTILES, "max")
    small = ([cell.replace(" [", "\n[") for cell in row.cells()] for row in found)
    return table(head, ((_named(row.label, row.unit), *cells) for row, cells in zip(found, small, strict=True)))


def _limits(summary: Summary) -> Html:
    good = summary.attainment
    body = [(f"{name} ≤ {one.limit_ms:g} ms", rows.share(one.attainment)) for name, one in good.limits.items()]
    return table(("limit", "kept, of all scheduled"), [*body, ("all of them", rows.share(good.attainment))])


def _parts(summary: Summary) -> Html:
    found = rows.parts(summary)
    if not found and summary.figures.ttft_ms.count:
        return paragraph("This server tells nothing of its own time, so server and network are one.")
    return _spreads(found)


def _failures(summary: Summary, every: Sequence[Point]) -> Html:
    if not summary.counts.failed:
        return paragraph("None.")
    body = []
    for name, count in summary.counts.by_outcome.items():
        said = sorted({point.error for point in every if point.outcome == name and point.error})
        more = f" and {len(said) - 3} more" if len(said) > 3 else ""
        body.append((name, f"{count:,}", "; ".join(said[:3]) + more))
    status = ", ".join(f"{status}: {count}" for status, count in summary.counts.by_status.items())
    shown = table(("class", "requests", "the server's words"), body, text=(2,))
    return joined([shown, paragraph(f"By status: {status}.")]) if status else shown


def _slowest(every: Sequence[Point]) -> Html:
    head = ("request", "due [s]", "TTFT [ms]", "client", "network", "server", "prompt tokens", "cached", "request id")
    body = []
    for point in slowest(every, SHOWN):
        split = point.split
        sides = (BLANK,) * 3
        if split is not None:
            network = number(split.side_ms("network")) if split.told else BLANK
            sides = (number(split.side_ms("client")), network, number(split.side_ms("server")))
        prompt = BLANK if point.prompt_tokens is None else f"{point.prompt_tokens:,}"
        body.append((f"#{point.index}", f"{point.at:.2f}", number(point.ttft), *sides, prompt,
                     f"{point.cached_tokens:,}", point.request_id or BLANK))  # fmt: skip
    return table(head, body, text=(8,))


def _load(summary: Summary) -> Html:
    health, rates, sources = summary.health, summary.rates, summary.tokens
    spreads = "; ".join(
        f"{one.window_s:g} s: offered {number(one.offered)}, achieved {number(one.achieved)}"
        for one in summary.arrivals
    )
    steal = BLANK if health.steal is None else f"{health.steal * 100:.1f} %"
    return definitions({
        "rates": f"asked {number(rates.asked_per_s)}/s, sent {number(rates.sent_per_s)}/s, completed "
                 f"{number(rates.completed_per_s)}/s, {number(rates.tokens_per_s)} tokens/s",
        "schedule lag": f"p50 {number(health.lag_p50_ms)}, p99 {number(health.lag_p99_ms)}, "
                        f"max {number(health.lag_max_ms)} ms",
        "client": f"loop lag p99 {number(health.loop_lag_p99_ms)}, max {number(health.loop_lag_max_ms)} ms; CPU "
                  f"{health.cpu * 100:.0f} % of a core; longest collector's pause {number(health.gc_longest_ms)} ms",
        "machine meanwhile": f"load average {number(health.load_average)}, steal {steal}",
        "dispersion of arrivals": spreads or BLANK,
        "tokens counted": f"by usage for {sources.usage:,} requests, by chunks for {sources.chunks:,}; both known and "
                          f"different for {sources.differ:,}",
        "cached prompt tokens": BLANK if summary.cache.share is None else f"{summary.cache.share * 100:.1f} %",
        "independent requests": f"{number(summary.effective)} tell as much as these; intervals count so many",
    })  # fmt: skip


def _machine(config: Config) -> Html:
    machine = config.machine
    memory = BLANK if machine.memory is None else f"{machine.memory / 2**30:.1f} GiB"
    flags = [(name, value) for name, value in config.flags.items() if value not in (None, "", False)]
    entries = {
        "processor": f"{machine.cpu or BLANK}, {machine.cores} cores for this process",
        "memory": memory,
        "kernel": machine.kernel,
        "versions": ", ".join(f"{name} {version}" for name, version in config.versions.items()),
        "server": config.server or BLANK,
        "flags": ", ".join(f"{name} = {value}" for name, value in flags) or BLANK,
    }
    return joined([definitions(entries), Html(f"<pre>{escape(shlex.join(config.command))}</pre>")])


def _definitions() -> Html:
    percentiles = (
        "By nearest rank, so always a sample. The interval holds the true one 95 % of the time; an end that is open is "
        "not known. p99 is blank below 368 samples; – is not known, never 0."
    )
    more = {
        "percentiles": percentiles,
        "good": "Ended well, with a token, and kept every limit.",
        "goodput": "Good requests a second of the window. The share of good ones counts all that were scheduled.",
        "network": "TTFT from sent, less the server's own time: both ways, and this client's reading.",
    }
    return definitions({label: text for _, label, _, text in rows.FIGURES} | more)


def _named(label: str, unit: str) -> str:
    return f"{label} [{unit}]" if unit else label


def _cut_short(folder: Folder) -> Summary:
    """Of a run that did not end: no health is known, so none is claimed."""
    due = len(folder.schedule.requests)
    reason = (
        f"the run was cut short: {len(folder.records)} of {due} requests have ended, the client's health is unknown"
    )
    health = Health(
        lag_p50=None, lag_p99=None, lag_max=None, loop_lag_p99=0.0, loop_lag_max=0.0, cpu=0.0, gc_pauses=0,
        gc_longest=0.0, load_average=0.0, steal=None, asked_rate=None, sent_rate=None, invalid=(reason,),
    )  # fmt: skip
    limits = folder.config.flags.get("slo")
    return summarise(folder.schedule, folder.records, folder.health or health, slo.parse(str(limits or "chat")))
