from __future__ import annotations

import random
import tomllib

import pytest

from headrace.core.errors import StartupError
from headrace.kv.template_file import decoded, with_template, without_template

FILE = """\
# All our prompts.

[templates.first]  # the oldest
system = '''
[templates.second]
not a table, but text
'''

# About the second.
[templates.second]
# inside it
system = "two"
user = "and {x}"

# About the third.
[ templates . "third" ]
system = "three"
"""


def names(text: str) -> list[str]:
    return list(tomllib.loads(text)["templates"])


def test_a_template_is_added_at_the_end_and_nothing_else_changes() -> None:
    new = with_template(FILE, "fourth", {"system": "four {x}", "user": "u"})
    assert new == FILE + '\n[templates.fourth]\nsystem = "four {x}"\nuser = "u"\n'
    assert with_template("", "a", {"system": "x"}) == '[templates.a]\nsystem = "x"\n'
    assert (
        with_template("# no end of line", "a", {"system": "x"}) == '# no end of line\n\n[templates.a]\nsystem = "x"\n'
    )


def test_each_template_can_be_removed_and_the_others_stay_to_the_letter() -> None:
    assert without_template(FILE, "second") == FILE.replace(
        '[templates.second]\n# inside it\nsystem = "two"\nuser = "and {x}"\n\n', ""
    )
    third = without_template(FILE, "third")
    assert names(third) == ["first", "second"]
    assert third.endswith("# About the third.\n")
    first = without_template(FILE, "first")
    assert names(first) == ["second", "third"]
    assert first.startswith("# All our prompts.\n\n# About the second.\n")


def test_removing_what_was_added_gives_the_file_back() -> None:
    assert without_template(with_template(FILE, "x", {"system": "y"}), "x") == FILE


def test_the_last_template_leaves_the_comments() -> None:
    text = without_template('# mine\n[templates.a]\nsystem = "x"\n', "a")
    assert text == "# mine\n"


def test_line_ends_of_another_system_are_kept() -> None:
    text = FILE.replace("\n", "\r\n")
    assert without_template(text, "second").count("\r\n") == without_template(text, "second").count("\n")
    assert with_template(text, "x", {"system": "y"}).startswith(text)


def test_any_text_comes_back() -> None:
    rng = random.Random(5)
    pieces = [
        '"',
        '""',
        '"""',
        "\\",
        "\\n",
        "\n",
        "\r",
        "\t",
        "\0",
        "\x7f",
        "{{",
        "}}",
        "a",
        " ",
        "é",
        "\U0001f525",
        "'",
        "#",
        "[",
    ]
    for _ in range(400):
        text = "x" + "".join(rng.choices(pieces, k=rng.randrange(8)))
        new = with_template(FILE, "n", {"system": text})
        assert tomllib.loads(new)["templates"]["n"]["system"] == text
        assert without_template(new, "n") == FILE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE, "templates.second: is there already"),
        ("templates = { b = { system = 'x' } }", "the file is not written as tables"),
        ("templates = 3", "the file is not written as tables"),
        ("[templates", "not valid TOML"),
    ],
)
def test_what_cannot_be_added_to_is_left_alone(text: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"^{message}"):
        with_template(text, "second", {"system": "x"})


def test_only_a_template_is_added() -> None:
    with pytest.raises(StartupError, match=r"^templates\.a\.system: character 1"):
        with_template("", "a", {"system": "{"})
    with pytest.raises(StartupError, match="a name is"):
        with_template("", "a]", {"system": "x"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE, "templates.none: there is no such template; there are: first, second, third"),
        ("", "templates.none: there is no such template; there are: none"),
        ("templates = { none = { system = 'x' } }", "templates.none: is not written as one table"),
        ("[templates]\nnone.system = 'x'", "templates.none: is not written as one table"),
    ],
)
def test_what_cannot_be_removed_is_left_alone(text: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"^{message}"):
        without_template(text, "none")


def test_a_document_is_decoded_or_refused_in_one_line() -> None:
    assert decoded("a = 1") == {"a": 1}
    with pytest.raises(StartupError, match=r"^not valid TOML: "):
        decoded("a = 1\na = 2")
