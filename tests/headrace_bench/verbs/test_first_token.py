from __future__ import annotations

from headrace_bench.verbs import first_token


def test_every_bar_belongs_to_a_part() -> None:
    assert {bar[0] for bar in first_token.BARS} == set(first_token.PARTS)
