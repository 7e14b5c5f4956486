from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.assembly import make_encode, make_engine, make_model
from headrace.core.errors import StartupError
from headrace.core.kv import Pin
from headrace.core.request import ChatRequest, Message, Options
from headrace.gateway.model import ServedModel
from headrace.pins import load_templates, read_text, template_prefixes, templates_file, write_text
from headrace.settings import Config, Engine, Model, Templates

START = "<|im_start|>system\n"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "headrace").mkdir()
    return tmp_path / "headrace"


@pytest.fixture
def model() -> Iterator[ServedModel]:
    async def made() -> ServedModel:
        engine = make_engine(config())
        await engine.start()
        await engine.close()
        return make_model(config(), engine)

    served = asyncio.run(made())
    yield served
    asyncio.run(served.close())


def config(file: str = "") -> Config:
    return Config(
        model=Model(path="scripted:1000", alias="scripted"),
        engine=Engine(in_process=True, context=400),
        templates=Templates(file=file),
    )


def texts(pins: list[Pin]) -> dict[str, str]:
    marks = {257: "<|im_start|>", 256: "<|im_end|>"}
    return {pin.name: "".join(marks.get(token) or chr(token) for token in pin.tokens) for pin in pins}


def test_every_template_is_a_pin_with_what_requests_will_begin_with(home: Path, model: ServedModel) -> None:
    (home / "templates.toml").write_text(
        '[templates.a]\nsystem = "Be kind. Today is {date}."\n[templates.b]\nsystem = "Be short."\n'
    )
    pins = template_prefixes(config(), model)
    assert texts(pins) == {
        "a": f"{START}Be kind. Today is",
        "b": f"{START}Be short.<|im_end|>\n<|im_start|>user\n",
    }
    asked = (Message("system", "Be kind. Today is Monday."), Message("user", "Hi"))
    prompt = model.prepare_chat(ChatRequest("", asked, Options()))
    assert tuple(prompt[: len(pins[0].tokens)]) == pins[0].tokens


def test_a_part_of_another_is_left_out(home: Path, model: ServedModel) -> None:
    (home / "templates.toml").write_text(
        '[templates.short]\nsystem = "Be kind {x}"\n[templates.long]\nsystem = "Be kind to all {x}"\n'
        '[templates.same]\nsystem = "Be kind to all {y}"\n'
    )
    assert list(texts(template_prefixes(config(), model))) == ["long"]


def test_a_prefix_that_leaves_no_room_is_refused(home: Path, model: ServedModel) -> None:
    (home / "templates.toml").write_text(f'[templates.a]\nsystem = "{"x" * 400}"\n')
    with pytest.raises(StartupError, match=r"templates\.a: its prefix is \d+ tokens and the model's context holds 400"):
        template_prefixes(config(), model)


def test_the_usual_file_may_be_missing_a_named_one_may_not(home: Path, model: ServedModel) -> None:
    assert template_prefixes(config(), model) == []
    assert templates_file(config()) == home / "templates.toml"
    with pytest.raises(StartupError, match=r"none\.toml: there is no such file"):
        load_templates(config(str(home / "none.toml")))


def test_without_a_home_there_are_no_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.pins.config_home", lambda: None)
    assert load_templates(config()) == ()
    with pytest.raises(StartupError, match="XDG_CONFIG_HOME"):
        templates_file(config())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[templates", "not valid TOML"),
        (b"[templates.a]\nsystem = 1", r"templates\.a\.system: should be text"),
        (b"[templates.a]\nsystem = '\xff'", "is not UTF-8 at byte 25"),
    ],
)
def test_a_file_that_is_none_is_refused_by_its_name(home: Path, data: bytes, message: str) -> None:
    (home / "t.toml").write_bytes(data)
    with pytest.raises(StartupError, match=rf"t\.toml: {message}"):
        load_templates(config(str(home / "t.toml")))


def test_a_directory_is_no_file(home: Path) -> None:
    with pytest.raises(StartupError, match="directory"):
        read_text(home)


def test_the_file_is_replaced_whole_and_keeps_its_permissions_and_links(home: Path) -> None:
    real, link = home / "real.toml", home / "link.toml"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to(real)
    write_text(link, "new\r\n")
    assert real.read_bytes() == b"new\r\n"
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o600
    assert sorted(path.name for path in home.iterdir()) == ["link.toml", "real.toml"]


def test_folders_are_made(home: Path) -> None:
    write_text(home / "a" / "b" / "t.toml", "x")
    assert read_text(home / "a" / "b" / "t.toml") == "x"


def test_what_cannot_be_written_leaves_the_file_and_nothing_else(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = home / "t.toml"
    file.write_text("old")
    with pytest.raises(StartupError, match="UTF-8"):
        write_text(file, "\ud800")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StartupError, match=r"t\.toml: cannot be written: no space left"):
        write_text(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in home.iterdir()] == ["t.toml"]


def test_chats_are_tokenised_without_an_engine_as_with_one(model: ServedModel) -> None:
    chat = [Message("system", "Be kind."), Message("user", "Hi")]
    assert make_encode(config())(chat) == model.prepare_chat(ChatRequest("", tuple(chat), Options()))


@pytest.mark.real
def test_the_demo_model_s_chats_too(demo_model: Path) -> None:
    ids = make_encode(Config(model=Model(path=str(demo_model), alias="demo")))([Message("user", "Hi")])
    assert len(ids) > 10
