from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.core import sampler
from headrace.core.plan import Draw
from headrace.core.request import Decay, Sampling
from headrace.core.sampler import (
    BLOCK,
    BROKEN,
    FLOOR,
    Logits,
    Scratch,
    draw,
    is_greedy,
    logprob,
    temperature_at,
    uniform,
)

NONE = float("-inf")
Uniform = Callable[..., None]


def piece(token: int) -> bytes:
    return b"<%d>" % token


def logits_of(values: Sequence[float] | NDArray[Any]) -> Logits:
    """Read-only: the engine's buffer must not be changed."""
    out = np.array(values, dtype=np.float32)
    out.flags.writeable = False
    return out


def token_of(logits: Logits, sampling: Sampling, history: Sequence[int] = (0,), prompt: int = 1) -> int:
    drawn = draw(logits, Draw(sampling, 7, len(history), history, prompt), piece)
    assert drawn.logprobs == ()
    (token,) = drawn.tokens
    return token


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Uniform:
    """Sets the random numbers of the next draw, one an attempt; the last one counts for all further attempts."""

    def set_it(*us: float) -> None:
        monkeypatch.setattr(sampler, "uniform", lambda seed, position, attempt: us[min(attempt, len(us) - 1)])

    return set_it


# --- the distribution


def textbook(logits: Logits, s: Sampling) -> tuple[list[int], list[int], NDArray[np.float64]]:
    """By sorting everything: (ids that are left when only top_p is not applied, ids that are left, all weights).

    Ids come likeliest first, ties by id.
    """
    weights = np.exp((logits - logits.max()) * np.float32(1 / s.temperature)).astype(np.float64)
    ids = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if s.top_k:
        ids = ids[: s.top_k]
    left = ids
    if s.top_p < 1:
        whole = math.fsum(weights[i] for i in ids)
        mass, n = 0.0, 0
        for i in ids:
            mass += weights[i]
            n += 1
            if mass >= s.top_p * whole:
                break
        left = ids[:n]
    if s.min_p:
        ids, left = ([i for i in some if weights[i] >= np.float32(s.min_p) * weights[some[0]]] for some in (ids, left))
    return ids, left, weights


def pick(ids: list[int], left: list[int], weights: NDArray[np.float64], us: Sequence[float]) -> int:
    """Draw among `ids`, in the order of their numbers; if it is not one of `left`, among those before it; and so on."""
    for attempt in itertools.count():
        row = sorted(ids)
        heap = np.cumsum(weights[row])
        u = us[min(attempt, len(us) - 1)]
        token = next(i for i, h in zip(row, heap, strict=True) if h > u * heap[-1])
        if token in left:
            return token
        ids = ids[: ids.index(token)]
    raise AssertionError


def chi_squared(counts: NDArray[Any], want: NDArray[Any]) -> tuple[float, float]:
    """(statistic, what it may be: exceeded by chance about once in 10,000 times), classes below 5 put together."""
    rare = want < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(want[~rare], want[rare].sum())
    if expected[-1] == 0:
        assert seen[-1] == 0, "drew what cannot be drawn"
        seen, expected = seen[:-1], expected[:-1]
    z, freedom = 3.72, len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson and Hilferty, 1931
    return float(((seen - expected) ** 2 / expected).sum()), limit


def shapes() -> dict[str, Logits]:
    rng = np.random.default_rng(11)
    spread = rng.normal(0, 3, 700)
    holes = spread.copy()
    holes[rng.integers(0, 700, 300)] = NONE
    return {
        "spread": logits_of(spread),
        "flat": logits_of(rng.normal(0, 0.01, 700)),
        "peaked": logits_of(np.concatenate([[20.0], rng.normal(0, 1, 699)])),
        "ties": logits_of(rng.integers(-4, 4, 700)),
        "equal": logits_of([2.5] * 700),
        "holes": logits_of(holes),
        "huge": logits_of(rng.choice([-1e4, 0, 1e4], 700)),
    }


SHAPES = shapes()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_numbers_give_the_token_of_a_full_sort(shape: str, at: Uniform) -> None:
    logits = SHAPES[shape]
    rng = random.Random(shape)
    scratch = Scratch(len(logits))
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.05, 0.7, 1.0, 2.0), (0, 2, 40, 699, 700, 9999), (1.0, 0.9999, 0.9, 0.5, 1e-9), (0.0, 1e-5, 0.05, 0.9)
    ):
        s = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        ids, left, weights = textbook(logits, s)
        for u in (0.0, 0.5, rng.random(), rng.random(), 1 - 2**-53):
            us = (u, rng.random(), rng.random(), 1 - 2**-53, 0.5)
            at(*us)
            want = pick(ids, left, weights, us)
            assert token_of(logits, s) == want, (s, us)
            assert draw(logits, Draw(s, 7, 1, (0,), 1), piece, scratch).tokens == (want,), "in used room"


