from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_bench import agreement
from headrace_bench.agreement import SEED, Agreement, Seen, agree, chats, reported, seen, vocabulary
from headrace_bench.client.target import Target
from headrace_bench.fault import Fault
from headrace_bench.record import Chunk, Outcome, Record

TARGET = Target("http://127.0.0.1:9", "m")


def chat(index: int, ttft: float, *gaps: float, outcome: Outcome = "ok") -> Record:
    stamps = [1.0 + ttft]
    for gap in gaps:
        stamps.append(stamps[-1] + gap)
    chunks = tuple(Chunk(at, "text", 1) for at in stamps)
    return Record(index=index, scheduled=None, dispatched=0.5, sent=1.0, outcome=outcome, chunks=chunks)


def test_percentiles_are_taken_as_the_other_client_takes_them() -> None:
    found = seen([chat(i, 0.1 * (i + 1), 0.01, 0.02 * i) for i in range(10)])
    assert found.ttft_p50 == pytest.approx(600.0)  # the sixth of ten, from the request's last byte
    assert found.longest_gap == pytest.approx(180.0)


def test_a_chat_that_failed_is_no_measurement() -> None:
    with pytest.raises(Fault, match=r"1 of 2 chats failed \(http"):
        seen([chat(0, 0.1, 0.1), chat(1, 0.1, outcome="http")])


def test_an_interrupted_load_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SimpleNamespace(records=[chat(0, 0.1, 0.1)], interrupted=True)
    monkeypatch.setattr(agreement, "run", lambda *_: whole)
    with pytest.raises(KeyboardInterrupt):
        agreement.measured(TARGET, 1)


def test_both_take_turns_and_the_middle_ratio_decides() -> None:
    order: list[str] = []

    def mine(_: Target, turn: int) -> Seen:
        order.append(f"mine {turn - SEED}")
        return Seen(100.0, 50.0 if turn < SEED + 2 else 80.0)

    def other(_: Target, __: Path, turn: int) -> Seen:
        order.append(f"other {turn - SEED - 500_000}")
        return Seen(101.0, 50.0)

    found = agree(TARGET, Path("x"), 3, mine=mine, other=other)
    assert order == ["other 0", "mine 0", "mine 1", "other 1", "other 2", "mine 2"]
    assert found.ttft_ratio == pytest.approx(100 / 101)
    assert found.gap_ratio == 1.0
    assert found.agrees


def test_three_percent_is_the_limit() -> None:
    assert Agreement((Seen(103.0, 1.0),), (Seen(100.0, 1.0),)).agrees
    assert not Agreement((Seen(104.0, 1.0),), (Seen(100.0, 1.0),)).agrees
    assert not Agreement((Seen(100.0, 0.9),), (Seen(100.0, 1.0),)).agrees


def test_ten_different_chats_of_one_person() -> None:
    made = chats(1)
    assert made.users == 1
    assert made.finite
    assert len({planned.messages[1]["content"] for planned in made.requests}) == 10
    assert chats(1) == made != chats(2)


def program(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "other.py"
    file.write_text(text)
    return file


def test_what_the_other_client_prints_is_read(tmp_path: Path) -> None:
    said = '{"single": {"ttft": {"p50": 12.5}, "gap": {"max": 3}}}'
    assert reported(TARGET, program(tmp_path, f"print('{said}')"), 1) == Seen(12.5, 3.0)


@pytest.mark.parametrize(
    "text", ["import sys; sys.exit('refused')", "print('{}')", 'print(\'{"single": {"failed": "refused"}}\')']
)
def test_another_client_without_a_result_is_one_line(tmp_path: Path, text: str) -> None:
    assert sys.executable
    with pytest.raises(Fault, match=r"other\.py measured nothing"):
        reported(TARGET, program(tmp_path, text), 1)


def test_the_words_are_those_of_the_other_client(tmp_path: Path) -> None:
    assert vocabulary(program(tmp_path, 'WORDS = ("the of " "and").split()')) == ["the", "of", "and"]
    assert "river" in vocabulary(program(tmp_path, "import json"))
    said = chats(1, ["aye"]).requests[0].messages[1]["content"]
    assert said == "Tell me a story about " + " ".join(["aye"] * 20)


def test_the_other_client_is_given_the_key(tmp_path: Path) -> None:
    told = "import sys, json; k = len(sys.argv[sys.argv.index('--key') + 1])\n"
    said = "print(json.dumps({'single': {'ttft': {'p50': k}, 'gap': {'max': 1}}}))"
    assert reported(Target("http://127.0.0.1:9", "m", key="abc"), program(tmp_path, told + said), 1).ttft_p50 == 3.0


def test_a_client_that_does_not_end_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_bench.agreement.LIMIT_S", 0.2)
    with pytest.raises(Fault, match=r"other\.py did not end within 0\.2 s"):
        reported(TARGET, program(tmp_path, "import signal; signal.pause()"), 1)
