from __future__ import annotations

import pytest

from headrace_bench.fault import Misuse
from headrace_bench.load.lengths import Sizes
from headrace_bench.load.workload import Measured, Mixed, Real, Sessions, Shared, Traced, Workload, Written, parse


@pytest.mark.parametrize(
    ("given", "there"),
    [
        ("chat", Real("chat", Sizes(8.0, 512, 128))),
        ("chat,scale=1,max_in=4096,max_out=1024", Real("chat", Sizes(1.0, 4096, 1024))),
        ("code", Real("code", Sizes(8.0, 512, 128))),
        ("reason", Real("reason", Sizes(8.0, 512, 512))),
        ("mixed", Mixed(0.05, Sizes(8.0, 1024, 128))),
        ("mixed,share=0.2", Mixed(0.2, Sizes(8.0, 1024, 128))),
        ("lengths:a.csv,scale=2", Measured("a.csv", Sizes(2.0, 1_000_000, 1_000_000))),
        ("prompts:a.jsonl", Written("a.jsonl", False, Sizes())),
        ("prompts:a.jsonl,turns=all", Written("a.jsonl", True, Sizes())),
        ("sessions:20,turns=3,think=0", Sessions(20, 3, 0.0, Sizes())),
        ("sessions", Sessions(None, 4, 1.0, Sizes())),
        ("shared:300", Shared(300, Sizes())),
        ("trace,block=32", Traced(32, Sizes())),
    ],
)
def test_what_is_given_is_read(given: str, there: Workload) -> None:
    assert parse(given) == there


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "choose from chat, code"),
        ("chatt", "chatt is not a kind"),
        ("chat:3", "chat takes options only"),
        ("chat,scale=0", "scale has to be more than 0"),
        ("chat,max_in=7", "at least 8"),
        ("mixed,share=1", "less than 1"),
        ("mixed,share=0", "more than 0"),
        ("lengths:", "which file"),
        ("prompts:a,turns=2", "turns has to be 1 or all"),
        ("sessions:0", "at least 1"),
        ("sessions:2,turn=3", "turn is not known here"),
        ("shared:", "the tokens of the system prompt has to be a number"),
        ("trace,block=0", "at least 1"),
    ],
)
def test_nonsense_is_one_clear_line(given: str, why: str) -> None:
    with pytest.raises(Misuse, match="--workload") as told:
        parse(given)
    assert why in str(told.value)
