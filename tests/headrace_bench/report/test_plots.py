from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import msgspec
import pytest

from bench_runs import answered, failed, records
from headrace_bench.record import Outcome, Record
from headrace_bench.report import palette, plots
from headrace_bench.report.series import points

NAMES = ["ttft", "timeline", "gaps", "gap_map", "e2e", "waterfalls", "stages", "by_prompt"]
ALL_FAILED = [failed(0, 0.0), failed(1, 0.5, "timeout", None), failed(2, 1.0, "connect", None)]


def texts(plot: plots.Plot) -> str:
    root = ElementTree.fromstring(palette.svg(plot.figure))
    return " | ".join("".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize(
    "ends", [[], [answered(0, 0.0)], [answered(0, 0.0, gaps=())], ALL_FAILED], ids=["0", "1", "1 token", "failed"]
)
def test_few_requests_draw(ends: list[Record], tmp_path: Path) -> None:
    drawn = plots.of_run(points(ends))
    assert [plot.name for plot in drawn] == NAMES
    plots.write(tmp_path / "plots", drawn)
    for name in NAMES:
        assert (tmp_path / f"plots/{name}.png").read_bytes().startswith(b"\x89PNG")
        ElementTree.parse(tmp_path / f"plots/{name}.svg")
    if not any(record.chunks for record in ends):
        assert all("no answer" in texts(plot) for plot in drawn)


def test_a_curve_names_its_percentiles_and_its_samples() -> None:
    few = texts(plots.ecdf("x", "X", {"ttft": [float(i) for i in range(1, 101)]}, "none"))
    assert "p50  50 ms" in few
    assert "p95  95 ms" in few
    assert "p99" not in few, "of 100 samples it is not bounded"
    assert "n = 100" in few
    many = texts(plots.ecdf("x", "X", {"ttft": [float(i) for i in range(1, 401)]}, "none"))
    assert "p99  396 ms" in many


def test_failures_are_marked_by_class() -> None:
    shown = texts(plots.timeline(points([answered(3, 2.0), *ALL_FAILED])))
    for label in ("http (1)", "timeout (1)", "connect (1)"):
        assert label in shown
    assert set(palette.FAILURES) | {"ok"} == set(get_args(Outcome))


def test_warm_up_and_what_failed_give_no_latency() -> None:
    warm = msgspec.structs.replace(answered(0, 0.0), phase="warmup")
    cut = msgspec.structs.replace(answered(1, 1.0), outcome="truncated")
    found = points([cut, warm])
    assert [point.index for point in found] == [1]
    assert (found[0].ttft, found[0].e2e, found[0].gaps, found[0].split) == (None, None, (), None)


def test_the_same_figures_give_the_same_bytes() -> None:
    first, second = ([palette.svg(plot.figure) for plot in plots.of_run(points(records(40)))] for _ in range(2))
    assert first == second
    assert "<dc:date>" not in "".join(first)


def test_the_parts_of_a_bar_are_in_its_legend() -> None:
    told = texts(plots.stages(points([answered(0, 0.0)])))
    assert "prefill" in told
    assert "network" in told
    assert "200 ms" in told
    untold = texts(plots.waterfalls(points([answered(0, 0.0, told=False)])))
    assert "server+network" in untold
    assert "prefill" not in untold


def test_goodput_shows_what_was_met() -> None:
    tried = [plots.RatePoint(2, 2.0, 1.9, None, True), plots.RatePoint(4, 2.5, 2.0, 3.0, False)]
    shown = texts(plots.goodput(tried, "chat $x$, 95 %"))
    assert "not met" in shown
    assert "chat $x$, 95 %" in shown
    assert "no rate was tried" in texts(plots.goodput([], "chat"))


def test_two_runs_in_one_plot() -> None:
    drawn = plots.overlay("a", "a", points(records(80)), points(records(80, seed=2)))
    assert [plot.name for plot in drawn] == ["ab_ttft", "ab_gaps", "ab_e2e"]
    assert "A: a" in texts(drawn[0])
    assert "B: a" in texts(drawn[0])


def test_many_points_are_one_image() -> None:
    plot = plots.timeline(points([answered(i, i / 100, gaps=()) for i in range(3200)]))
    text = palette.svg(plot.figure)
    assert "<image" in text
    assert len(text) < 400_000


def test_a_page_recolours_ink_and_keeps_its_ids_apart() -> None:
    text = palette.inline(palette.svg(plots.stages(points([answered(0, 0.0)])).figure), "stages", "Parts")
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == "Parts"
    assert root.get("width") is None
    assert root.get("viewBox")
    assert "var(--ink" in text
    ids = set(re.findall(r'\bid="([^"]*)"', text))
    assert ids
    assert all(name.startswith("stages-") for name in ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', text)) <= ids