@pytest.mark.parametrize("n", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1])
@pytest.mark.parametrize("s", [Sampling(), Sampling(top_p=0.7), Sampling(min_p=0.2), Sampling(top_k=5, top_p=0.9)])
def test_every_size_of_vocabulary(n: int, s: Sampling, at: Uniform) -> None:
    rng = np.random.default_rng(n)
    for logits in (logits_of(rng.normal(0, 2, n)), logits_of([0.0] * n), logits_of([NONE] * (n - 1) + [3.0])):
        ids, left, weights = textbook(logits, s)
        for u in (0.0, 0.3, 0.6, 1 - 2**-53):
            at(u, 0.4)
            assert token_of(logits, s) == pick(ids, left, weights, (u, 0.4))


@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_temperatures_take_the_likeliest(shape: str, at: Uniform) -> None:
    logits = SHAPES[shape]
    for temperature in (0.0, 1e-9, 1e-5, 1e-4):
        for u in (1e-9, 0.5, 1 - 1e-9):
            at(u)
            token = token_of(logits, Sampling(temperature=temperature))
            assert logits[token] >= logits.max() - 40 * temperature


GREEDY = [Sampling(temperature=0), Sampling(top_k=1), Sampling(top_p=0), Sampling(min_p=1), Sampling(temperature=1e-6)]


@pytest.mark.parametrize("s", GREEDY, ids=repr)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_the_likeliest_with_the_lowest_id(shape: str, s: Sampling, at: Uniform) -> None:
    at(0.999)
    assert is_greedy(s)
    logits = SHAPES[shape]
    assert token_of(logits, s) == np.flatnonzero(logits == logits.max())[0]


def test_sampling_is_not_greedy_by_default() -> None:
    assert not is_greedy(Sampling())
    assert not is_greedy(Sampling(temperature=0.01, top_k=2, top_p=0.01, min_p=0.99))


@pytest.mark.parametrize(
    ("s", "want"),
    [
        (Sampling(), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (Sampling(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(top_p=0.6), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(top_p=0.71), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(min_p=0.45), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(top_k=3, top_p=0.75), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(temperature=0.5, top_p=0.6), [16 / 25, 9 / 25, 0, 0]),
    ],
)
def test_shares_are_the_probabilities(s: Sampling, want: list[float], at: Uniform) -> None:
    logits = logits_of(np.log([0.4, 0.3, 0.2, 0.1]) + 5)
    grid = 2000
    counts = [0] * 4
    for i in range(grid):
        at((i + 0.5) / grid, i * 0.6180339887498949 % 1, i * 0.7548776662466927 % 1)  # spread evenly, each and together
        counts[token_of(logits, s)] += 1
    assert np.abs(np.array(counts) / grid - want).max() <= 5 / grid


def naive_probabilities(logits: NDArray[Any], temperature: float, top_p: float) -> NDArray[np.float64]:
    """Temperature and top_p as they are defined, in float64 and by a full sort."""
    p = np.exp(logits.astype(np.float64) / temperature - float(logits.max()) / temperature)
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -p))
    n = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
    kept = np.zeros(len(p))
    kept[order[:n]] = p[order[:n]] / p[order[:n]].sum()
    return kept


def drawn(logits: Logits, s: Sampling, n: int) -> NDArray[np.int64]:
    """How often each token is drawn at the first n positions of one seed."""
    scratch = Scratch(len(logits))
    counts = np.zeros(len(logits), dtype=np.int64)
    for position in range(n):
        counts[draw(logits, Draw(s, 1234, position, (), 0), piece, scratch).tokens[0]] += 1
    return counts


def skewed() -> dict[str, Logits]:
    rng = np.random.default_rng(5)
    peaks = rng.normal(0, 1, 2000)
    peaks[[7, 1000, 1999]] += [9, 8, 7]
    return {
        "few": logits_of(rng.normal(0, 1.5, 30)),
        "many": logits_of(rng.normal(0, 3, 1500)),
        "flat": logits_of(rng.normal(0, 0.1, 300)),
        "equal": logits_of([1.5] * 301),  # no top_p below ends exactly with a token: rounding would decide
        "peaks": logits_of(peaks),
        "pairs": logits_of(np.repeat(rng.normal(0, 1, 60), 2)),
    }


