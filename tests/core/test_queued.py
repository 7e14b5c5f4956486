from __future__ import annotations

import random

import pytest

from core.walked import WalkedBacklog, lines
from headrace.core.admission import Backlog, Bounds
from headrace.core.errors import Overloaded
from headrace.core.events import Admitted, Delta
from headrace.core.queued import FIRST, Queued
from headrace.core.request import BATCH, INTERACTIVE, Generation


def queued(*choices: int) -> Queued:
    """Prompts of 10, 20, … tokens."""
    one = Queued()
    for rid, n in enumerate(choices):
        tokens = 10 * (rid + 1)
        one.add(rid, float(rid), tokens, most=tokens, least=1.0, priority=INTERACTIVE, choices=n)
    return one


def test_places_go_to_the_front_and_nobody_passes() -> None:
    one = queued(1, 2, 1)
    assert one.seat(0) == (3, 0, 0)
    assert one.seat(-3) == (3, 0, -3)
    assert one.seat(2) == (2, 1, 1)
    assert one.seat(3) == (1, 2, 0)
    assert one.seat(9) == (0, 3, 5)
    assert (one.tokens(1), one.work(0.5, 1)) == (50, 25.0)


def test_who_has_left_takes_nothing() -> None:
    one = queued(1, 1, 2)
    one.remove(1, INTERACTIVE)
    assert (len(one), one.tokens(), one.work(1.0), one.choices(INTERACTIVE)) == (2, 40, 40.0, 3)
    assert one.seat(1) == (1, 2, 0)
    assert repr(one) == "<Queued [2 in 3 rows]>"


def test_holes_are_packed_and_the_order_stays() -> None:
    one = queued(*[1] * 1000)
    for rid in range(1000):
        if rid % 10:
            one.remove(rid, INTERACTIVE)
    assert len(one) == 100
    assert one.tokens() == sum(range(10, 10_000, 100))
    assert len(one._choices) <= 2 * 100 + FIRST + 1, "more are not worth a packing"
    _, row, _ = one.seat(40)
    assert one.tokens(row) == sum(range(4010, 10_000, 100))
    for rid in range(0, 1000, 10):
        one.remove(rid, INTERACTIVE)
    assert (len(one), one.tokens(), one.choices(INTERACTIVE), one.seat(7)[0]) == (0, 0, 0, 0)


def test_one_that_is_passed_over_still_waits() -> None:
    one = queued(1, 1)
    one.pass_over(1)
    assert one.ahead(99.0, BATCH, 0.0, missing=1.0, prefill_s=1.0, prefill_share=1.0) == pytest.approx(10.0)
    assert (len(one), one.choices(INTERACTIVE)) == (2, 2)


def refusal(one: Backlog, generation: Generation, now: float) -> str:
    """Reason and words; "" if it was let in."""
    try:
        one.add(generation, now)
    except Overloaded as error:
        return f"{error.reason}: {error.message}"
    return ""


