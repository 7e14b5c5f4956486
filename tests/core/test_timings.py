from __future__ import annotations

import pytest

from headrace.core.timings import LEFT_OUT, Part, Timing, figures, sample_layers
from headrace.core.tuning import READERS
from recorded_timings import EPYC, XEON, XEON_PLAIN, Timings

LAYER, HEAD, POSITION = 0.001, 0.02, 1e-6


def timed(layers: int) -> Timings:
    """Of a model whose layers cost LAYER a row, of which a step without outputs leaves LEFT_OUT of the last one out,
    and whose head costs HEAD."""

    def bare(rows: int, depth: int) -> float:
        return rows * (LAYER + POSITION * (depth + (rows - 1) / 2)) * (layers - LEFT_OUT)

    prompt = [Timing(rows, start, 1, False, bare(rows, start)) for rows, start in ((64, 0), (512, 0), (512, 512))]
    readers = [Timing(n, 0, n, False, n * LAYER * (layers - LEFT_OUT)) for n in (1, READERS)]
    heard = [Timing(n, 0, n, True, n * LAYER * layers + HEAD) for n in (1, READERS)]
    return (*prompt, *readers, *heard, Timing(1, 1024, 1, False, bare(1, 1024)))


def test_a_few_layers_tell_what_all_of_them_take() -> None:
    sample, whole = figures(timed(4), Part(4, 30), 8192), figures(timed(30), Part(30, 30), 8192)
    assert sample is not None
    assert whole is not None
    assert dict(sample.first_tokens) == pytest.approx(dict(whole.first_tokens))
    assert (sample.one, sample.many) == pytest.approx((whole.one, whole.many))
    assert sample.longest == 512
    tokens = 2048
    expected = tokens * (LAYER + POSITION * (tokens - 1) / 2) * (30 - LEFT_OUT) + HEAD + LAYER * LEFT_OUT
    assert dict(whole.first_tokens)[2048] == pytest.approx(expected)


def test_the_shortest_of_a_kind_counts() -> None:
    slow = [Timing(64, 0, 1, False, 9.0), Timing(1, 0, 1, False, 9.0), Timing(1, 0, 1, True, 9.0)]
    assert figures([*slow, *timed(4)], Part(4, 30), 8192) == figures(timed(4), Part(4, 30), 8192)


def test_lengths_that_the_model_cannot_hold_are_left_out() -> None:
    found = figures(timed(4), Part(4, 30), 1024)
    assert found is not None
    assert [tokens for tokens, _ in found.first_tokens] == [64, 512]


@pytest.mark.parametrize("kind", [(64, 1, False), (1, 1, True), (1, 1, False), (READERS, READERS, True)])
def test_too_little_gives_no_figures(kind: tuple[int, int, bool]) -> None:
    rest = [t for t in timed(4) if (t.rows, t.sequences, t.outputs) != kind]
    assert figures(rest, Part(4, 30), 8192) is None


def test_a_sample_has_enough_layers_in_whole_periods() -> None:
    assert sample_layers(size=98_000_000, total=30, period=1, target=16_000_000) == 5
    assert sample_layers(size=98_000_000, total=30, period=6, target=16_000_000) == 6
    assert sample_layers(size=8 * 10**9, total=32, period=1, target=16_000_000) == 2, "one would be mostly attention"
    assert sample_layers(size=10**6, total=4, period=1, target=16_000_000) == 4


@pytest.mark.parametrize(
    ("timings", "expected"),
    [(EPYC["source", True], 2541), (EPYC["bf16", True], 1189), (EPYC["q8_0", True], 1375), (EPYC["f16", True], 1660)],
)
def test_recorded_times_give_the_published_means(timings: Timings, expected: float) -> None:
    found = figures(timings, Part(1, 1), 8192)
    assert found is not None
    assert found.ttft * 1e3 == pytest.approx(expected, rel=0.01)


def test_recorded_times_of_the_other_machine_are_those_of_its_long_prompt() -> None:
    for timings, seconds in ((XEON["source", True], 1.694), (XEON["source", False], 2.412)):
        assert sum(t.seconds for t in timings if t.rows == 512) == pytest.approx(seconds)
    found = figures(XEON_PLAIN["source", True], Part(1, 1), 8192)
    assert found is not None
    assert dict(found.first_tokens)[64] == pytest.approx(64 / 394)
