from __future__ import annotations

from pathlib import Path

from headrace_bench.client.runqueue import between, waited


def test_the_kernels_second_figure(tmp_path: Path) -> None:
    stat = tmp_path / "schedstat"
    stat.write_text("12 2500000000 7\n")
    assert waited(stat) == 2.5
    stat.write_text("?")
    assert waited(stat) is None
    assert waited(tmp_path / "none") is None


def test_between() -> None:
    assert between(1.0, 3.5) == 2.5
    assert between(None, 1.0) is None
    assert between(1.0, None) is None
