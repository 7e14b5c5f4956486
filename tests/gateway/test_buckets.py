"""In virtual time, against a sum that is done the other way round: from everything that ever happened."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from headrace.gateway.buckets import BUSY_S, MOST, NO_LIMITS, UNIT, Allowance, Bucket, Buckets, Refusal


class Ideal:
    """A bucket in exact fractions, moved microsecond by microsecond at its events."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.level = Fraction(limit)
        self.at = 0

    def refill(self, at: int) -> None:
        self.level = min(Fraction(self.limit), self.level + Fraction(self.limit * (at - self.at), 60_000_000))
        self.at = at


@pytest.mark.parametrize("limit", [1, 7, 60, 999, 700_001, MOST])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_ideal_bucket_to_the_last_bit(limit: int, seed: int) -> None:
    rng = random.Random(seed * 1000 + limit)
    bucket, ideal, at, admitted = Bucket(), Ideal(limit), 1_000_000_000_000, 0
    ideal.at = at
    for _ in range(300):
        at += rng.choice([0, 0, 1, 10, 1_000, 333_333, 1_000_000, 90_000_000])
        cost = rng.choice([1, 1, 2, limit // 3 + 1, limit, 2 * limit])
        ideal.refill(at)
        need = min(cost, limit)
        wait = bucket.wait(limit, cost, at / 1e6)
        assert (wait == 0) == (ideal.level >= need)
        if wait:
            exact = (need - ideal.level) * 60_000_000 / limit
            assert round(wait * 1e6) == math.ceil(exact), "the first microsecond at which it fits"
        else:
            bucket.take(limit, cost, at / 1e6)
            ideal.level -= cost
            admitted += 1
        if rng.random() < 0.2:
            back = rng.randint(-limit, limit)
            bucket.take(limit, back, at / 1e6)
            ideal.level = min(Fraction(limit), ideal.level - back)
    assert admitted > 10


@pytest.mark.parametrize("limit", [1, 3, 7, 60, 61, 1000])
def test_so_many_come_at_once_and_then_so_many_a_minute(limit: int) -> None:
    bucket, now = Bucket(), 12345.678
    admitted = 0
    while bucket.wait(limit, 1, now) == 0:
        bucket.take(limit, 1, now)
        admitted += 1
    assert admitted == limit
    for _ in range(limit):
        now += bucket.wait(limit, 1, now)
        assert bucket.wait(limit, 1, now) == 0, "what it said is true"
        bucket.take(limit, 1, now)
    assert now == pytest.approx(12345.678 + 60.0, abs=limit * 1e-6)


def test_one_microsecond_too_soon_is_too_soon() -> None:
    bucket = Bucket()
    bucket.take(60, 60, 0.0)
    assert bucket.wait(60, 1, 0.999999) == 1e-6
    assert bucket.wait(60, 1, 1.0) == 0


def test_what_is_larger_than_the_bucket_waits_for_a_full_one_and_leaves_a_debt() -> None:
    bucket = Bucket()
    assert bucket.wait(100, 250, 0.0) == 0
    bucket.take(100, 250, 0.0)
    assert bucket.wait(100, 1, 0.0) == pytest.approx(60 * 1.51)
    assert bucket.wait(100, 900, 0.0) == pytest.approx(60 * 2.5)


def test_what_comes_back_never_makes_it_more_than_full() -> None:
    bucket = Bucket()
    bucket.take(10, -500, 0.0)
    bucket.take(10, 10, 0.0)
    assert bucket.wait(10, 1, 0.0) == 6.0


def test_a_new_limit_counts_from_now_and_what_was_taken_stays_taken() -> None:
    bucket = Bucket()
    bucket.take(10, 10, 0.0)
    assert bucket.wait(1000, 1, 0.0) == 0.06
    assert bucket.wait(1000, 1, 0.06) == 0
    assert bucket.wait(1, 1, 120.0) == 0


def test_a_clock_that_steps_back_gives_nothing_and_locks_nobody_out() -> None:
    bucket = Bucket()
    bucket.take(60, 60, 1000.0)
    assert bucket.wait(60, 1, 10.0) == 1.0
    assert bucket.wait(60, 1, 11.0) == 0


def test_whole_numbers_stay_whole_as_doubles() -> None:
    assert MOST * UNIT < 2**53


# --- by key

TOKENS = Allowance(requests=3, tokens=100, streams=2)


def test_nothing_is_taken_unless_everything_fits() -> None:
    buckets = Buckets()
    assert buckets.take("a", TOKENS, 90, 0.0) is None
    refusal = buckets.take("a", TOKENS, 50, 0.0)
    assert refusal == Refusal("tokens", 24.0)
    assert buckets.take("a", TOKENS, 10, 0.0) is None, "the refused one took no request and no place"
    assert buckets.take("a", TOKENS, 0, 0.0) == Refusal("streams", BUSY_S)
    assert buckets.running("a") == 2
    buckets.settle("a", TOKENS, 10, 10, 0.0)
    assert buckets.take("a", TOKENS, 0, 0.0) is None
    assert buckets.take("a", TOKENS, 0, 0.0) == Refusal("requests", 20.0), "the longest wait is told"
    assert buckets.take("b", TOKENS, 90, 0.0) is None, "another key"


def test_what_it_really_took_is_settled() -> None:
    buckets, tokens = Buckets(), Allowance(tokens=100)
    assert buckets.take("a", tokens, 30, 0.0) is None
    buckets.settle("a", tokens, 30, 130, 0.0)
    assert buckets.take("a", tokens, 1, 0.0) == Refusal("tokens", 18.6)
    assert buckets.take("b", tokens, 100, 0.0) is None
    buckets.settle("b", tokens, 100, 0, 0.0)
    assert buckets.take("b", tokens, 100, 0.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_no_more_is_let_in_than_there_is(seed: int) -> None:
    rng, buckets, now = random.Random(seed), Buckets(), 50.0
    allowance = Allowance(rng.randint(1, 20), rng.randint(50, 500), rng.randint(1, 5))
    open_, came, most_running, took, started = list[int](), 0, 0, 0, now
    for _ in range(400):
        now += rng.choice([0.0, 0.0, 0.001, 0.5, 3.0])
        if open_ and rng.random() < 0.4:
            charged = open_.pop(rng.randrange(len(open_)))
            cost = rng.randint(0, charged)
            took -= charged - cost
            buckets.settle("k", allowance, charged, cost, now)
        else:
            cost = rng.randint(1, 50)
            if buckets.take("k", allowance, cost, now) is None:
                open_.append(cost)
                came += 1
                took += cost
        most_running = max(most_running, len(open_))
        minutes = 1 + (now - started) / 60
        assert came <= allowance.requests * minutes + 1e-6
        assert took <= allowance.tokens * minutes + 1e-6
        assert len(open_) == buckets.running("k") <= allowance.streams
    assert most_running


def test_what_is_not_limited() -> None:
    assert not NO_LIMITS.any
    assert all(one.any for one in (Allowance(requests=1), Allowance(tokens=1), Allowance(streams=1)))
    buckets = Buckets()
    assert all(buckets.take("a", NO_LIMITS, 10**9, 0.0) is None for _ in range(100))


def test_shows_itself() -> None:
    bucket = Bucket()
    assert repr(bucket) == "<Bucket [full]>"
    bucket.take(2, 1, 0.0)
    assert repr(bucket) == "<Bucket [1.0]>"
