from __future__ import annotations

import numpy as np
import pytest

from headrace_bench.fault import Misuse
from headrace_bench.figures.stats import dispersion
from headrace_bench.load.arrivals import (
    MOST_CV,
    Arrivals,
    Burst,
    Closed,
    Constant,
    Curve,
    Drawn,
    Gamma,
    Poisson,
    Ramp,
    Step,
    Trace,
    at_rate,
    expected,
    following,
    parse,
    text,
    times,
    warming,
)

GIVEN: dict[str, Arrivals] = {
    "constant:4": Constant(4.0),
    "poisson:0.5": Poisson(0.5),
    "soak:2": Poisson(2.0),
    "gamma:4,cv=3": Gamma(4.0, 3.0),
    "gamma:4": Gamma(4.0, 2.0),
    "burst:20,every=5": Burst(20, 5.0),
    "burst:3": Burst(3, 10.0),
    "ramp:1-10": Ramp(1.0, 10.0),
    "step:1,4,2": Step((1.0, 4.0, 2.0)),
    "rate:/d/a.csv,scale=0.1": Curve("/d/a.csv", 0.1),
    "rate:a.csv,time_scale=0.5": Curve("a.csv", 1.0, 0.5),
    "trace:/d/a.csv": Trace("/d/a.csv"),
    "trace:a.csv,time_scale=2,jitter=0": Trace("a.csv", 2.0, None, 0.0),
    "trace:a.csv,rate=3": Trace("a.csv", 1.0, 3.0),
    "closed:8,think=2": Closed(8, 2.0),
    "closed:1": Closed(1),
}


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_given_is_read(given: str) -> None:
    assert parse(given) == GIVEN[given]


