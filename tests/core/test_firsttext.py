"""Learning how soon a server speaks."""

from __future__ import annotations

import pytest

from headrace.core.firsttext import FirstText


def test_nothing_is_known_before_something_was_seen() -> None:
    assert FirstText().predict(1000) == 0.0


def test_base_and_rate_are_found() -> None:
    model = FirstText()
    for size in (0, 1000, 5000, 200, 3000):
        model.observe(size, 0.05 + 2e-5 * size)
    assert model.predict(0) == pytest.approx(0.05)
    assert model.predict(20_000) == pytest.approx(0.45)


def test_one_size_gives_no_rate() -> None:
    model = FirstText()
    for _ in range(5):
        model.observe(1000, 0.2)
    assert model.predict(0) == model.predict(10_000) == pytest.approx(0.2)
    only = FirstText()
    only.observe(0, 0.3)
    assert only.predict(500) == pytest.approx(0.3)


def test_neither_rate_nor_base_is_negative() -> None:
    falling = FirstText()
    falling.observe(100, 1.0)
    falling.observe(10_000, 0.1)
    assert falling.predict(0) == falling.predict(50_000) > 0
    steep = FirstText()
    steep.observe(1000, 0.01)
    steep.observe(2000, 1.0)
    assert steep.predict(0) == pytest.approx(0.0)
    assert steep.predict(4000) > steep.predict(2000)


def test_what_is_long_ago_fades() -> None:
    model = FirstText()
    for _ in range(50):
        model.observe(100, 1.0)
    for _ in range(100):
        model.observe(100, 0.1)
    assert model.predict(100) == pytest.approx(0.1, rel=0.1)
