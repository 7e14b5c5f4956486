from __future__ import annotations

from headrace.core.breaker import Breaker


def test_the_breaker_doubles_its_wait_and_lets_one_trial_through() -> None:
    breaker = Breaker(limit=2, first=0.5, longest=3.0)
    assert breaker.allow(0.0)
    breaker.failure(0.0)
    assert breaker.allow(0.0), "one failure is none yet"
    breaker.failure(0.0)
    now = 0.0
    for wait in (0.5, 1.0, 2.0, 3.0, 3.0):
        assert breaker.open
        assert not breaker.allow(now + wait - 0.01)
        now += wait
        assert breaker.ready(now)
        assert breaker.allow(now)
        assert not breaker.ready(now)
        assert not breaker.allow(now), "one trial at a time"
        breaker.failure(now)
    assert breaker.allow(now + 3.0)
    breaker.success()
    assert not breaker.open
    assert breaker.allow(now)
    assert breaker.allow(now)
    breaker.failure(now)
    assert breaker.allow(now), "the failures before the success are forgotten"


def test_it_tells_when_a_trial_is_due() -> None:
    breaker = Breaker(first=2.0)
    assert breaker.due(0.0) == 0.0
    breaker.failure(10.0)
    assert (breaker.due(10.5), breaker.due(12.0), breaker.due(20.0)) == (1.5, 0.0, 0.0)
    breaker.success()
    assert breaker.due(11.0) == 0.0
