from __future__ import annotations

import pytest

from headrace.gateway.backend import End
from headrace.gateway.health import FAILURES, STALE_S, Health


def attempt(health: Health, end: End, now: float) -> bool:
    trial = health.begin(now)
    health.end(end, now, trial=trial)
    return trial


def broken(now: float = 0.0, end: End = "failed") -> Health:
    health = Health()
    for _ in range(FAILURES):
        assert not health.open
        attempt(health, end, now)
    assert health.open
    return health


@pytest.mark.parametrize("end", ["failed", "slow"])
def test_failures_in_a_row_open_it(end: End) -> None:
    health = broken(end=end)
    assert health.reason == {"failed": "its requests failed", "slow": "it gave no text in time"}[end]
    assert not health.ready(0.5)
    assert health.retry_after(0.25) == 0.75
    assert health.ready(1.0)
    assert health.retry_after(1.5) == 0.0


def test_a_success_in_between_starts_the_count_again() -> None:
    health = Health()
    for end in ("failed", "failed", "ok", "failed", "failed"):
        attempt(health, end, 0.0)
    assert not health.open


def test_what_the_client_did_says_nothing() -> None:
    health = Health()
    for end in ("failed", "refused", "cancelled", "failed", "refused") * 2:
        attempt(health, end, 0.0)
    assert health.open, "four failures, and nothing between them that speaks for it"
    health = Health()
    for end in ("refused", "cancelled") * 10:
        attempt(health, end, 0.0)  # type: ignore[arg-type]
    assert not health.open


def test_one_trial_at_a_time_decides() -> None:
    health = broken()
    assert health.begin(1.0), "the trial"
    assert not health.ready(1.0)
    assert not health.begin(1.0), "another one is none"
    health.end("ok", 1.1, trial=False)
    assert health.open, "only the trial counts"
    health.end("ok", 1.2, trial=True)
    assert not health.open
    assert health.reason == ""


def test_a_failed_trial_doubles_the_wait() -> None:
    health = broken()
    assert attempt(health, "failed", 1.0)
    assert not health.ready(2.9)
    assert health.ready(3.0)


def test_a_trial_that_was_cancelled_makes_way_for_the_next() -> None:
    health = broken()
    assert attempt(health, "cancelled", 1.0)
    assert health.ready(1.0)
    assert attempt(health, "refused", 1.0)
    assert health.begin(1.0)


def test_the_first_text_of_a_trial_is_enough() -> None:
    health = broken()
    trial = health.begin(1.0)
    health.first_text(0.2, 1.2, trial=trial)
    assert not health.open
    assert health.ready(1.2)
    health.end("failed", 9.0, trial=trial)
    assert not health.open, "one failure"


def test_many_streams_that_fail_at_once_open_it_once() -> None:
    health = Health()
    trials = [health.begin(0.0) for _ in range(20)]
    assert trials == [False] * 20
    for trial in trials:
        health.end("failed", 0.0, trial=trial)
    assert health.in_flight == 0
    assert health.retry_after(0.0) == 1.0, "not a wait that doubled seventeen times"


def test_the_average_follows_and_grows_stale() -> None:
    health = Health()
    assert health.ttft(0.0) == 0.0
    health.first_text(1.0, 0.0, trial=False)
    assert health.ttft(1.0) == 1.0
    health.first_text(2.0, 1.0, trial=False)
    assert health.ttft(1.0) == pytest.approx(1.2)
    assert health.ttft(1.0 + STALE_S) == pytest.approx(1.2)
    assert health.ttft(1.1 + STALE_S) == 0.0
    health.first_text(5.0, 100.0, trial=False)
    assert health.ttft(100.0) == 5.0, "what is stale is forgotten"


def test_a_probe_tells_when_it_is_away_and_when_it_is_back() -> None:
    health = broken()
    health.probed("no answer")
    assert health.down == "no answer"
    health.probed("")
    assert health.down == ""
    assert not health.open, "what failed while it was away says nothing of now"


def test_a_probe_that_was_never_amiss_closes_nothing() -> None:
    health = broken()
    health.probed("")
    assert health.open, "it answers probes and fails requests"
