from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from headrace_bench.figures.search import Ask, End, Goal, Outcome, ask, bounds, hopeless, judge, start, told

Curve = Callable[[float], float]


@dataclass
class Server:
    """Answers points: a share of good ones that falls with the load."""

    curve: Curve
    rng: np.random.Generator | None = None
    """None: without noise."""
    invalid: Callable[[Ask], bool] = lambda point: False
    growing: Callable[[float], bool] = lambda load: False
    asked: list[Ask] = field(default_factory=list)

    def answer(self, point: Ask) -> Outcome:
        self.asked.append(point)
        n = max(1, int(point.load * point.seconds))
        share = self.curve(point.load)
        good = round(n * share) if self.rng is None else int(self.rng.binomial(n, share))
        return Outcome(good, n, self.growing(point.load), self.invalid(point), point.seconds)


def searched(goal: Goal, server: Server) -> End:
    state = start(goal)
    for _ in range(1000):
        following = ask(state)
        if isinstance(following, End):
            return following
        state = told(state, server.answer(following))
    raise AssertionError("it never ends")


def falls(at: float, steep: float = 40.0, best: float = 1.0) -> Curve:
    """Crosses half of `best` at `at`; within 8 % of it for steep 40."""
    return lambda load: best / (1 + (load / at) ** steep)


def step(at: float) -> Curve:
    return lambda load: 1.0 if load <= at else 0.0


PATIENT = Goal(target=0.95, limit=math.inf)


@pytest.mark.parametrize("at", [0.3, 1.0, 1.04, 7.7, 63.9, 64.0, 1000.0])
def test_it_finds_the_edge_within_five_percent_and_never_above(at: float) -> None:
    server = Server(step(at))
    end = searched(PATIENT, server)
    assert (end.why, end.confirmed, end.because) == ("confirmed", True, "refused")
    assert end.met is not None
    assert end.unmet is not None
    assert end.met <= at < end.unmet <= end.met * 1.05 + 1e-9
    assert server.asked[-1].purpose == "confirm"
    assert server.asked[-1].draw not in {point.draw for point in server.asked[:-1]}
    assert len(server.asked) < 20


@pytest.mark.parametrize("seed", range(60))
def test_random_falling_curves_with_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target = float(rng.choice([0.9, 0.95, 0.99]))
    at = float(np.exp(rng.uniform(-1, 5)))
    curve = falls(at, float(rng.uniform(20, 80)), float(rng.uniform(max(0.9, target - 0.02), 1.0)))
    goal = Goal(target=target, limit=float(rng.choice([300.0, 3000.0, math.inf])), seconds=30.0, overhead=5.0)
    bad = {int(n) for n in rng.integers(0, 40, 3)}
    server = Server(curve, rng)
    server.invalid = lambda point: len(server.asked) in bad
    end = searched(goal, server)
    assert sum(point.seconds for point in server.asked) <= goal.limit
    assert len(server.asked) <= goal.points
    if end.met is not None and end.confirmed:
        assert curve(end.met) >= target - 0.02, "what was confirmed is what the server does, but for chance"
    if end.why == "confirmed" and end.unmet is not None and end.met is not None:
        assert end.unmet <= end.met * 1.05 + 1e-9


def test_with_noise_it_comes_close_and_is_seldom_above() -> None:
    close, above, proven = 0, 0, 0
    for seed in range(100):
        server = Server(falls(20.0, 60.0), np.random.default_rng(seed))
        end = searched(PATIENT, server)
        edge = 20.0 * (1 / 0.95 - 1) ** (1 / 60)
        assert end.met is not None
        proven += end.confirmed
        above += end.met > edge
        close += abs(end.met / edge - 1) <= 0.05
    assert proven >= 98
    assert above <= 10
    assert close >= 90


def test_backlog_that_grows_is_not_met_whatever_was_attained() -> None:
    server = Server(step(1e9))
    server.growing = lambda load: load > 5.0
    end = searched(PATIENT, server)
    assert end.met is not None
    assert end.met <= 5.0 < end.met * 1.05
    assert judge(PATIENT, 100, 100, growing=True) == "not met"


