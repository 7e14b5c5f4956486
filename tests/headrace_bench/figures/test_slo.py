from __future__ import annotations

import pytest

from headrace_bench.fault import Misuse
from headrace_bench.figures.definitions import figures
from headrace_bench.figures.slo import PROFILES, Slo, apdex, parse
from headrace_bench.record import Chunk, Outcome, Record


def answer(*ms: float, outcome: Outcome = "ok") -> Record:
    chunks = tuple(Chunk(at / 1000, "text", 4) for at in ms)
    return Record(index=0, scheduled=0.0, dispatched=0.0, sent=0.0, outcome=outcome, chunks=chunks)


CHAT = PROFILES["chat"]


@pytest.mark.parametrize(
    ("record", "good"),
    [
        (answer(1000, 1100, 1200), True),
        (answer(1001, 1050), False),
        (answer(500, 650, 800), False),  # 150 ms a token.
        (answer(500, 1001, *range(1010, 1100, 10)), False),  # One gap of 501.
        (answer(500, 1000, *range(1010, 1100, 10)), True),
        (answer(900), True),  # One token has no time between tokens.
        (answer(), False),
        (answer(100, 150, outcome="truncated"), False),
        (answer(100, 150, outcome="hung_up"), False),
    ],
)
def test_all_limits_at_once(record: Record, good: bool) -> None:
    assert CHAT.met(figures(record)) is good


def test_limit_by_limit() -> None:
    assert CHAT.kept(figures(answer(500, 1001, *range(1010, 1100, 10)))) == {"ttft": True, "tpot": True, "stall": False}
    assert CHAT.kept(figures(answer())) == {"ttft": False, "tpot": False, "stall": False}


def test_an_empty_answer_is_not_good_where_only_its_end_matters() -> None:
    code = PROFILES["code-complete"]
    assert not code.met(figures(answer()))
    assert code.met(figures(answer(400, 1000)))
    assert not code.met(figures(answer(400, 1010)))


def test_profiles() -> None:
    assert {name: [slo.ttft, slo.tpot, slo.stall, slo.e2e] for name, slo in PROFILES.items()} == {
        "voice": [0.3, 0.06, 0.2, None],
        "chat-strict": [0.5, 0.04, 0.25, None],
        "chat": [1.0, 0.1, 0.5, None],
        "reading": [2.0, 0.155, 1.0, None],
        "code-complete": [None, None, None, 1.0],
    }


def test_texts() -> None:
    assert parse("chat") == CHAT
    assert parse("ttft=500, tpot=50,stall=250,e2e=3000") == Slo(
        "ttft=500, tpot=50,stall=250,e2e=3000", ttft=0.5, tpot=0.05, stall=0.25, e2e=3.0
    )
    assert parse("chat,ttft=800").limits() == {"ttft": 0.8, "tpot": 0.1, "stall": 0.5}
    assert CHAT.text() == "chat (ttft 1000, tpot 100, stall 500 ms)"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is neither a profile"),
        ("chatty", "'chatty' is neither a profile"),
        ("ttft=500,chat", "'chat' is neither a profile"),
        ("p99=3", "neither a profile (voice, chat-strict"),
        ("name=3", "nor a limit in ms (ttft=500, tpot=500"),
        ("ttft=fast", "ttft is 'fast'; give a number of milliseconds above 0"),
        ("ttft=0", "above 0"),
        ("ttft=nan", "above 0"),
        ("ttft=inf", "above 0"),
        ("ttft=500,ttft=600", "ttft is given twice"),
    ],
)
def test_a_text_that_is_none_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Misuse) as caught:
        parse(text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_apdex() -> None:
    assert apdex([0.5, 1.0, 1.1, 4.0, 4.1, None], 1.0) == pytest.approx((1 + 1 + 0.5 + 0.5) / 6)
    assert apdex([], 1.0) is None
