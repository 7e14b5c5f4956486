from __future__ import annotations

import json

from headrace_bench.lookup import COPIES, PROSE, copying, people, ratio, telling


def test_the_ratio_is_the_median_over_rounds_and_chats_of_a_kind() -> None:
    rounds = [
        {"copy 0": {"on": 30.0, "off": 10.0}, "copy 1": {"on": 10.0, "off": 10.0}, "prose 0": {"on": 9.0, "off": 10.0}},
        {"copy 0": {"on": 20.0, "off": 10.0}, "copy 1": {"on": 5.0, "off": 10.0}, "prose 0": {"on": 9.0, "off": 10.0}},
        {"copy 0": {"on": 20.0, "off": 10.0}, "copy 1": {"on": 40.0, "off": 10.0}, "prose 0": {"on": 8.0, "off": 10.0}},
    ]
    assert ratio(rounds, "copy", "on", "off") == 2.0
    assert ratio(rounds, "prose", "on", "off") == 0.9


def test_the_chats() -> None:
    assert len({*COPIES, *PROSE}) == 4
    roles = [message["role"] for message in copying("x")]
    assert roles == ["user", "assistant", "user"]
    assert copying("x")[0]["content"] == copying("x")[1]["content"] == "x"
    assert telling("x") == [{"role": "user", "content": "x"}]


def test_people_differ_with_the_seed() -> None:
    assert people(1) == people(1)
    assert len({people(seed) for seed in range(8)}) == 8
    rows = [json.loads(line) for line in people(3).splitlines()]
    assert [row["id"] for row in rows] == list(range(8))
    assert all(18 <= row["age"] <= 80 for row in rows)