def test_between_the_bounds_it_is_measured_longer_and_then_is_unproven() -> None:
    server = Server(lambda load: 0.95 if load > 3 else 1.0)
    end = searched(PATIENT, server)
    assert end.because == "unproven"
    assert end.met is not None
    assert end.met <= 3
    at_four = [point for point in server.asked if point.load == 4.0]
    assert [point.purpose for point in at_four] == ["search", "again", "again"]
    assert [point.seconds for point in at_four] == pytest.approx([30.0, 30.0, 60.0], rel=0.01)
    assert len({point.draw for point in at_four}) == 3


def test_an_invalid_point_is_repeated_once_and_does_not_count() -> None:
    server = Server(step(10.0))
    server.invalid = lambda point: len(server.asked) == 1
    end = searched(PATIENT, server)
    assert [point.load for point in server.asked[:2]] == [1.0, 1.0]
    assert end.met == pytest.approx(10.0, rel=0.05)


def test_where_the_client_cannot_go_the_search_goes_below_and_says_so() -> None:
    server = Server(step(1e9))
    server.invalid = lambda point: point.load > 6
    end = searched(PATIENT, server)
    assert (end.why, end.because) == ("confirmed", "unmeasurable")
    assert end.met == pytest.approx(6.0, rel=0.05)


def test_a_winner_that_is_not_confirmed_is_one_no_more() -> None:
    server = Server(step(10.0))
    refused: list[float] = []

    def growing(load: float) -> bool:
        if server.asked[-1].purpose == "confirm" and not refused:
            refused.append(load)
            return True
        return load in refused

    server.growing = growing
    end = searched(PATIENT, server)
    assert end.confirmed
    assert end.met is not None
    assert end.met < refused[0]
    assert end.unmet == refused[0]


def test_nothing_is_met_by_a_server_that_is_always_late() -> None:
    server = Server(lambda load: 0.0)
    end = searched(PATIENT, server)
    assert (end.why, end.met, end.confirmed) == ("none", None, False)
    assert len(server.asked) <= 11


def test_it_stops_at_the_highest_that_is_asked_for() -> None:
    end = searched(Goal(target=0.9, low=2.0, high=9.0), Server(step(100.0)))
    assert (end.why, end.met, end.unmet, end.confirmed) == ("top", 9.0, None, True)


def test_time_that_runs_out_leaves_what_was_met() -> None:
    server = Server(step(1000.0))
    end = searched(Goal(target=0.95, limit=320.0, overhead=10.0), server)
    assert (end.why, end.confirmed, end.because) == ("limit", False, None)
    assert end.met == server.asked[-1].load


@pytest.mark.parametrize("most", [1, 2, 3, 16, 17, 40])
def test_users_are_whole(most: int) -> None:
    goal = Goal(target=0.95, low=1.0, whole=True, seconds=1000.0, limit=math.inf)
    server = Server(step(float(most)))
    end = searched(goal, server)
    assert all(point.load == int(point.load) for point in server.asked)
    assert end.met is not None
    assert end.unmet is not None
    assert end.met <= most < end.unmet
    assert end.unmet - end.met == 1 or end.unmet <= end.met * 1.05
    assert searched(goal, Server(lambda load: 0.0)).why == "none"


def test_a_slow_load_is_measured_as_long_as_a_proof_takes() -> None:
    for target, least in ((0.9, 34.6), (0.95, 73.0), (0.99, 380.3)):
        goal = Goal(target=target)
        assert goal.seconds_at(1.0) == pytest.approx(1.5 * least, rel=0.01)
        assert goal.seconds_at(1000.0) == 30.0
        n = math.ceil(least)
        assert judge(goal, n, n, growing=False) == "met"
        assert judge(goal, n - 2, n - 2, growing=False) == "unsure"


def test_bounds_are_wilsons() -> None:
    assert bounds(400, 412, 1.959964) == pytest.approx((0.9498, 0.9833), abs=2e-4)
    assert bounds(0, 0, 1.96) == (0.0, 1.0)
    assert bounds(10, 10, 1.96)[1] == 1.0
    assert bounds(0, 10, 1.96)[0] == 0.0


def test_a_point_is_hopeless_only_if_all_the_rest_being_good_would_not_help() -> None:
    goal = Goal(target=0.95)
    for bad in range(60):
        if hopeless(goal, bad, 200):
            assert judge(goal, 200 - bad, 200, growing=False) == "not met"
        else:
            assert judge(goal, 200 - bad, 200, growing=False) != "not met"
    assert hopeless(goal, 30, 200)
    assert not hopeless(goal, 30, 200, earlier=(1000, 1000))
    assert not hopeless(goal, 0, 0)