SKEWED = skewed()
PLAIN = [(1.0, 1.0), (0.7, 0.9), (1.0, 0.95), (1.5, 0.5), (2.0, 0.1), (0.6, 0.02)]


@pytest.mark.parametrize("shape", SKEWED)
@pytest.mark.parametrize(("temperature", "top_p"), PLAIN)
def test_temperature_and_top_p_are_the_textbook_s_by_chi_squared(shape: str, temperature: float, top_p: float) -> None:
    logits, n = SKEWED[shape], 6000
    counts = drawn(logits, Sampling(temperature=temperature, top_p=top_p), n)
    want = naive_probabilities(logits, temperature, top_p)
    if (want > 0).sum() == 1:
        assert counts[want > 0].sum() == n
        return
    statistic, limit = chi_squared(counts, want * n)
    assert statistic < limit


@pytest.mark.parametrize(("temperature", "top_p"), [(1.1, 0.9), (1.0, 0.85), (1.0, 0.95), (0.9, 1.0)])
def test_the_chi_squared_test_sees_what_is_a_little_wrong(temperature: float, top_p: float) -> None:
    logits, n = SKEWED["few"], 6000
    counts = drawn(logits, Sampling(temperature=1.0, top_p=0.9), n)
    want = naive_probabilities(logits, temperature, top_p)
    if ((want == 0) & (counts > 0)).any():
        return  # drew what that other sampling never draws
    statistic, limit = chi_squared(counts, want * n)
    assert statistic > limit


def test_the_chi_squared_test_sees_an_attempt_that_depends_on_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, n = SKEWED["flat"], 6000
    monkeypatch.setattr(sampler, "uniform", lambda seed, position, attempt: uniform(seed, position))
    counts = drawn(logits, Sampling(top_p=0.3), n)
    statistic, limit = chi_squared(counts, naive_probabilities(logits, 1.0, 0.3) * n)
    assert statistic > limit


def test_a_vocabulary_of_128k_by_chi_squared() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0, 3, 131_000)
    values[rng.integers(0, len(values), 6)] += 13
    logits, n = logits_of(values), 1500
    want = naive_probabilities(logits, 0.8, 0.9)
    counts = drawn(logits, Sampling(temperature=0.8, top_p=0.9), n)
    assert counts[want == 0].sum() == 0
    # Classes of about the same mass: likeliest first, and by id.
    for order in (np.argsort(-want), np.arange(len(want))):
        edges = (np.cumsum(want[order]) * 20).astype(int)
        seen, expected = (np.bincount(edges, weights=x[order], minlength=21) for x in (counts, want * n))
        statistic, limit = chi_squared(seen, expected)
        assert statistic < limit


@pytest.mark.parametrize("s", [Sampling(top_k=9), Sampling(min_p=0.05), Sampling(top_k=12, top_p=0.8, min_p=0.02)])
def test_frequencies_follow_the_probabilities(s: Sampling) -> None:
    logits, n = SKEWED["few"], 6000
    _, left, weights = textbook(logits, s)
    want = np.zeros(30)
    want[left] = weights[left] / weights[left].sum() * n
    counts = drawn(logits, s, n)
    assert counts[want == 0].sum() == 0
    statistic, limit = chi_squared(counts, want)
    assert statistic < limit


def test_logits_that_are_no_numbers_give_no_token() -> None:
    rows = ([1.0, math.nan, 2.0], [math.nan] * 3, [NONE] * 3, [1.0, math.inf, 2.0], [NONE, math.nan, 1.0])
    for logits in map(logits_of, rows):
        for s in (
            Sampling(),
            Sampling(top_p=0.5),
            Sampling(top_k=2, min_p=0.5),
            Sampling(temperature=0),
            Sampling(logprobs=2),
            Sampling(temperature=0, logprobs=2, repetition_penalty=1.3, logit_bias=((0, 5.0),)),
        ):
            assert draw(logits, Draw(s, 1, 3, (0, 1, 2), 1), piece) == BROKEN
    assert draw(logits_of([NONE, 3.0, NONE]), Draw(Sampling(), 1, 3, (), 0), piece).tokens == (1,), (
        "some may be ruled out"
    )


