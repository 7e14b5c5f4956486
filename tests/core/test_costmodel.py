from __future__ import annotations

import random

import pytest

from headrace.core.attention import TILE, Attention
from headrace.core.costmodel import GROUP, PRIOR, TERMS, CostModel, Work, positions

TRUE = (2e-3, 2.85e-3, 0.0, 3.9e-3, 1.4e-6, 2.6e-6, 5e-9)


def some_work(rng: random.Random) -> Work:
    prefill = rng.choice([0, 0, 8, 16, 32, 60, 64, 128, 256])
    decode = rng.randrange(0 if prefill else 1, 9)
    back = positions(rng.randrange(1500), prefill) + sum(rng.randrange(1500) for _ in range(decode))
    return Work(prefill, decode, back, rng.randrange(100, 8000))


def taught(steps: int, *, noise: float = 0.0, seed: int = 1) -> CostModel:
    rng, model, truth = random.Random(seed), CostModel(), CostModel(TRUE)
    for _ in range(steps):
        work = some_work(rng)
        model.observe(work, truth.predict(work) * rng.uniform(1 - noise, 1 + noise))
    return model


def test_positions_are_summed() -> None:
    assert positions(10, 3) == 10 + 11 + 12
    assert positions(5, 0) == 0


def test_attention_is_dearer_below_a_tile() -> None:
    below, tile = Work(TILE - 1, 0, 100_000, 0), Work(TILE - 1, 1, 100_000, 0)
    assert below.terms(Attention())[TERMS.index("tiles")] == 0
    assert tile.terms(Attention())[TERMS.index("rowwise")] == 0
    model = CostModel(TRUE)
    assert model.predict(tile) < model.predict(below)


def test_it_learns_what_steps_take() -> None:
    model, truth, rng = taught(200), CostModel(TRUE), random.Random(2)
    for _ in range(100):
        work = some_work(rng)
        assert model.predict(work) == pytest.approx(truth.predict(work), rel=0.03)


def test_noise_does_not_mislead_it() -> None:
    model, truth, rng = taught(400, noise=0.1), CostModel(TRUE), random.Random(2)
    errors = sorted(abs(model.predict(work) / truth.predict(work) - 1) for work in (some_work(rng) for _ in range(200)))
    assert errors[100] < 0.05
    assert errors[190] < 0.15
    assert 0.02 < model.error(0.5) < 0.1
    assert model.error(0.5) <= model.error(0.95)


def test_coefficients_are_never_negative() -> None:
    rng, model = random.Random(3), CostModel()
    for _ in range(500):
        model.observe(some_work(rng), rng.uniform(1e-4, 1.0))
        assert min(model.coefficients) >= 0.0
        assert model.predict(some_work(rng)) >= 0.0


def test_a_hiccup_is_soon_forgotten() -> None:
    model = taught(200)
    decode = Work(0, 1, 100, 500)
    before = model.predict(decode)
    model.observe(decode, 5.0)
    assert model.predict(decode) < 2.5 * before
    for _ in range(10):
        model.observe(decode, before)
    assert model.predict(decode) == pytest.approx(before, rel=0.15)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    model, rng, slower = taught(200), random.Random(5), CostModel(tuple(1.5 * c for c in TRUE))
    for _ in range(120):
        work = some_work(rng)
        model.observe(work, slower.predict(work))
    work = Work(64, 4, 30_000, 2000)
    assert model.predict(work) == pytest.approx(slower.predict(work), rel=0.1)


def test_what_no_step_shows_is_not_unlearned() -> None:
    """Thousands of equal decodes say nothing about prompts: the next prompt must be judged as before."""
    model = taught(200)
    prompt = Work(128, 0, 60_000, 1000)
    before = model.predict(prompt)
    decode = Work(0, 1, 300, 500)
    for _ in range(5000):
        model.observe(decode, CostModel(TRUE).predict(decode))
    assert model.predict(prompt) == pytest.approx(before, rel=0.2)
    model.observe(prompt, before)
    assert model.predict(prompt) == pytest.approx(before, rel=0.05)


def test_saved_coefficients_are_trusted() -> None:
    model = CostModel(TRUE, sure=True)
    work = Work(64, 0, 2016, 64)
    assert model.predict(work) == CostModel(TRUE).predict(work)
    model.observe(work, 3 * model.predict(work))
    unsure = CostModel(TRUE)
    unsure.observe(work, 3 * unsure.predict(work))
    assert model.predict(work) < unsure.predict(work)


def test_prefill_is_judged_at_the_efficient_size() -> None:
    model = CostModel(TRUE)
    assert model.prefill(0, 100) == pytest.approx(100 * TRUE[1] + 4950 * TRUE[4])
    assert model.prefill(1000, 100) > model.prefill(0, 100)
    assert model.prefill(1000, 0) == 0


