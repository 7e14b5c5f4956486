from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from headrace_bench.memory import TEMPLATE, Conversation, body, computing_ms, forget, restored, restoring_ms, visit
from headrace_bench.wire import Answer, Refused


def seen(queue: float = 0.2, restore: float = 9.8, prefill: float = 20.0, cached: float = 1000.0) -> dict[str, float]:
    answer = Answer(stamps=[0.05], texts=["a"], tokens=8, prompt_tokens=1040)
    answer.timeline = {"queue": queue, "restore": restore, "prefill": prefill, "ttft": 1.0, "cached_tokens": cached}
    return visit(answer)


def test_a_visit_keeps_what_the_figures_need() -> None:
    assert seen() == {
        "ttft_ms": 50.0,
        "prompt_tokens": 1040.0,
        "cached_tokens": 1000.0,
        "queue": 0.2,
        "restore": 9.8,
        "prefill": 20.0,
    }
    with pytest.raises(Refused, match="without text"):
        visit(Answer())


def test_computing_is_scaled_to_a_thousand_tokens() -> None:
    assert computing_ms([seen(prefill=2080.0, cached=0.0)]) == pytest.approx(2000.0)
    assert computing_ms([seen(prefill=1000.0, cached=540.0)]) == pytest.approx(2000.0)


def test_waiting_for_kv_is_part_of_restoring_it() -> None:
    assert restoring_ms([seen(queue=1.0, restore=9.0)]) == pytest.approx(10.0)
    assert restoring_ms([seen(queue=1.0, restore=9.0, cached=2000.0)]) == pytest.approx(5.0)


def test_what_was_there_or_was_computed_is_no_restore() -> None:
    resident, computed = seen(queue=0.5, restore=0.25), seen(restore=9.0, cached=64.0)
    assert not restored(resident)
    assert not restored(computed)
    assert restoring_ms([resident, computed]) is None
    assert restoring_ms([resident, computed, seen(queue=0.0, restore=7.0)]) == pytest.approx(7.0)


def test_conversations_share_nothing() -> None:
    one, other, same = (Conversation(seed, 100) for seed in (1, 2, 1))
    assert one.messages == same.messages
    first = [talk.messages[0]["content"].split() for talk in (one, other)]
    assert first[0][0] != first[1][0]
    assert len(first[0]) == 61


def test_a_request_asks_for_its_timeline() -> None:
    asked = body("m", [{"role": "user", "content": "x"}], 3)
    assert asked["headrace"] == {"timings": True}
    assert asked["stream_options"] == {"include_usage": True}
    assert (asked["temperature"], asked["max_tokens"]) == (0, 3)


def test_the_template_file_is_toml() -> None:
    assert tomllib.loads(TEMPLATE.format(system="a b"))["templates"] == {"bench": {"system": "a b"}}


def test_forgetting_leaves_the_files(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "blob").write_bytes(b"x" * 10000)
    forget(tmp_path)
    assert (tmp_path / "deeper" / "blob").read_bytes() == b"x" * 10000
