"""Renders docs/reference from the code: `pages()` gives path → text, run as a program it writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.gateway.states import picture
from headrace.observe.metrics import Metrics
from headrace.settings import SECTIONS, SETTINGS, Value

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "<!-- Written by scripts/docs from {source}: change that, then run it. -->"


def settings() -> Iterator[str]:
    yield from (
        WRITTEN.format(source="the rows in src/headrace/settings.py"),
        "",
        "# Settings",
        "",
        "A setting comes from, the later winning:",
        "",
        "1. its default;",
        "2. the profile that [`headrace tune`](../guides/tuning.md) wrote for the model, if it was run;",
        "3. the TOML file given with `--config`, or else `$XDG_CONFIG_HOME/headrace/config.toml` (`~/.config/…`);",
        "4. its environment variable, unless that is empty;",
        "5. a flag of `headrace serve`: `--set NAME=VALUE` sets any of them.",
        "",
        "In the file, `server.port` is `port` in the table `[server]`.",
        "The tables `[engines.NAME]` and `[aliases.NAME]` declare",
        "[many engines behind one name](../guides/engines.md).",
        "An unknown name or a value out of bounds stops the start with one line and exit code 2.",
    )
    for section, kind in SECTIONS.items():
        yield from ("", f"## {section}", "", f"{kind.__doc__}", "")
        yield from ("| setting, variable | default | bounds | meaning |", "|---|---|---|---|")
        for row in SETTINGS.values():
            if row.name.startswith(section + "."):
                default = f"{_shown(row.default)} {row.unit}".rstrip()
                yield f"| `{row.name}`<br>`{row.variable}` | {default} | {row.bounds} | {row.help} |"


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value or "empty"
    return f"{value:.12g}"


def metrics() -> Iterator[str]:
    yield from (
        WRITTEN.format(source="src/headrace/observe/metrics.py"),
        "",
        "# Metrics",
        "",
        "`GET /metrics`, in the Prometheus text format. Histograms are in seconds. The process's own figures",
        "(`headrace_process_*`: CPU, memory, open files) come with it.",
        "",
        "| metric | type | meaning |",
        "|---|---|---|",
    )
    for family in Metrics({}).collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        yield f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "docs/reference/settings.md": settings,
    "docs/reference/metrics.md": metrics,
}


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "docs/guides/engines.md": picture,
}
"""Pages of which only what stands between two marks is generated."""
BEGIN = "<!-- Written by scripts/docs from the table in src/headrace/gateway/states.py. -->"
END = "<!-- End of what is written. -->"


def pages() -> dict[Path, str]:
    """Every generated page: its path and what it should hold."""
    whole = {ROOT / path: "\n".join(lines()) + "\n" for path, lines in PAGES.items()}
    return whole | {ROOT / path: _between((ROOT / path).read_text(), lines()) for path, lines in PARTS.items()}


def _between(text: str, lines: Iterator[str]) -> str:
    """`text` with `lines` between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the marks are missing: {BEGIN} … {END}")
    return f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}"


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"==> Written: {path.relative_to(ROOT)}")
