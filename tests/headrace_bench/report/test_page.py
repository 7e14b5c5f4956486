from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from bench_runs import answered, failed, health, records, schedule
from chromium import Browser, chromium_or_skip
from headrace_bench.figures.paired import Comparison
from headrace_bench.figures.slo import PROFILES
from headrace_bench.figures.summary import summarise
from headrace_bench.record import Record
from headrace_bench.report import page, plots
from headrace_bench.report.folder import Config, Journal, config
from headrace_bench.report.rows import Compared
from headrace_bench.report.series import points

EVIL = "<script>alert('x')</script> & \"quoted\""
VOID = {"meta", "br", "img", "hr"}


class Tree(HTMLParser):
    """Every tag is closed where it has to be; keeps tags, ids, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def made(**more: str) -> Config:
    return config(
        verb="run", command=["headrace-bench", "run", "--model", EVIL], url="http://127.0.0.1:8080", model=EVIL, seed=7,
        wall="2026-01-02T03:04:05+00:00", flags={"slo": "chat", "drain": EVIL}, server=more.get("server"), notes=[EVIL],
    )  # fmt: skip


def folder(path: Path, ends: list[Record], *invalid: str) -> Path:
    plan = schedule(len(ends))
    with Journal(path, made(server=EVIL), plan) as journal:
        for record in ends:
            journal(record)
        journal.finish(ends, health(*invalid), summarise(plan, ends, health(*invalid), PROFILES["chat"]))
    return path


def test_a_page_of_a_run_is_whole_and_alone(tmp_path: Path) -> None:
    ends = [*records(120), msgspec.structs.replace(failed(120, 12.0), error=EVIL)]
    ends[5] = msgspec.structs.replace(answered(5, 0.5, ttft=9.0), request_id=EVIL, tag=EVIL)
    made = page.make(folder(tmp_path / "run", ends, EVIL))
    assert made == tmp_path / "run/report.html"
    text = made.read_text()
    tree = Tree(text)
    assert "script" not in tree.tags
    assert tree.tags.count("svg") == 8
    assert len(tree.ids) == len(set(tree.ids)), "ids of one plot are not those of another"
    assert all(link.startswith(("#", "data:")) for link in tree.links)
    assert not re.findall(r"url\((?!#)", text)
    assert {f"#{name}" for name in tree.ids} >= {link for link in tree.links if link.startswith("#")}
    assert tree.text.count(EVIL) >= 7, "banner, title, tag, error, request id, notes, flags, server"
    assert tree.text.index("INVALID: this run does not count") < tree.text.index("At a glance")
    for words in (
        "TTFT from sent",
        "server: prefill",
        "Slowest first tokens",
        "#5",
        "95 % of the time",
        "cores for this",
    ):
        assert words in tree.text
    assert {path.suffix for path in (tmp_path / "run/plots").iterdir()} == {".png", ".svg"}


@pytest.mark.parametrize("ends", [[], [answered(0, 0.0, told=False)], [failed(0, 0.0)]], ids=["0", "1", "failed"])
def test_few_requests(ends: list[Record], tmp_path: Path) -> None:
    tree = Tree(page.make(folder(tmp_path / "run", ends)).read_text())
    assert "INVALID" not in tree.text
    assert "nan" not in tree.text.lower()
    if ends and ends[0].chunks:
        assert "tells nothing of its own time" in tree.text


def test_a_run_that_was_cut_short_has_a_page_and_is_marked(tmp_path: Path) -> None:
    with Journal(tmp_path / "run", made(), schedule(20)) as journal:
        for record in records(20)[:8]:
            journal(record)
    text = Tree(page.make(tmp_path / "run").read_text()).text
    assert "the run was cut short: 8 of 20 requests have ended" in text
    assert "failed of 20" in text


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    where = folder(tmp_path / "run", records(30))
    first = page.make(where).read_bytes()
    assert page.make(where).read_bytes() == first


def test_a_against_b() -> None:
    found = [Compared("TTFT p50", "ms", 100.0, 107.0, Comparison(1.07, 1.03, 1.11, 0.002, "worse", 12, 0, 0.02))]
    a, b = page.Side("headrace", "http://a:1"), page.Side(EVIL, "http://b:2")
    drawn = plots.overlay(a.name, b.name, points(records(50)), points(records(50, seed=2)))
    text = page.compare_page(a, b, found, drawn, config=made(), invalid=["pair 3"], notes=["a note"])
    tree = Tree(text)
    assert tree.tags.count("svg") == 3
    assert "script" not in tree.tags
    for words in ("+7.0 % [+3.0 %, +11.0 %]", "±2.0 %", "worse", "pair 3", "http://b:2", "a note", f"B: {EVIL}"):
        assert words in tree.text


def test_a_browser_shows_it_on_a_phone_and_loads_nothing(tmp_path: Path) -> None:
    where = page.make(folder(tmp_path / "run", records(40)))
    with Browser(chromium_or_skip()) as browser:
        browser.command("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        browser.open(where.as_uri())
        assert browser.run("document.querySelectorAll('svg').length") == 8
        assert browser.run("document.documentElement.scrollWidth") <= 390, "only tables and plots scroll sideways"
        assert browser.run("performance.getEntriesByType('resource').length") == 0
