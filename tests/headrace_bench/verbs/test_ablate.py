from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_bench import ablation
from headrace_bench.__main__ import INTERRUPTED, main
from headrace_bench.ablation import Leg, Turn, conclude
from headrace_bench.client.target import Target
from headrace_bench.exhibits import Exhibit
from headrace_bench.figures.slo import Slo
from headrace_bench.lab import Lab
from headrace_bench.report.table import read
from headrace_bench.server import NotReady
from headrace_bench.verbs import ablate


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    return file


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`ablate` that measures nothing: off takes twice as long as on."""
    asked: list[dict[str, Any]] = []

    def fake(exhibit: Exhibit, start: Any, load: Any, *, slo: Slo, **more: Any) -> ablation.Finding:
        asked.append({"switch": exhibit.switch, "start": start, "exhibit": exhibit, **more})
        if exhibit.switch == "engine.broken":
            raise NotReady("it did not become ready:\n no such setting")
        turns = [Turn(i // 2, *(Leg(v * (1 + i / 100), (), 1, 1, 0, ()) for v in (0.1, 0.2))) for i in range(8)]
        return conclude(exhibit, turns, (), slo, 1.0, 1)

    monkeypatch.setattr(ablation, "ablate", fake)
    return asked


def test_the_switches_and_their_loads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "--list"]) == 0
    said = capsys.readouterr().out
    assert "optimizations.overlap: one person reads a long answer; decided by tpot mean of reader" in said


def test_a_row_a_switch_and_what_failed_stands_in_the_table(
    model: Path, tmp_path: Path, quick: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["ablate", "--gguf", str(model), "--switches", "optimizations.tiers,engine.broken", "--out", str(out)]
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert "optimizations.tiers: helps" in said
    assert "engine.broken: not measured: it did not become ready: no such setting" in said
    stored = read(out)
    assert [row[0] for row in stored.rows] == ["`optimizations.tiers`", "`engine.broken`"]
    assert stored.command == "headrace-bench ablate --gguf MODEL --switches optimizations.tiers,engine.broken --out DIR"
    assert (out / "table.md").read_text().strip() in said


def test_time_is_shared_out(model: Path, tmp_path: Path, quick: list[dict[str, Any]]) -> None:
    argv = ["ablate", "--gguf", str(model), "--switches", "a.b,c.d", "--minutes", "10", "--out", str(tmp_path / "o")]
    assert main(argv) == 0
    first, second = (asked["until"] for asked in quick)
    assert second - first == pytest.approx(300, abs=30)


def test_one_load_for_all(model: Path, tmp_path: Path, quick: list[dict[str, Any]]) -> None:
    argv = [
        "ablate",
        "--gguf",
        str(model),
        "--switches",
        "optimizations.replay",
        "--own-load",
        "--arrivals",
        "poisson:3",
    ]
    assert main([*argv, "--duration", "5", "--out", str(tmp_path / "o")]) == 0
    asked = quick[0]
    assert asked["schedule"](7).seed == 7
    assert str(asked["exhibit"].primary) == "ttft p50"
    assert asked["exhibit"].kill_after_s is None


def test_both_sides_differ_in_the_switch_alone(model: Path, tmp_path: Path, quick: list[dict[str, Any]]) -> None:
    argv = ["ablate", "--gguf", str(model), "--switches", "optimizations.mined_templates", "--out", str(tmp_path / "o")]
    assert main([*argv, "--headrace-args=--set engine.cells=2048"]) == 0
    on, off = (list(quick[0]["start"](side).command) for side in (True, False))
    differ = {(a, b) for a, b in zip(on, off, strict=True) if a != b}
    assert ("optimizations.mined_templates=true", "optimizations.mined_templates=false") in differ
    assert all(a.isdigit() or "ssd_path" in a for a, _ in differ if "mined" not in a)  # ports, empty directories
    assert "engine.cells=2048" in on
    assert "tiers.ram_mib=16" in on


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["ablate"], "--gguf: which model file?"),
        (["ablate", "--gguf", "nowhere.gguf"], "--gguf nowhere.gguf: there is no such file"),
        (["ablate", "--switches", "tiers"], "a switch reads SECTION.NAME"),
        (["ablate", "--arrivals", "poisson:1"], "--arrivals: each switch has a load of its own; add --own-load"),
        (["ablate", "--pairs", "3"], "--pairs 3: below 6"),
        (["ablate", "--headrace-args='--set a"], "--headrace-args: No closing quotation"),
    ],
)
def test_misuse_is_one_line(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_a_folder_with_something_in_it_is_left_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "--gguf", str(model), "--out", str(tmp_path)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert not (tmp_path / "table.json").exists()


def test_a_folder_that_cannot_be_made_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "--gguf", str(model), "--out", str(model / "below")]) == 2
    said = capsys.readouterr().err
    assert "Not a directory" in said
    assert said.count("\n") == 1


def test_an_interrupt_ends_it_and_keeps_the_rows(
    model: Path, tmp_path: Path, quick: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def there(target: Target) -> Target:
        return target

    monkeypatch.setattr(ablate, "check", there)
    monkeypatch.setattr(ablate, "run_load", lambda *_, **__: SimpleNamespace(interrupted=True))
    measured = ablation.ablate

    def loaded(exhibit: Exhibit, start: Any, load: Any, **more: Any) -> ablation.Finding:
        if exhibit.switch == "engine.second":
            load(SimpleNamespace(url="http://127.0.0.1:9"), None, 1.0)
        return measured(exhibit, start, load, **more)

    monkeypatch.setattr(ablation, "ablate", loaded)
    out = tmp_path / "o"
    argv = ["ablate", "--gguf", str(model), "--switches", "engine.first,engine.second,engine.third", "--out", str(out)]
    assert main(argv) == INTERRUPTED
    assert [row[0] for row in read(out).rows] == ["`engine.first`"]


def test_no_engine_to_kill_costs_its_row_and_no_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_child(*_: Any, **__: Any) -> ablation.Finding:
        raise ValueError("headrace has no child process")

    monkeypatch.setattr(ablation, "ablate", no_child)
    out = tmp_path / "o"
    assert main(["ablate", "--gguf", str(model), "--switches", "engine.a,engine.b", "--out", str(out)]) == 1
    assert [row[1] for row in read(out).rows] == ["not measured: headrace has no child process"] * 2


def test_a_side_is_a_headrace_with_the_exhibits_settings(tmp_path: Path) -> None:
    from headrace_bench.exhibits import SWITCHES

    start = ablate.starting(Lab(tmp_path / "m.gguf", tmp_path), SWITCHES["optimizations.tiers"], [])
    assert "optimizations.tiers=false" in start(False).command
