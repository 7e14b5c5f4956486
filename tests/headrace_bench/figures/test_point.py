from __future__ import annotations

import msgspec
import pytest

from headrace_bench.figures.point import Point, sentence, winner
from headrace_bench.figures.search import Because, End, Goal

GOAL = Goal(target=0.95)
WON = Point(
    load=4.0,
    purpose="confirm",
    seed=9,
    seconds=100.0,
    took=110.0,
    verdict="met",
    good=400,
    scheduled=412,
    low=0.9498,
    high=0.9833,
    goodput=4.0,
    backlog_per_s=0.01,
    growing=False,
    stopped=False,
    invalid=(),
)
SEARCHED = msgspec.structs.replace(WON, purpose="search", good=412)


def end(because: Because | None = "refused", unmet: float | None = 4.2, confirmed: bool = True) -> End:
    return End("confirmed", 4.0, unmet, confirmed, because)


def test_the_sentence_quotes_the_confirmation() -> None:
    assert winner([SEARCHED, WON], end()) is WON
    assert sentence([SEARCHED, WON], end(), GOAL, "chat", closed=False) == (
        "4 requests/s meets chat at 95 % (attainment 97.1 % [95.0, 98.3], 412 requests), 5 % more does not"
    )


@pytest.mark.parametrize(
    ("because", "words"),
    [("unproven", "5 % more is not shown to"), ("unmeasurable", "5 % more cannot be measured from here")],
)
def test_what_was_not_refused_is_not_called_refused(because: Because, words: str) -> None:
    assert words in sentence([WON], end(because), GOAL, "chat", closed=False)


def test_a_closed_loop_is_no_capacity() -> None:
    said = sentence([WON], end(unmet=5.0), GOAL, "chat", closed=True)
    assert said.startswith("4 users at once meets chat")
    assert ", 5 does not; concurrency-limited: this is no capacity at a rate" in said
    assert "requests/s" not in said


def test_ends_without_an_edge_say_so() -> None:
    top = sentence([WON], End("top", 4.0, None, True, None), GOAL, "chat", closed=False)
    assert top.endswith("nothing above it was tried")
    late = sentence([SEARCHED], End("limit", 4.0, 8.0, False, "refused"), GOAL, "chat", closed=False)
    assert "100 % more does not; the time ran out; not confirmed with a fresh seed" in late
    none = sentence([], End("none", None, 0.01, False, "refused"), GOAL, "chat", closed=False)
    assert none == "no load was shown to meet chat at 95 %, tried down to 0.01"


def test_a_point_in_a_line() -> None:
    assert WON.text() == "4 met: 97.1 % [95.0, 98.3], 400 of 412"
    stopped = msgspec.structs.replace(WON, verdict="not met", stopped=True, good=300, low=0.68, high=0.77)
    assert stopped.text() == "4 not met: at most 72.8 % [68.0, 77.0], stopped early"
    growing = msgspec.structs.replace(WON, verdict="not met", growing=True, backlog_per_s=0.5)
    assert growing.text().endswith(", backlog grows by 0.5 a second")
    late = msgspec.structs.replace(WON, verdict="invalid", invalid=("sent late",))
    assert late.text().endswith(" (sent late)")
