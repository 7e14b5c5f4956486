from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace import __version__
from headrace.cli import main
from headrace.cli import pull as pull_verb
from headrace.cli import serve as serve_verb
from headrace.cli import tune as tune_verb
from headrace.core.errors import StartupError
from headrace.settings import Config, Value


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code if isinstance(caught.value.code, int) else 0


def raising(error: BaseException) -> Callable[..., int]:
    def run(name: str, *, accept_terms: bool = False) -> int:
        raise error

    return run


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"headrace {__version__}\n"


def test_a_failed_start_is_one_line_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_verb, "run", raising(StartupError("no such\nmodel")))
    assert status_of("pull", "x") == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "headrace: no such model\n")


def test_a_wrong_command_line_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("pul") == 2
    assert status_of("serve", "--prot", "1") == 2
    assert "--port" in capsys.readouterr().err


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_verb, "run", raising(KeyboardInterrupt()))
    assert status_of("pull", "x") == 130


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ((), {}),
        (("tiny.gguf",), {"model.path": "tiny.gguf"}),
        (("--port", "0", "--host", "::1"), {"server.port": 0, "server.host": "::1"}),
        (("--no-measure",), {"model.measure": False}),
        (("--allow-loss",), {}),
        (("--insecure", "--key", "k"), {"server.insecure": True, "server.key": "k"}),
        (("--set", "engine.threads=2", "--set", "model.alias=a=b"), {"engine.threads": "2", "model.alias": "a=b"}),
        (("--set", "server.port=1", "--port", "2"), {"server.port": 2}),
    ],
)
def test_serve_hands_on_only_the_flags_that_were_given(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], flags: dict[str, Value]
) -> None:
    seen: list[dict[str, Value]] = []

    def run(file: object, given: dict[str, Value], *, allow_loss: bool) -> int:
        assert allow_loss is ("--allow-loss" in arguments)
        seen.append(given)
        return 3

    monkeypatch.setattr(serve_verb, "run", run)
    assert status_of("serve", *arguments) == 3
    assert seen == [flags]


@pytest.mark.parametrize(
    ("arguments", "verb"), [((), "run"), (("--show",), "show"), (("--forget", "--slo-profile", "voice"), "forget")]
)
def test_tune_has_three_acts(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], verb: str) -> None:
    seen: list[tuple[str, str, str]] = []

    def act(name: str) -> Callable[..., int]:
        def run(config: Config, *rest: object) -> int:
            seen.append((name, config.model.path, config.slo.profile))
            return 0

        return run

    for name in ("run", "show", "forget"):
        monkeypatch.setattr(tune_verb, name, act(name))
    assert status_of("tune", "tiny", *arguments) == 0
    assert seen == [(verb, "tiny", "voice" if "voice" in arguments else "chat")]


def test_tune_takes_only_what_it_knows() -> None:
    assert status_of("tune") == 2
    assert status_of("tune", "tiny", "--show", "--forget") == 2
    assert status_of("tune", "tiny", "--rounds", "0") == 2
    assert status_of("tune", "tiny", "--slo-profile", "haste") == 2


def test_tune_quick_is_two_rounds_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[tune_verb.Wish] = []

    def run(config: Config, wish: tune_verb.Wish, given: frozenset[str]) -> int:
        wishes.append(wish)
        return 0

    monkeypatch.setattr(tune_verb, "run", run)
    for arguments in ((), ("--quick",), ("--quick", "--rounds", "5"), ("--only", "f16", "--allow-loss", "--keep")):
        assert status_of("tune", "tiny", *arguments) == 0
    assert [(wish.rounds, wish.quick) for wish in wishes] == [(3, False), (2, True), (5, True), (3, False)]
    assert [format.name for format in wishes[3].formats] == ["f16"]
    assert (wishes[3].allow_loss, wishes[3].keep, wishes[3].anyway) == (True, True, False)
