from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import pytest

from bench_relay import relay
from headrace_bench import gateways, switching
from headrace_bench.fault import Fault, Misuse
from headrace_bench.report import table as tables
from headrace_bench.server import Server
from headrace_bench.switching import Change
from headrace_bench.verbs import switching as verb


def asked(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add(parser)
    parsed = parser.parse_args(list(argv))
    parsed.verb, parsed.command = "switching", ("headrace-bench", "switching", *argv)
    return parsed


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching, "SETTLE_S", 0.1)
    monkeypatch.setattr(switching, "AFTER_S", 0.1)


QUICK = ["--rate", "30", "--tokens", "4", "--switches", "2", "--every", "0.3"]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--models", "a"], "--models a: two of them"),
        (["--models", "a,b", "--url", "http://127.0.0.1:1"], "--models and --url"),
    ],
)
def test_misuse_is_one_line(argv: list[str], why: str) -> None:
    with pytest.raises(Misuse, match=why):
        verb.run(asked(*argv))


def test_a_server_that_runs_is_switched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verb.ADMIN_KEY, "wrong")
    out = tmp_path / "out"
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(gateways.upstream(tmp_path, name)).url for name in ("a", "b")]
        server = stack.enter_context(relay(tmp_path, *sources))
        assert verb.run(asked("--url", server.url, "--admin-key", "secret", *QUICK, "--out", str(out))) in (0, 1)
    table = tables.read(out)
    told = {row[0]: row[1:] for row in table.rows}
    assert told["switches"] == ("2", "", "")
    assert told["failed"] == ("0", "<= 0", "met")
    assert told["tokens lost, doubled or nobody's"] == ("0", "<= 0", "met")
    assert told["switches that failed"][-1] == "met"
    assert "secret" not in str(table)


def test_one_is_started_with_a_key_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    def headrace(folder: Path, text: str, key: str, flags: Any) -> Server:
        keys.append(key)
        urls = [line.split('"')[1].removesuffix("/v1") for line in text.splitlines() if line.startswith("url")]
        assert list(flags) == ["--set", "a.b=1"]
        return relay(folder, *urls)

    monkeypatch.setattr(switching, "headrace", headrace)
    verb.run(asked(*QUICK, "--headrace-args=--set a.b=1", "--out", str(tmp_path / "out")))
    assert len(keys[0]) > 16
    assert ("switches", "2", "", "") in tables.read(tmp_path / "out").rows


def test_switches_that_fail_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        switching, "switch", lambda _url, _key, _alias, to: Change(to, 0.0, 0.0, "HTTP 409: 127.0.0.1:80 is busy")
    )
    with gateways.upstream(tmp_path) as server:
        argv = ["--url", server.url, "--alias", "scripted", *QUICK, "--out", str(tmp_path / "out")]
        assert verb.run(asked(*argv)) == 1
    notes = tables.read(tmp_path / "out").notes
    assert "the switch to `b` failed: HTTP 409: HOST is busy" in notes


def test_engines_of_its_own_are_asked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[Any] = []
    real = switching.told

    def told(plan: Any, ran: Any, known: Any) -> Any:
        texts.append(known)
        return real(plan, ran, known)

    monkeypatch.setattr(switching, "told", told)
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(gateways.upstream(tmp_path, name)).url for name in ("a", "b")]

        def headrace(folder: Path, text: str, _key: str, _flags: Any) -> Server:
            assert 'kind = "llama"\nmodel = "scripted:30"' in text
            return relay(folder, *sources)

        monkeypatch.setattr(switching, "headrace", headrace)
        monkeypatch.setattr(switching.Plan, "message", property(lambda _self: "even:10:10:4"))
        verb.run(asked("--models", "scripted:30,scripted:40", *QUICK, "--out", str(tmp_path / "out")))
    assert texts == [["word word word word "] * 2]
    table = tables.read(tmp_path / "out")
    assert ("tokens lost, doubled or nobody's", "0", "<= 0", "met") in table.rows
    assert any("`scripted:30`, `scripted:40`" in note for note in table.notes)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    argv = ["--models", "scripted:1,scripted:2", *QUICK, "--headrace-args=--no-such-flag"]
    with pytest.raises(Fault, match="NotReady"):
        verb.run(asked(*argv, "--out", str(tmp_path / "out")))
