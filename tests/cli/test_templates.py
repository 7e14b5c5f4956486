from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli import main
from headrace.cli import templates as verb
from headrace.core.errors import StartupError


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "headrace" / "templates.toml"


def status_of(*arguments: str, model: str = "scripted:9") -> int:
    with pytest.raises(SystemExit) as caught:
        main(["templates", "--model", model, *arguments])
    return caught.value.code if isinstance(caught.value.code, int) else 0


def test_add_list_explain_and_remove(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("add", "desk", "--system", "Be kind to all of them. Today is {date}. Go.") == 0
    assert status_of("add", "b", "--system", "x" * 60, "--user", "{text}") == 0
    assert file.read_text().startswith("[templates.desk]\nsystem = ")
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"desk is in {file}; a server reads it when it starts",
        "See what it is worth with: headrace templates explain desk",
    ]
    assert status_of("list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "desk  40 of 54 tokens are reused",
        "      warning: 5 tokens after {date} cannot be reused exactly: move the variable to the end",
        "      warning: the prefix is 40 tokens: fewer than 64 save next to nothing",
        "b     76 of 89 tokens are reused",
    ]
    assert status_of("explain", "desk") == 0
    assert capsys.readouterr().out.splitlines() == [
        "desk, with scripted:",
        "      40  reused: up to {date}",
        "       5  computed for each chat: the text after {date}",
        "       9  computed for each chat: what the chat template puts behind, and a word that touches a variable",
        "      54  in all, without the variables",
        "warning: 5 tokens after {date} cannot be reused exactly: move the variable to the end",
        "warning: the prefix is 40 tokens: fewer than 64 save next to nothing",
    ]
    assert status_of("rm", "desk") == 0
    assert capsys.readouterr().out == f"desk is no longer in {file}\n"
    assert "desk" not in file.read_text()
    assert "[templates.b]" in file.read_text()


def test_without_templates_it_says_where_they_would_be(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("list", model="no-such-model") == 0
    assert capsys.readouterr().out == f"There are no templates in {file}\n"


def test_texts_may_come_from_files_and_braces_may_be_braces(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system.txt").write_text('Answer as {"a": 1}.\n')
    (tmp_path / "user.txt").write_text("Go.")
    options = ("--system-file", str(tmp_path / "system.txt"), "--user-file", str(tmp_path / "user.txt"))
    assert status_of("add", "a", *options) == 2
    assert "templates.a.system: character 11 is a single brace" in capsys.readouterr().err
    assert not file.exists()
    assert status_of("add", "a", *options, "--literal") == 0
    assert status_of("explain", "a") == 0
    assert "reused: all of it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "a"), "give --system TEXT or --system-file FILE"),
        (("add", "a", "--system", "x", "--system-file", "y"), "--system and --system-file: give one of them"),
        (("add", "a", "--system-file", "/none"), "/none: there is no such file"),
        (("add", "a b", "--system", "x"), "templates.'a b': a name is"),
        (("add", "old", "--system", "x"), "templates.old: is there already"),
        (("add", "new", "--system", "old text"), "templates.new: says the same as templates.old"),
        (("rm", "none"), "templates.none: there is no such template; there are: old"),
        (("explain", "none"), "templates.none: there is no such template in"),
        (("explian",), "explian"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_the_file_stays(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    file.parent.mkdir()
    file.write_text('[templates.old]\nsystem = "old text"\n')
    assert status_of(*arguments) == 2
    assert message in capsys.readouterr().err
    assert file.read_text() == '[templates.old]\nsystem = "old text"\n'


def test_another_file_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.toml"
    assert status_of("--file", str(other), "add", "a", "--system", "x") == 0
    assert other.read_text() == '[templates.a]\nsystem = "x"\n'


def test_a_text_is_given_once() -> None:
    assert verb.given("user", None, None) is None
    assert verb.given("user", "x", None) == "x"
    with pytest.raises(StartupError):
        verb.given("user", "x", Path("y"))
