from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from headrace.core.pacer import HEADROOM, Pacer, split
from headrace.core.request import Pacing

ADAPTIVE = Pacing(adaptive=True)

# fmt: off
COPYING = (
    (0.0, 1), (13.4, 1), (26.4, 1), (39.3, 1), (52.6, 1), (65.9, 1), (78.9, 1), (96.8, 1), (116.8, 2), (153.4, 4),
    (190.6, 4), (255.5, 8), (320.9, 8), (386.4, 8), (452.1, 8), (518.3, 8), (585.4, 8), (652.1, 8), (666.1, 1),
    (679.2, 1), (692.6, 1), (706.1, 1), (719.4, 1), (733.1, 1), (746.4, 1), (759.8, 1), (773.2, 1), (786.9, 1),
    (800.4, 1), (813.7, 1), (827.1, 1), (840.6, 1), (853.9, 1), (867.4, 1), (880.7, 1), (893.9, 1), (907.4, 1),
)
# fmt: on
"""(ms, tokens): an answer of the demo model that first copies code, so that guesses hold, and then speaks freely;
recorded on one core, in that core's own time."""

Arrivals = Sequence[tuple[float, float]]
Left = list[tuple[float, bytes, float]]
"""(ms, piece, ms held)"""


def play(pacing: Pacing, arrivals: Arrivals, *, each: bool = True, late: float = 0.0, end: float | None = None) -> Left:
    """What leaves when. Pieces are numbered; `each`: every token is one. Timers are `late` ms; at `end` all is cut."""
    pacer, left, number = Pacer(pacing), Left(), 0
    pending = [(ms / 1e3, tokens) for ms, tokens in arrivals]

    def take(now: float, *, flush: bool = False) -> None:
        for unit in pacer.flush(now) if flush else pacer.take(now):
            left.append((now * 1e3, unit.data, (now - unit.arrived) * 1e3))

    while pending or len(pacer):
        due = pacer.due
        wake = float("inf") if due is None else due + late / 1e3
        now = min(wake, pending[0][0] if pending else wake)
        if end is not None and now * 1e3 > end:
            take(end / 1e3, flush=True)
            break
        while pending and pending[0][0] <= now:
            _, tokens = pending.pop(0)
            for share in [1.0] * int(tokens) if each and tokens else [tokens]:
                pacer.put(b"%d" % number, share, now)
                number += 1
        take(now)
    assert [piece for _, piece, _ in left] == [b"%d" % i for i in range(number)], "in order, and each once"
    assert pacer.size == 0
    return left


def gaps(left: Left) -> list[float]:
    """Milliseconds between the writes."""
    moments = sorted({round(ms, 6) for ms, _, _ in left})
    return sorted(b - a for a, b in pairwise(moments))


def held(left: Left) -> list[float]:
    return [round(delay, 6) for _, _, delay in left]


# An even flow ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_burst_becomes_an_even_flow_at_a_tenth_above_its_rate() -> None:
    left = play(ADAPTIVE, [(0, 1), (80, 4), (160, 4), (240, 4)])
    pace = 20 / HEADROOM
    expected = [start + i * pace for start in (80, 160, 240) for i in range(4)]
    assert [round(ms, 6) for ms, _, _ in left] == [0.0, *(pytest.approx(ms) for ms in expected)]
    assert max(held(left)) == pytest.approx(3 * pace)


@pytest.mark.parametrize("gap", [1, 10, 33, 150, 399, 401, 1000, 30_000])
def test_an_even_stream_waits_for_nothing_however_slow_it_is(gap: float) -> None:
    assert set(held(play(ADAPTIVE, [(gap * i, 1) for i in range(60)]))) == {0.0}


def test_the_first_text_waits_for_nothing_and_neither_does_what_has_no_text() -> None:
    left = play(ADAPTIVE, [(0, 0), (5, 0), (70, 3), (70, 0)], each=False)
    assert set(held(left)) == {0.0}
    assert set(held(play(Pacing(window=9), [(0, 0), (70, 1)], each=False))) == {0.0}


def test_without_a_rate_there_is_no_delay() -> None:
    assert set(held(play(ADAPTIVE, [(0, 8)]))) == {0.0}


def test_the_pace_rises_by_a_straight_line_as_a_deadline_comes_near() -> None:
    # 50 ms a token until then; 40 at once would take two seconds and have 0.4 s.
    left = play(ADAPTIVE, [*((50 * i, 1) for i in range(20)), (1000, 40)])
    burst = [ms - 1000 for ms, _, _ in left[20:]]
    assert burst[-1] <= 400
    steps = [b - a for a, b in pairwise(burst)]
    assert max(steps) < 50 / HEADROOM
    assert max(steps) == pytest.approx(min(steps), rel=0.3), "evenly, and not all at the deadline"


def test_what_was_delayed_is_caught_up() -> None:
    left = play(ADAPTIVE, [*((20 * i, 1) for i in range(20)), (400, 10), *((400 + 20 * i, 1) for i in range(1, 100))])
    assert max(held(left)) > 50
    assert held(left)[-1] == 0.0


