from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench_relay import started_by
from headrace_bench import gateways as measuring
from headrace_bench.fault import Fault, Misuse
from headrace_bench.lab import Programs
from headrace_bench.peers import catalogue, kept
from headrace_bench.peers.catalogue import Found
from headrace_bench.report import table as tables
from headrace_bench.verbs import gateways, peers


def asked(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    peers.add(parser)
    parsed = parser.parse_args(["--gateways", *argv])
    parsed.verb, parsed.command = "peers", ("headrace-bench", "peers", "--gateways", *argv)
    return parsed


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--only", "vllm"], "--only vllm: no such peer; choose from litellm"),
        (["--streams", "1,x"], "--streams 1,x: numbers"),
        (["--streams", ","], "--streams ,: numbers"),
        (["--rounds", "0"], "--rounds 0"),
        (["--gguf", "model.gguf"], "--gguf: gateways are measured before a scripted upstream"),
    ],
)
def test_misuse_is_one_line(argv: list[str], why: str) -> None:
    with pytest.raises(Misuse) as caught:
        peers.run(asked(*argv))
    assert why in str(caught.value)


def test_the_loads() -> None:
    one, many = gateways.loads_of(asked("--streams", "1,50", "--rate", "40", "--first", "100", "--tokens", "80"))
    assert (one.streams, many.streams, many.rate, many.tokens, many.first_s) == (1, 50, 40.0, 80, 0.1)
    assert many.seconds == gateways.SECONDS
    assert [load.streams for load in gateways.loads_of(asked())] == [1, 20, 100]


def stub(load: Any, target: Any, seed: int, server: Any) -> dict[str, Any]:
    slow = 0.0 if server is None else {"headrace": 0.1}.get(server.name, 5.0)
    figure = {"p50": 0.1 + slow, "p95": 0.2 + slow, "p99": 0.2 + slow}
    found = {"ttft": figure, "gap": figure, "chunks": 100, "invalid": []}
    return found if server is None else {**found, "cpu_us": 30.0, "rss_mb": 40.0}


def real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the streams."""
    measure: Callable[..., Any] = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda *args, **more: measure(*args, **more, once=stub))
    monkeypatch.setattr(measuring, "headrace", lambda folder, *_flags: started_by(folder))


def test_a_table_that_can_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real(monkeypatch)
    found = Found(Programs(), {"litellm": "litellm 1.0"}, {}, {"litellm": Path("/p/bin/litellm")})
    monkeypatch.setattr(catalogue, "find", lambda *_, **__: found)
    monkeypatch.setattr(measuring, "proxy", lambda folder, _program: started_by(folder, "litellm"))
    out = tmp_path / "out"
    assert peers.run(asked("--streams", "1,2", "--rounds", "1", "--out", str(out))) == 0
    table = tables.read(out)
    assert table.verb == "gateways"
    assert table.columns[2:5] == ("direct", "headrace", "litellm")
    assert table.rows[-1][:2] == ("2 streams", "memory, MB")
    assert table.rows[6][-2:] == ("<= 1, ratio <= 0.25", "met")
    assert table.command == "headrace-bench peers --gateways --streams 1,2 --rounds 1 --out DIR"
    assert "PORT" in table.commands["litellm"]
    assert str(tmp_path) not in str(table.commands)
    assert any("one worker" in note for note in table.notes)
    assert tables.markdown(table) in capsys.readouterr().out


def test_what_is_missing_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real(monkeypatch)
    monkeypatch.setattr(kept, "home", lambda: tmp_path / "nothing")
    out = tmp_path / "out"
    assert peers.run(asked("--streams", "2", "--rounds", "1", "--no-pin", "--out", str(out))) == 0
    notes = tables.read(out).notes
    assert "`litellm` was left out: not installed (--install does it)" in notes
    assert "Client, upstream and gateway share all cores." in notes


def test_nothing_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "home", lambda: tmp_path / "nothing")
    with pytest.raises(Fault, match="no gateway to measure"):
        peers.run(asked("--without-headrace", "--out", str(tmp_path / "out")))