def test_a_draw_is_the_same_whenever_it_is_asked_again() -> None:
    logits = SHAPES["spread"]
    first = [token_of(logits, Sampling(), history=range(n)) for n in range(50)]
    assert [token_of(logits, Sampling(), history=range(n)) for n in reversed(range(50))] == first[::-1]
    assert len(set(first)) > 10


def test_the_choice_s_seed_counts_not_the_request_s() -> None:
    logits = SHAPES["flat"]
    tokens = [
        draw(logits, Draw(Sampling(seed=request), choice, 3, (), 0), piece).tokens
        for request in (1, 2)
        for choice in (8, 9)
    ]
    assert tokens[0] == tokens[2] != tokens[1] == tokens[3]


def test_min_p_keeps_what_is_just_as_likely(at: Uniform) -> None:
    at(0.999)
    least = float(np.exp(np.float32(-1)))
    assert token_of(logits_of([0.0, -1.0]), Sampling(min_p=least)) == 1
    assert token_of(logits_of([0.0, -1.001]), Sampling(min_p=least)) == 0


# --- temperature that falls


def test_no_decay_no_change() -> None:
    assert [temperature_at(Sampling(temperature=0.7), i) for i in (0, 1, 10, 10**6)] == [0.7] * 4


def test_the_temperature_falls_in_steps_to_its_floor() -> None:
    s = Sampling(temperature=1.0, decay=Decay(10, 0.95, 0.4))
    assert [temperature_at(s, i) for i in (0, 9, 10, 19, 20)] == [1.0, 1.0, 0.95, 0.95, 0.95**2]
    assert temperature_at(s, 170) == 0.95**17
    assert temperature_at(s, 180) == temperature_at(s, 10**9) == 0.4


def test_the_temperature_never_rises() -> None:
    rng = random.Random(2)
    for _ in range(300):
        decay = Decay(rng.choice([1, 3, 10_000]), rng.choice([5e-324, 0.1, 0.99, 1.0]), rng.choice([0.0, 0.4, 2.0]))
        s = Sampling(temperature=rng.choice([0.0, 1e-6, 0.3, 1.0, 2.0]), decay=decay)
        along = [temperature_at(s, i) for i in (*range(40), 9_999, 10_000, 20_000, 10**7)]
        assert along[0] == s.temperature
        assert along == sorted(along, reverse=True)
        assert along[-1] >= min(s.temperature, decay.floor)
        greedy = [is_greedy(s, i) for i in range(40)]
        assert greedy == sorted(greedy), "once greedy, always greedy"


def test_a_floor_above_the_temperature_does_not_lift_it() -> None:
    assert temperature_at(Sampling(temperature=0.2, decay=Decay(1, 0.5, 1.0)), 50) == 0.2
    assert is_greedy(Sampling(temperature=0.0, decay=Decay(1, 0.5, 1.0)), 50)


