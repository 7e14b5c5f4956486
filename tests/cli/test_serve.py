from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from headrace import tuned
from headrace.cli import serve
from headrace.core.errors import StartupError
from headrace.gateway.spec import EngineSpec
from headrace.settings import Config

URL = "http://127.0.0.1:8000"


@pytest.fixture
def prepares() -> list[Callable[[EngineSpec], Config]]:
    """What the composition root was given to find an engine's settings with."""
    return []


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, prepares: list[Callable[[EngineSpec], Config]]) -> list[Config]:
    """Configurations that reached the composition root; the server itself is ready at once and ends with status 5."""
    configs: list[Config] = []

    async def fake(config: Config, on_ready: Callable[[str], None], *, prepare: Callable[[EngineSpec], Config]) -> int:
        configs.append(config)
        prepares.append(prepare)
        on_ready(URL)
        return 5

    compose = ModuleType("headrace.compose")
    compose.__dict__["serve"] = fake
    monkeypatch.setitem(sys.modules, "headrace.compose", compose)
    monkeypatch.setattr(serve, "fetch", lambda name: Path("/models/file.gguf"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    return configs


def welcome(config: Config | None = None, url: str = URL) -> list[str]:
    config = config or Config()
    model = dataclasses.replace(config.model, alias="tiny")
    return serve.welcome(dataclasses.replace(config, model=model), url).plain.splitlines()


def test_the_composition_root_gets_a_file_and_a_name(served: list[Config]) -> None:
    assert serve.run(None, {}) == 5
    assert (served[0].model.path, served[0].model.alias) == ("/models/file.gguf", "smollm2-135m")


def test_a_given_alias_is_kept(served: list[Config]) -> None:
    serve.run(None, {"model.path": "/x/y.gguf", "model.alias": "mine"})
    serve.run(None, {"model.path": "/x/y.gguf"})
    assert [config.model.alias for config in served] == ["mine", "y"]


def test_what_to_do_next_is_on_stdout_once_ready(served: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    serve.run(None, {})
    captured = capsys.readouterr()
    assert "loading smollm2-135m" in captured.err
    assert f"{URL}/\n" in captured.out
    assert "\x1b" not in captured.out


def test_the_curl_line_can_be_pasted_whatever_the_name() -> None:
    config = dataclasses.replace(Config(), model=dataclasses.replace(Config().model, alias='it\'s "me" $HOME'))
    line = next(line for line in serve.welcome(config, URL).plain.splitlines() if "curl" in line)
    words = shlex.split(line)
    body = json.loads(words[words.index("-d") + 1])
    assert words[:4] == ["curl", "curl", "-N", f"{URL}/v1/chat/completions"]
    assert body["model"] == 'it\'s "me" $HOME'
    assert body["stream"] is True


def test_the_key_is_not_shown() -> None:
    config = dataclasses.replace(Config(), server=dataclasses.replace(Config().server, key="sesame"))
    text = "\n".join(welcome(config))
    assert "sesame" not in text
    assert '-H "Authorization: Bearer $HEADRACE_SERVER_KEY"' in text
    assert 'api_key=os.environ["HEADRACE_SERVER_KEY"]' in text


def test_a_server_with_keys_shows_where_they_go(
    served: list[Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve.run(None, {})
    assert "Authorization" not in capsys.readouterr().out
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace" / "keys.toml").touch()
    serve.run(None, {})
    out = "".join(capsys.readouterr().out.split())
    assert '-H"Authorization:Bearer$KEY"' in out
    assert 'api_key=os.environ["KEY"]' in out


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://0.0.0.0:80", "http://127.0.0.1:80/"),
        ("http://[::]:8000", "http://[::1]:8000/"),
        ("http://[fe80::1]:8000", "http://[fe80::1]:8000/"),
        ("http://box.local:8000/", "http://box.local:8000/"),
    ],
)
def test_the_shown_address_can_be_opened(url: str, shown: str) -> None:
    assert f"  Chat page   {shown}" in welcome(url=url)


@pytest.mark.parametrize("text", ["", "=1", "engine.threads", " =1"])
def test_an_assignment_needs_both_sides(text: str) -> None:
    with pytest.raises(StartupError, match="NAME=VALUE"):
        serve.assigned([text])


def test_an_assignment_may_hold_further_signs() -> None:
    assert serve.assigned(["a.b=c=d", " c.d =", "a.b=2"]) == {"a.b": "2", "c.d": ""}


def test_a_tuned_profile_is_served_under_the_same_name(
    served: list[Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(config: Config, cache: Path, model: Path, again: Callable[[dict[str, int]], Config]) -> tuned.Applied:
        assert model == Path("/models/file.gguf")
        return tuned.Applied(
            again({"engine.threads": 1, "engine.threads_batch": 1}), Path("/tuned/x.gguf"), "tuned (…)"
        )

    monkeypatch.setattr(tuned, "apply_profile", apply)
    serve.run(None, {"engine.threads": "5"})
    config = served[0]
    assert (config.model.path, config.model.alias) == ("/tuned/x.gguf", "smollm2-135m")
    assert (config.engine.threads, config.engine.threads_batch) == (5, 1), "what the user set wins"
    assert "Headrace: tuned (…)" in capsys.readouterr().err.splitlines()


DECLARED = """
[engines.a]
kind = "llama"
model = "smollm2-135m"
engine = {cells = 4096}

[engines.b]
kind = "openai"
url = "http://h"
model = "big"

[engines.c]
kind = "llama"
model = "/x/later.gguf"
load = false

[aliases.chat]
engines = {a = 1, b = 1}

[aliases.code]
engines = {b = 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engines.toml"
    path.write_text(DECLARED)
    return path


def fetching(fetched: list[str], name: str) -> Path:
    fetched.append(name)
    return Path(f"/models/{len(fetched)}.gguf")


def test_without_a_model_the_declared_engines_are_served(
    served: list[Config], file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(serve, "fetch", lambda name: fetching(fetched, name))
    assert serve.run(file, {}) == 5
    assert [spec.name for spec in served[0].engines] == ["a", "b", "c"]
    assert fetched == ["smollm2-135m"], "before the server runs, and only what is loaded at the start"
    captured = capsys.readouterr()
    assert "loading a, b …" in captured.err
    assert "Ready: chat, code" in captured.out
    assert '"model":"chat"' in captured.out


def test_each_engine_of_ours_has_settings_and_a_file_of_its_own(
    served: list[Config], prepares: list[Callable[[EngineSpec], Config]], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(serve, "fetch", lambda name: fetching(fetched, name))
    serve.run(file, {"engine.threads": "3"})
    specs = {spec.name: spec for spec in served[0].engines}
    own = prepares[0](specs["a"])
    assert (own.model.path, own.model.alias, own.engine.cells, own.engine.threads) == ("/models/1.gguf", "a", 4096, 3)
    assert prepares[0](specs["c"]).model.path == "/models/2.gguf"
    assert prepares[0](specs["a"]).model.path == "/models/3.gguf", "a later load looks again"
    assert fetched == ["smollm2-135m", "/x/later.gguf", "smollm2-135m"]


def test_a_model_that_is_named_is_the_only_one(served: list[Config], file: Path) -> None:
    serve.run(file, {"model.path": "/x/y.gguf"})
    assert (served[0].engines, served[0].aliases, served[0].model.alias) == ((), (), "y")


def test_a_profile_of_one_engine_is_below_its_own_settings(
    served: list[Config],
    prepares: list[Callable[[EngineSpec], Config]],
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apply(config: Config, cache: Path, model: Path, again: Callable[[dict[str, int]], Config]) -> tuned.Applied:
        return tuned.Applied(again({"engine.threads": 1, "engine.cells": 512}), Path("/tuned/x.gguf"), "tuned (…)")

    monkeypatch.setattr(tuned, "apply_profile", apply)
    serve.run(file, {})
    own = prepares[0](served[0].engines[0])
    assert (own.model.path, own.engine.threads, own.engine.cells) == ("/tuned/x.gguf", 1, 4096)
    assert "Headrace: a: tuned (…)" in capsys.readouterr().err.splitlines()


class Measured:
    """Stands for `headrace.cli.measure`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, frozenset[str], bool]] = []

    def run(
        self, config: Config, given: set[str], model: Path, load: Callable[..., Config], *, allow_loss: bool
    ) -> tuned.Applied | None:
        self.asked.append((config.model.path, frozenset(given), allow_loss))
        return tuned.Applied(load({"engine.extra_buffers": False}), Path("/tuned/x.gguf"), "measured this machine …")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    double = Measured()
    module = ModuleType("headrace.cli.measure")
    module.__dict__["run"] = double.run
    monkeypatch.setitem(sys.modules, "headrace.cli.measure", module)
    return double


def test_a_model_that_is_new_is_measured_before_it_is_loaded(
    served: list[Config], measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    serve.run(None, {"engine.threads": "2"}, allow_loss=True)
    config = served[0]
    assert (config.model.path, config.engine.extra_buffers, config.engine.threads) == ("/tuned/x.gguf", False, 2)
    assert [(path, allow_loss) for path, _, allow_loss in measured.asked] == [("smollm2-135m", True)]
    assert "engine.threads" in measured.asked[0][1]
    assert "Headrace: measured this machine …" in capsys.readouterr().err.splitlines()


def test_a_scripted_model_is_not_measured(served: list[Config], measured: Measured) -> None:
    serve.run(None, {"model.path": "scripted:100"})
    assert measured.asked == []


def test_engines_are_measured_before_the_server_runs_and_not_later(
    served: list[Config],
    prepares: list[Callable[[EngineSpec], Config]],
    measured: Measured,
    file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    serve.run(file, {"model.measure": "true"})
    assert [path for path, _, _ in measured.asked] == ["smollm2-135m"]
    assert "engine.cells" in measured.asked[0][1], "what its table sets, the user set"
    specs = {spec.name: spec for spec in served[0].engines}
    capsys.readouterr()
    prepares[0](specs["c"])
    assert len(measured.asked) == 1
    err = capsys.readouterr().err
    assert (
        "Headrace: c: is new here, and nothing is measured while the server runs: `headrace tune /x/later.gguf`" in err
    )