def test_a_late_timer_does_not_slow_the_flow_down() -> None:
    arrivals = [(80 * i, 4) for i in range(20)]
    punctual, late = play(ADAPTIVE, arrivals), play(ADAPTIVE, arrivals, late=3)
    assert all(b[0] - a[0] <= 3 + 1e-6 for a, b in zip(punctual, late, strict=True))


def test_pieces_of_several_tokens_take_the_room_of_several() -> None:
    left = play(ADAPTIVE, [(0, 1), (60, 3), (60, 3), (120, 6)], each=False)
    pace = 60 / 6 / HEADROOM
    assert left[2][0] - left[1][0] == pytest.approx(3 * pace)


def test_a_recorded_answer_with_bursts() -> None:
    before = [b[0] - a[0] for a, b in pairwise(COPYING)]
    left = play(ADAPTIVE, COPYING)
    after = gaps(left)
    assert sorted(before)[int(0.99 * len(before))] == pytest.approx(67, abs=0.5)
    assert after[int(0.99 * len(after))] < 31
    assert after[int(0.95 * len(after))] < 15
    delays = held(left)
    assert sum(delays) / len(delays) < 26
    assert max(delays) < 68


# Windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_window_leaves_when_it_is_full() -> None:
    left = play(Pacing(window=3), [(10 * i, 1) for i in range(8)], end=70)
    assert [round(ms) for ms, _, _ in left] == [0, 30, 30, 30, 60, 60, 60, 70]


def test_a_burst_may_fill_several_windows() -> None:
    left = play(Pacing(window=3), [(0, 1), (10, 1), (20, 7), (30, 1)], each=False, end=30)
    assert [round(ms) for ms, _, _ in left] == [0, 20, 20, 30]


def test_a_window_that_does_not_become_full_leaves_in_time() -> None:
    left = play(Pacing(window=3, max_delay_s=0.25), [(0, 1), (100, 1), (1000, 1)])
    assert [round(ms) for ms, _, _ in left] == [0, 350, 1250]


# All of it ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_leaves_in_order_and_in_time(seed: int) -> None:
    rng = random.Random(seed)
    adaptive = rng.random() < 0.7
    max_delay = rng.choice([1, 20, 100, 400])
    pacing = Pacing(rng.randrange(2, 12), adaptive, max_delay / 1e3)
    now, arrivals = 0.0, []
    for _ in range(rng.randrange(1, 120)):
        now += rng.choice([0, 0, 1, 5, 17, 17, 17, 91, 300, 2000]) * rng.random()
        arrivals.append((now, float(rng.choice([0, 1, 1, 1, 2, 4, 8, 30]))))
    end = rng.choice([None, rng.uniform(0, now)])
    left = play(pacing, [a for a in arrivals if end is None or a[0] <= end], each=rng.random() < 0.5, end=end)
    assert all(-1e-6 <= delay <= max_delay + 1e-6 for delay in held(left))
    if left:
        assert left[-1][0] <= (arrivals[-1][0] if end is None else end) + max_delay + 1e-6


def test_it_says_what_it_cost() -> None:
    pacer = Pacer(Pacing(window=2))
    assert pacer.summary() is None
    for ms in (0, 10, 30):
        pacer.put(b"abc", 1, ms / 1e3)
        pacer.take(ms / 1e3)
    assert pacer.delays == pytest.approx([0.0, 0.02, 0.0])
    assert pacer.summary() == pytest.approx((0.02 / 3, 0.02))
    pacer.put(b"abcd", 1, 0.04)
    assert (len(pacer), pacer.size) == (1, 4)
    assert pacer.due == pytest.approx(0.44)


# Pieces of text ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "parts", "expected"),
    [
        (" one two three four", 4, [" one", " two", " three", " four"]),
        (" one two three four", 2, [" one two", " three four"]),
        (" one two", 5, [" one", " two"]),
        ("return x\n    y", 3, ["return", " x", "\n    y"]),
        ("unbreakable", 3, ["unbreakable"]),
        ("", 3, [""]),
        ("   ", 2, ["   "]),
        ("日本語です", 5, ["日", "本", "語", "で", "す"]),
        ("日本語です", 2, ["日本", "語です"]),
        ("e\u0301e\u0301", 4, ["e\u0301", "e\u0301"]),
        ("👩\u200d💻👍🏽", 6, ["👩\u200d💻", "👍🏽"]),
    ],
)
def test_text_is_cut_where_a_reader_would(text: str, parts: int, expected: list[str]) -> None:
    assert split(text, parts) == expected


@pytest.mark.parametrize("seed", range(20))
def test_cut_text_is_whole(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab  \n日🔥\u0301é", k=rng.randrange(30)))
    parts = rng.randrange(1, 9)
    pieces = split(text, parts)
    assert "".join(pieces) == text
    assert 1 <= len(pieces) <= parts
    assert all(pieces) or not text
