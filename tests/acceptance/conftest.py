"""Fixtures of the acceptance cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acceptance.tiny import Tiny, tinies


@pytest.fixture(scope="session")
def tiny(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tiny]]:
    """TINY: `tiny(engine_slots=1)` is a running server with those settings, started once and then shared."""
    with tinies(demo_model, tmp_path_factory.mktemp("tiny")) as start:
        yield start