def test_a_token_is_drawn_at_the_temperature_of_its_place_in_the_answer() -> None:
    logits = SHAPES["spread"]
    falling = Sampling(decay=Decay(4, 0.5, 0.1), top_p=0.95)
    for prompt, seed in itertools.product((0, 1, 37), range(20)):
        for answered in (0, 3, 4, 8, 11, 100):
            at_this = Sampling(temperature=max(0.1, 0.5 ** (answered // 4)), top_p=0.95)
            here = [
                draw(logits, Draw(s, seed, prompt + answered, range(prompt + answered), prompt), piece)
                for s in (falling, at_this)
            ]
            assert here[0] == here[1]
    late = [draw(logits, Draw(falling, seed, 100, (), 0), piece).tokens for seed in range(40)]
    assert len(set(late)) < len({draw(logits, Draw(falling, seed, 3, (), 0), piece).tokens for seed in range(40)})


def test_a_temperature_that_falls_to_nothing_ends_greedy(at: Uniform) -> None:
    at(0.999)
    s = Sampling(decay=Decay(1, 0.1, 0.0))
    assert not is_greedy(s)
    assert is_greedy(s, 6)
    assert draw(SHAPES["ties"], Draw(s, 1, 406, (), 0), piece).tokens == (int(SHAPES["ties"].argmax()),)


# --- penalties and bias


def naive(logits: Logits, s: Sampling, history: Sequence[int], prompt: int) -> list[float]:
    out = [float(v) for v in logits]
    for token in set(history):
        out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
    for token in history[prompt:]:
        out[token] -= s.frequency_penalty
    for token in set(history[prompt:]):
        out[token] -= s.presence_penalty
    for token, bias in s.logit_bias:
        out[token] += bias if abs(bias) < 100 else math.copysign(1e5, bias)
    return out


def test_penalties_and_bias_are_those_of_a_naive_loop(at: Uniform) -> None:
    for seed in range(1500):
        rng = random.Random(seed)
        logits = logits_of([rng.gauss(0, 2) for _ in range(8)])
        history = [rng.randrange(8) for _ in range(rng.randrange(1, 12))]
        prompt = rng.randint(0, len(history))
        s = Sampling(
            temperature=0.0,
            repetition_penalty=rng.choice([1.0, 1.0, 0.01, 0.8, 1.3, 2.0]),
            presence_penalty=rng.choice([0.0, 0.0, -2.0, 0.5, 2.0]),
            frequency_penalty=rng.choice([0.0, 0.0, -2.0, 0.3, 2.0]),
            logit_bias=tuple((i, rng.uniform(-5, 5)) for i in rng.sample(range(8), rng.choice([0, 0, 3]))),
        )
        want = naive(logits, s, history, prompt)
        best = sorted(want)
        if best[-1] - best[-2] < 1e-4:
            continue  # float32 may see it the other way round
        assert token_of(logits, s, history, prompt) == want.index(best[-1]), seed


def test_penalties_shape_the_distribution_too(at: Uniform) -> None:
    logits = logits_of([1.0, 1.0, 1.0, 1.0])
    s = Sampling(presence_penalty=math.log(2), frequency_penalty=math.log(2), logit_bias=((3, math.log(2)),))
    history = [0, 0, 1, 1, 1, 2]  # the prompt is [0, 0, 1]: 1 was drawn twice, 2 once
    counts = [0] * 4
    for i in range(1000):
        at((i + 0.5) / 1000)
        counts[token_of(logits, s, history, 3)] += 1
    want = np.array([1, 1 / 8, 1 / 4, 2])
    assert np.abs(np.array(counts) / 1000 - want / want.sum()).max() <= 0.001


@pytest.mark.parametrize("shape", SHAPES)
def test_a_bias_of_100_decides(shape: str, at: Uniform) -> None:
    logits = SHAPES[shape]
    wanted = int(np.flatnonzero(np.isfinite(logits))[-1])
    best = int(logits.argmax())
    for temperature in (0.0, 1.0, 2.0):
        for u in (0.0, 0.5, 1 - 2**-53):
            at(u)
            always = Sampling(temperature=temperature, logit_bias=((wanted, 100.0),))
            assert token_of(logits, always) == wanted
            never = Sampling(temperature=temperature, logit_bias=((best, -100.0),))
            assert token_of(logits, never) != best


def test_a_smaller_bias_only_adds() -> None:
    logits = logits_of([0.0, 150.0])
    assert token_of(logits, Sampling(temperature=0, logit_bias=((0, 99.9),))) == 1
    assert token_of(logits, Sampling(temperature=0, logit_bias=((0, 100.0),))) == 0


# --- logprobs


@pytest.mark.parametrize("shape", SHAPES)
def test_logprobs_are_normalised_and_finite(shape: str) -> None:
    logits = SHAPES[shape]
    told = logprob(logits, int(logits.argmax()), len(logits), piece)
    values = [value for _, _, value in told.top]
    assert all(math.isfinite(v) and FLOOR <= v <= 0 for v in values)
    assert math.fsum(map(math.exp, values)) == pytest.approx(1, abs=1e-4)
    assert values == sorted(values, reverse=True)
    assert {i for i, _, _ in told.top} == set(range(len(logits)))
    exact = logits.astype(np.float64) - float(logits.max())
    exact -= math.log(np.exp(exact).sum())
    for i, _, value in told.top:
        assert value == pytest.approx(max(exact[i], FLOOR), abs=1e-3)


def test_the_likeliest_are_told_best_first() -> None:
    logits = logits_of(np.log([0.1, 0.5, 0.15, 0.25]))
    told = logprob(logits, 0, 2, piece)
    assert (told.token, told.piece) == (0, b"<0>")
    assert told.logprob == pytest.approx(math.log(0.1))
    assert [(i, p) for i, p, _ in told.top] == [(1, b"<1>"), (3, b"<3>")]
    assert [v for _, _, v in told.top] == pytest.approx([math.log(0.5), math.log(0.25)])


@pytest.mark.parametrize("n", [1, 5, 20])
@pytest.mark.parametrize("size", [25, BLOCK * 3 + 7, BLOCK * 40])
def test_the_likeliest_of_a_large_vocabulary_are_those_that_sorting_finds(size: int, n: int) -> None:
    rng = np.random.default_rng(size + n)
    for logits in (
        rng.normal(size=size).astype(np.float32) - 30,
        rng.integers(-4, -1, size=size).astype(np.float32),  # many are equal: the lowest ids
        np.where(rng.random(size) < 0.97, -np.inf, rng.normal(size=size)).astype(np.float32),
        np.r_[np.float32(0.0), np.full(size - 1, -np.inf, dtype=np.float32)],
    ):
        logits[0] = max(logits[0], np.float32(-40))
        told = logprob(logits, 0, n, piece)
        assert [i for i, _, _ in told.top] == np.argsort(-logits, kind="stable")[:n].tolist()


@pytest.mark.parametrize("broken", [np.nan, -np.inf, np.inf])
def test_a_broken_row_still_has_alternatives(broken: float) -> None:
    with np.errstate(invalid="ignore"):
        told = logprob(np.full(1000, broken, dtype=np.float32), 3, 5, piece)
    assert len(told.top) == 5


def test_no_alternatives_no_top() -> None:
    assert logprob(SHAPES["spread"], 3, 0, piece).top == ()


def test_impossible_tokens_have_a_floor() -> None:
    assert logprob(logits_of([0.0, NONE]), 1, 2, piece).logprob == FLOOR
    assert logprob(logits_of([0.0, -3e4]), 1, 2, piece).top[1] == (1, b"<1>", FLOOR)


def test_a_certain_token_has_zero() -> None:
    assert logprob(logits_of([1e4, -1e4, -1e4]), 0, 0, piece).logprob == 0.0


@pytest.mark.parametrize("s", [{}, {"temperature": 0.0}, {"temperature": 0.3, "top_k": 3, "logit_bias": ((5, 100.0),)}])
def test_logprobs_are_the_model_s_own(s: dict[str, Any]) -> None:
    logits = SHAPES["spread"]
    drawn = draw(logits, Draw(Sampling(**s, logprobs=4), 7, 1, [0], 1), piece)
    (told,) = drawn.logprobs
    assert told == logprob(logits, drawn.tokens[0], 4, piece)


# --- the random number


def test_seed_0_gives_the_published_numbers_of_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert [uniform(0, i) for i in range(5)] == [(n >> 11) * 2**-53 for n in published]


def test_a_stream_replayed_by_another_release_draws_the_same() -> None:
    assert [uniform(1, 0), uniform(42, 7), uniform(2**63 - 1, 4095)] == [
        0.9557038184179468,
        0.17259965531893207,
        0.24783102183199868,
    ]


def test_the_numbers_fill_the_unit_interval() -> None:
    numbers = np.array([uniform(seed, position) for seed in (0, 1, 2**62) for position in range(4000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    want = len(numbers) / 20
    assert float(((counts - want) ** 2 / want).sum()) < 19 + 4 * math.sqrt(2 * 19)
    assert len(set(numbers)) == len(numbers)


def test_attempts_are_numbers_of_their_own() -> None:
    assert uniform(5, 9, 0) == uniform(5, 9)
    numbers = [uniform(seed, position, attempt) for seed in (0, 1) for position in range(200) for attempt in range(4)]
    assert len(set(numbers)) == len(numbers)
    table = np.zeros((8, 8))
    for position in range(6000):
        table[int(uniform(3, position) * 8), int(uniform(3, position, 1) * 8)] += 1
    want = 6000 / 64
    assert float(((table - want) ** 2 / want).sum()) < 63 + 4 * math.sqrt(2 * 63)


@pytest.mark.parametrize(("seeds", "positions"), [(1, 0), (0, 1), (1, 1), (1, -1), (2**32, 0), (2**62, 3)])
def test_neighbours_are_independent(seeds: int, positions: int) -> None:
    table = np.zeros((8, 8))
    for seed in range(60):
        for position in range(1, 101):
            x, y = uniform(seed, position), uniform(seed + seeds, position + positions)
            table[int(x * 8), int(y * 8)] += 1
    want = 6000 / 64
    assert float(((table - want) ** 2 / want).sum()) < 63 + 4 * math.sqrt(2 * 63)