@pytest.mark.parametrize("given", GIVEN)
def test_its_words_make_it_again(given: str) -> None:
    assert parse(text(GIVEN[given])) == GIVEN[given]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "nothing is not a kind; choose from constant, poisson"),
        ("poison:2", "poison is not a kind"),
        ("poisson", "a rate, requests per second, has to be a number"),
        ("poisson:0", "more than 0"),
        ("poisson:-1", "more than 0"),
        ("poisson:nan", "more than 0"),
        ("poisson:2,cv=1", "cv is not known here"),
        ("constant:2,3", "has to be a number, not '2,3'"),
        ("gamma:2,cv=0", "cv has to be more than 0"),
        ("gamma:2,cv=21", "cv has to be at most 20, not 21"),
        ("ramp:5", "ramp:1-10"),
        ("ramp:1-", "has to be a number"),
        ("step:1,,2", "has to be a number"),
        ("burst:2.5", "whole number"),
        ("closed:0", "at least 1"),
        ("closed:2,think=-1", "at least 0"),
        ("trace:", "which file"),
        ("trace:a.csv,rate=1,time_scale=2", "give one of them"),
        ("trace:a.csv,jitter=-1", "at least 0"),
        ("rate:a.csv,rate=2", "rate is not known here; this kind takes scale, time_scale"),
    ],
)
def test_nonsense_is_one_clear_line(given: str, why: str) -> None:
    with pytest.raises(Misuse) as told:
        parse(given)
    assert f"--arrivals {given}: " in str(told.value) or not given
    assert why in str(told.value)


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_constant_is_even() -> None:
    assert times(Constant(4.0), rng(), 1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert len(times(Constant(0.1), rng(), 30.0)) == 3
    assert len(times(Constant(500.0), rng(), 60.0)) == 30_000


def test_bursts() -> None:
    assert times(Burst(2, 10.0), rng(), 25.0).tolist() == [0.0, 0.0, 10.0, 10.0, 20.0, 20.0]


@pytest.mark.parametrize("given", [Poisson(50.0), Gamma(50.0, 2.0), Ramp(10.0, 90.0), Step((20.0, 80.0))])
def test_drawn_times_are_sorted_in_the_window_and_of_their_seed(given: Drawn) -> None:
    found = times(given, rng(), 100.0)
    assert (np.diff(found) >= 0).all()
    assert found[0] >= 0
    assert found[-1] < 100.0
    assert times(given, rng(), 100.0).tolist() == found.tolist()
    assert times(given, rng(2), 100.0).tolist() != found.tolist()
    # 5,000 are meant; the deviation of a count is cv * sqrt(5,000), at most 141
    assert abs(len(found) - 5000) < 600


def test_poisson_has_gaps_as_wide_as_their_mean_and_an_index_of_one() -> None:
    found = times(Poisson(100.0), rng(), 400.0)
    gaps = np.diff(found)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.03)
    assert dispersion(found.tolist(), 1.0, 0.0, 400.0) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_has_the_variation_asked_for(cv: float) -> None:
    gaps = np.diff(times(Gamma(100.0, cv), rng(), 1000.0))
    assert gaps.mean() == pytest.approx(0.01, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_the_widest_gamma_there_is_has_an_end() -> None:
    found = times(Gamma(50.0, MOST_CV), rng(), 100.0)
    assert len(found) == 0 or found[-1] < 100.0


@pytest.mark.parametrize("given", [Constant(50.0), Poisson(50.0), Burst(25, 0.5), Ramp(10.0, 90.0), Step((20.0, 80.0))])
def test_how_many_are_expected(given: Drawn) -> None:
    assert expected(given, 100.0) == pytest.approx(5000)
    assert abs(len(times(given, rng(), 100.0)) - 5000) < 300


def test_a_ramp_grows_and_steps_stand() -> None:
    ramp = times(Ramp(0.0001, 100.0), rng(), 100.0)
    assert (ramp < 50).sum() / len(ramp) == pytest.approx(0.25, abs=0.03)
    found = times(Step((10.0, 40.0, 20.0)), rng(), 300.0)
    counts = np.histogram(found, bins=[0, 100, 200, 300])[0]
    assert counts.tolist() == pytest.approx([1000, 4000, 2000], rel=0.1)


def test_nothing_comes_while_the_rate_is_nothing() -> None:
    found = following(rng(), (0.0, 10.0, 20.0, 30.0), (50.0, 0.0, 50.0))
    assert not ((found >= 10) & (found < 20)).any()
    assert np.histogram(found, bins=[0, 10, 20, 30])[0].tolist() == pytest.approx([500, 0, 500], abs=100)
    assert following(rng(), (0.0, 10.0), (0.0,)).size == 0


@pytest.mark.parametrize(
    ("given", "before"),
    [(Ramp(1.0, 9.0), Poisson(1.0)), (Step((3.0, 9.0)), Poisson(3.0)), (Gamma(2.0, 3.0), Gamma(2.0, 3.0))],
)
def test_the_warm_up_is_what_the_window_begins_with(given: Drawn, before: Drawn) -> None:
    assert warming(given) == before


@pytest.mark.parametrize(
    ("given", "there"),
    [
        (Constant(1.0), Constant(6.0)),
        (Poisson(1.0), Poisson(6.0)),
        (Gamma(1.0, 3.0), Gamma(6.0, 3.0)),
        (Burst(12, 10.0), Burst(12, 2.0)),
        (Ramp(1.0, 3.0), Ramp(3.0, 9.0)),
        (Step((1.0, 2.0, 3.0)), Step((3.0, 6.0, 9.0))),
        (Trace("a", 2.0, None, 0.0), Trace("a", 1.0, 6.0, 0.0)),
    ],
)
def test_a_shape_at_another_rate(given: Arrivals, there: Arrivals) -> None:
    assert at_rate(given, 6.0) == there


@pytest.mark.parametrize("given", [Closed(3), Curve("a")])
def test_what_has_no_rate_cannot_be_set_to_one(given: Arrivals) -> None:
    with pytest.raises(Misuse, match="cannot be set to a rate"):
        at_rate(given, 6.0)