def test_it_knows_nothing_of_its_error_before_the_first_step() -> None:
    model = CostModel()
    assert model.error(0.5) == model.error(0.95) == 0.0
    assert model.coefficients == PRIOR
    assert "error 0%" in repr(model)


def test_no_step_is_ever_predicted_to_cost_nothing() -> None:
    """These made the fixed cost and that of a decode 0."""
    cost = CostModel((5e-3, 2e-4, 0.0, 1e-3, 0.0, 0.0, 0.0))
    steps = [(9, 0, 0.005), (9, 0, 0.01), (15, 1, 0.04), (9, 0, 0.02), (9, 0, 0.005), (9, 0, 0.02), (9, 1, 0.0075)]
    rng = random.Random(1)
    for _ in range(300):
        prefill, decode, seconds = rng.choice([*steps, (6, 1, 0.025), (7, 1, 0.005)])
        cost.observe(Work(prefill, decode, 100, 30), seconds)
        assert cost.predict(Work(0, 1, 10, 10)) > 0.0
    assert CostModel((0.0,) * 7).predict(Work(0, 1, 10, 10)) > 0.0


def test_padding_is_computed_and_looks_at_nothing() -> None:
    attention = Attention(heads=9, threads=2, pads=True)
    model = CostModel((0.0, 1e-3, 0.0, 0.0, 1e-6, 1e-5, 0.0), attention=attention)
    padded = Work(20, 0, positions(1000, 20), 0, pad=44)
    back = attention.share(TILE, 20) * positions(1000, 20)
    assert model.predict(padded) == pytest.approx(1e-6 + 64e-3 + 1e-6 * back)
    assert padded.terms(attention)[1] == 64


def test_what_a_padded_step_took_teaches_the_cost_of_tiles() -> None:
    attention = Attention(heads=9, threads=2, pads=True)
    truth = CostModel(TRUE, attention=attention)
    model = CostModel((*TRUE[:4], TRUE[4] / 3, *TRUE[5:]), attention=attention)
    work = Work(20, 3, positions(1200, 20) + 300, 2000, 300, 41)
    for _ in range(60):
        model.observe(work, truth.predict(work))
    assert model.predict(work) == pytest.approx(truth.predict(work), rel=0.05)


def test_being_late_is_known_at_once_and_forgotten() -> None:
    model, truth = taught(100), CostModel(TRUE)
    assert model.late == pytest.approx(1.0, abs=0.05)
    work = Work(32, 3, 30_000, 1000)
    model.observe(work, 1.4 * truth.predict(work))
    assert 1.05 < model.late < 1.2
    before = model.late
    model.observe(Work(0, 3, 300, 1000), 5 * truth.predict(Work(0, 3, 300, 1000)))
    assert model.late == before, "readers alone are not what is decided on"
    for _ in range(20):
        model.observe(work, truth.predict(work))
    assert model.late < 1.02
    model.observe(work, 0.2 * truth.predict(work))
    assert model.late == 1.0, "to be early is no reason to be long"


def test_rows_of_no_whole_group_are_counted_for_each_batch() -> None:
    assert [Work(n).loose for n in (1, 15, GROUP, GROUP + 1, 4 * GROUP)] == [1, 15, 0, 1, 0]
    assert Work(13, 3).loose == 0
    assert Work(13, 3, split=True).loose == 16
    assert Work(13, pad=3).loose == 0
    model = CostModel((0.0, 1e-3, 5e-3, 0.0, 0.0, 0.0, 0.0))
    assert model.per_loose == 5e-3
    assert model.predict(Work(15)) == pytest.approx(15e-3 + 75e-3, rel=1e-3)
    assert model.predict(Work(16)) == pytest.approx(16e-3, rel=1e-3)


def test_what_a_whole_group_saves_is_learned_from_a_start_s_steps() -> None:
    """Figures of a 1B model with K-quants (Q4_K_M) on two cores of an EPYC, ms by rows."""
    measured = {1: 16.6, 12: 138, 16: 138.6, 24: 221, 32: 251, 64: 449, 96: 707}
    model = CostModel()
    for rows in (16, 1, 12, 1, 64, 1, 32, 1, 24, 1, 96, 1):  # as `engines.calibration` does
        work = Work(rows, 0, positions(0, rows), rows) if rows > 1 else Work(0, 1, 0, 1)
        model.observe(work, measured[rows] / 1e3)
    for rows, ms in measured.items():
        work = Work(rows, 0, positions(0, rows), rows) if rows > 1 else Work(0, 1, 0, 1)
        assert model.predict(work) * 1e3 == pytest.approx(ms, rel=0.15)
    assert model.predict(Work(16)) < model.predict(Work(15)) < 1.6 * model.predict(Work(16))
