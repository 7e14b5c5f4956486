from __future__ import annotations

import pytest

from headrace_bench.fault import Misuse
from headrace_bench.load.term import Term, shown


@pytest.mark.parametrize(
    ("text", "kind", "value", "options"),
    [
        ("chat", "chat", "", {}),
        ("chat,scale=4", "chat", "", {"scale": "4"}),
        ("step:1,2,3", "step", "1,2,3", {}),
        ("trace:/a,b/c.csv,rate=2,jitter=0", "trace", "/a,b/c.csv", {"rate": "2", "jitter": "0"}),
        ("trace:C:/x.csv", "trace", "C:/x.csv", {}),
        (" poisson:2 ", "poisson", "2", {}),
        ("", "", "", {}),
    ],
)
def test_a_text_is_taken_apart(text: str, kind: str, value: str, options: dict[str, str]) -> None:
    term = Term.read("--x", text)
    assert (term.kind, term.value, term.options) == (kind, value, options)


def test_an_option_is_given_once() -> None:
    with pytest.raises(Misuse, match="scale is given twice"):
        Term.read("--x", "chat,scale=1,scale=2")


def test_an_option_nobody_asked_for_is_not_passed_over() -> None:
    with pytest.raises(Misuse, match=r"--x chat,sclae=2: sclae is not known here; this kind takes scale, max_in"):
        Term.read("--x", "chat,sclae=2").only("scale", "max_in")
    with pytest.raises(Misuse, match="takes no options"):
        Term.read("--x", "chat,a=2").only()


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-1", "0", None])
def test_what_is_not_above_zero(text: str | None) -> None:
    with pytest.raises(Misuse, match="a rate has to be"):
        Term.read("--x", "poisson:?").positive(text, "a rate")


@pytest.mark.parametrize("text", ["1.5", "0", "-3", "two"])
def test_what_is_not_a_count(text: str) -> None:
    with pytest.raises(Misuse, match="users has to be"):
        Term.read("--x", "closed:?").count(text, "users")


@pytest.mark.parametrize("value", [0.1, 3.0, 1e-7, 1 / 3, 12345678.5, 1e20])
def test_a_number_reads_back_as_it_was(value: float) -> None:
    assert float(shown(value)) == value
    assert shown(4.0) == "4"
