from __future__ import annotations

import numpy as np
import pytest

from headrace_bench.load import workload as working
from headrace_bench.load.asks import Asker
from headrace_bench.load.traces import Row


def asker(workload: str) -> Asker:
    return Asker(working.parse(workload), np.random.default_rng(1), seed=1)


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ("chat", "ShareGPT and Azure conversation"),
        ("code,scale=4", "Azure code 2023): lengths divided by 4"),
        ("reason", "DeepSeek-R1"),
        ("mixed", "95% short chats, 5% of the longest"),
        ("shared:70", "one system prompt of 70 words"),
        ("sessions,turns=5", "conversations of 5 turns"),
    ],
)
def test_what_a_reader_has_to_know(workload: str, said: str) -> None:
    assert said in " ".join(asker(workload).notes())


def test_a_trace_says_which_lengths_it_has() -> None:
    one = asker("trace,scale=2")
    one.asks([Row(0.0, 100, 10)])
    assert one.notes() == ["the trace's pairs: lengths divided by 2, prompts cut at 512 tokens, answers at 128"]
    one.asks([Row(0.0, 1000, 10, (1, 2))])
    assert "prompts of the trace's blocks" in one.notes()[0]


def test_later_turns_are_shorter_than_first_ones() -> None:
    turns = asker("sessions,turns=3,scale=1,max_in=10000").asks([None] * 200)
    firsts = [first.prompt_tokens for first, *_ in turns]
    later = [ask.prompt_tokens for _, *others in turns for ask in others]
    assert np.median(later) < np.median(firsts) / 4
    assert max(later) <= 256
