from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.admin_double import desk, refusal
from headrace.cli import main
from headrace.cli import switch as verb

LOADING: dict[str, Any] = {
    "id": 7, "alias": "chat", "to": "b", "weight": 1.0, "stage": "loading", "seconds": 0.0, "error": "",
    "load_ms": None, "warm_ms": None, "changeover_ms": None, "draining": [],
}  # fmt: skip
DRAINING = {
    **LOADING, "stage": "draining", "load_ms": 1500.0, "warm_ms": 300.0, "changeover_ms": 0.05, "draining": ["a"]
}  # fmt: skip
DONE = {**LOADING, "stage": "done", "changeover_ms": 0.05}
FAILED = {**LOADING, "stage": "failed", "error": "b: no such file"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verb, "LOOK_S", 0.0)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["switch", *arguments])
    return caught.value.code if isinstance(caught.value.code, int) else 0


def table(running: list[Any], last: list[Any]) -> tuple[int, Any]:
    return 200, {"running": running, "last": last}


def test_it_waits_for_the_change_over(capsys: pytest.CaptureFixture[str]) -> None:
    warming = {**LOADING, "stage": "warming"}
    answers = [(202, LOADING), table([LOADING], []), table([warming], []), table([{**DONE, "id": 6}, DRAINING], [])]
    with desk(answers) as server:
        assert status_of("chat", "b", "--at", server.url) == 0
    assert server.asked[0][3] == {"alias": "chat", "to": "b", "weight": 1.0, "wait": False}
    assert capsys.readouterr().out.splitlines() == [
        "b answers everything to chat: loaded in 1.5 s, warmed in 0.3 s; the change-over took 0.05 ms",
        "Its last answers are finished by a, which is unloaded then.",
    ]


def test_one_that_is_there_already_and_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    with desk([(202, LOADING), table([], [DONE])]) as server:
        assert status_of("chat", "b", "--weight", "0.1", "--at", server.url) == 0
    assert server.asked[0][3]["weight"] == 0.1
    assert capsys.readouterr().out == (
        "b answers 0.1 of the requests to chat: it was loaded; the change-over took 0.05 ms\n"
    )


def test_it_need_not_wait(capsys: pytest.CaptureFixture[str]) -> None:
    with desk([(202, LOADING)]) as server:
        assert status_of("chat", "b", "--no-wait", "--at", server.url) == 0
    assert "headrace engines" in capsys.readouterr().out


def test_a_candidate_that_does_not_come_up_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with desk([(202, LOADING), table([], [FAILED])]) as server:
        assert status_of("chat", "b", "--at", server.url) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "headrace: nothing has changed: b: no such file"


def test_a_refusal_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with desk([(409, refusal("chat is being switched to c"))]) as server:
        assert status_of("chat", "b", "--at", server.url) == 2
    assert "chat is being switched to c" in capsys.readouterr().err


def test_a_server_that_was_started_again_knows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with desk([(202, LOADING), table([], [])]) as server:
        assert status_of("chat", "b", "--at", server.url) == 2
    assert "was started again" in capsys.readouterr().err


def test_an_interrupt_leaves_the_server_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "_find", interrupted)
    with desk([(202, LOADING)]) as server:
        assert status_of("chat", "b", "--at", server.url) == 130
    assert "The server goes on with it" in capsys.readouterr().err


def test_an_engine_may_be_declared_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    with desk([(201, {}), (202, LOADING), table([], [DONE])]) as server:
        assert status_of("chat", "b", "--model", "m.gguf", "--family", "f", "--at", server.url) == 0
    body = {"name": "b", "load": False, "kind": "llama", "model": str(tmp_path / "m.gguf"), "family": "f"}
    assert server.asked[0][:2] == ("POST", "/admin/v1/engines")
    assert server.asked[0][3] == body
    assert verb.declared("b", "smollm2-135m", None, None) == {
        "name": "b", "load": False, "kind": "llama", "model": "smollm2-135m"
    }  # fmt: skip
    assert verb.declared("b", "m", "http://x", None) == {
        "name": "b", "load": False, "kind": "openai", "url": "http://x", "model": "m"
    }  # fmt: skip
    assert verb.declared("b", None, None, None) is None


def test_a_family_alone_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("chat", "b", "--family", "f") == 2
    assert status_of("chat", "b", "--weight", "0") == 2