class Pair:
    """Two books of the same requests."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        bounds = Bounds(
            max_waiting=rng.choice([5, 60, 10_000]),
            max_waiting_tokens=rng.choice([2000, 10**9]),
            queue_timeout_s=rng.choice([0.5, 5.0, 1e9]),
            places=rng.choice([0, 1, 4, 16]),
            predict=rng.random() < 0.8,
        )
        self.real, self.walked = Backlog(bounds), WalkedBacklog(bounds)
        self.stems = [[rng.randrange(1000) for _ in range(rng.choice([64, 200, 640]))] for _ in range(3)]
        self.now, self.rids = 0.0, 0
        self.live: list[int] = []
        self.refused = 0
        self.leaving = rng.choice([1, 5])

    def add(self) -> None:
        rng = self.rng
        self.rids += 1
        stem = rng.choice(self.stems) if rng.random() < 0.5 else []
        generation = Generation(
            self.rids,
            [*stem, self.rids, *range(rng.choice([0, 5, 50, 500, rng.randrange(3000)]))],
            1,
            rng.choice([1, 1, 1, 2, 3]),
            cache=rng.random() < 0.8,
            priority=rng.choice([INTERACTIVE, INTERACTIVE, BATCH]),
            deadline=rng.choice([None, None, None, 0.1, 3.0]),
        )
        refused = refusal(self.real, generation, self.now)
        assert refused == refusal(self.walked, generation, self.now)
        if refused:
            self.refused += 1
        else:
            self.live.append(self.rids)

    def act(self) -> None:
        rng, rid = self.rng, self.rng.choice(self.live or [0])
        match rng.choices(range(5), [10, 4, 4, self.leaving, 3])[0]:
            case 0:
                self.add()
            case 1:
                event = Admitted(rid, rng.randrange(2), rng.choice([0, 64]))
                self.real.book(event, self.now)
                self.walked.book(event, self.now)
            case 2:
                self.real.book(Delta(rid, 0, "x", 1), self.now)
                self.walked.book(Delta(rid, 0, "x", 1), self.now)
            case 3:
                self.real.remove(rid, self.now)
                self.walked.remove(rid, self.now)
                if rid in self.live:
                    self.live.remove(rid)
            case 4:
                figures = rng.choice([0.0, 1e-4, 1e-3]), rng.random() * 1.2, rng.choice([0, 100, 9000])
                self.real.learn(*figures)
                self.walked.learn(*figures)
        self.now += rng.choice([0.0, 0.0, 0.01, 1.0])

    def compare(self) -> None:
        real, walked, rng = self.real, self.walked, self.rng
        assert (real.waiting, repr(real)[8:]) == (walked.waiting, repr(walked)[8:])
        assert real.correction == walked.correction
        for priority in (INTERACTIVE, BATCH):
            tokens, reuses = rng.choice([1, 64, 701, 5000]), rng.random() < 0.5
            expected = walked.predict(tokens, priority, self.now, reuses=reuses)
            assert real.predict(tokens, priority, self.now, reuses=reuses) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_it_says_what_a_walk_over_everybody_says(seed: int) -> None:
    pair = Pair(random.Random(seed))
    for _ in range(400):
        pair.act()
        pair.compare()


def test_both_ends_of_the_property_are_met() -> None:
    """Some books refuse, and some get long."""
    pairs = [Pair(random.Random(seed)) for seed in range(30)]
    for pair in pairs:
        for _ in range(400):
            pair.act()
    assert sum(pair.refused > 20 for pair in pairs) > 5
    assert sum(pair.real.waiting > FIRST for pair in pairs) > 2


def long(n: int) -> Backlog:
    """Four answers that are computed, and `n` requests behind them."""
    one = Backlog(Bounds(max_waiting=10**6, max_waiting_tokens=10**9, places=4))
    one.learn(1e-3, 0.2, 500)
    for rid in range(n + 4):
        one.add(Generation(rid, [rid, *range(rid % 50)], 1, priority=rid % 2), 0.0)
        if rid < 4:
            one.book(Admitted(rid, 0, 0), 0.0)
    return one


def test_nothing_is_looked_at_one_by_one() -> None:
    """Of what happens to one request, as much with ten thousand that wait as with a hundred."""

    def cost(n: int) -> list[int]:
        one = long(n)
        return [
            lines(lambda: one.predict(50, BATCH, 1.0)),
            lines(lambda: one.add(Generation(10**6, [1, 2, 3], 1), 1.0)),
            lines(lambda: one.book(Admitted(10**6, 0, 0), 1.0)),
            lines(lambda: one.book(Delta(10**6, 0, "x", 1), 1.0)),
            lines(lambda: one.remove(10**6, 1.0)),
            lines(lambda: one.remove(50, 1.0)),
            lines(lambda: one.waiting),
        ]

    assert cost(10_000) == cost(100)


def test_who_is_refused_is_not_dearer() -> None:
    def cost(n: int) -> int:
        one = long(n)
        one.bounds = Bounds(max_waiting=n, places=4)
        late = Generation(10**6, [1, 2, 3], 1)

        assert refusal(one, late, 1.0).startswith("queue_full")
        return lines(lambda: refusal(one, late, 1.0))

    assert cost(10_000) == cost(100)
