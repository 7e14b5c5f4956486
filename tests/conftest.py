"""Fixtures for all tests: the demo model, and the real engine with it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before the engine's library is loaded, which reads it once: tests share their cores with other work, and compute
# threads that wait busily for each other then take many times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from headrace.config import cache_home
from headrace.core.errors import StartupError
from headrace.engines.llama import LlamaEngine, LlamaSettings
from headrace.models import Store


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's file, fetched if it is not there yet."""
    try:
        return Store(cache_home() / "models").resolve("smollm2-135m")
    except StartupError as error:
        pytest.fail(f"these tests need the demo model: {error.message}", pytrace=False)


@pytest.fixture(scope="session")
def loaded_engine(demo_model: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine(LlamaSettings(demo_model, "demo", cells=2048, slots=16, batch=256), time.monotonic)
    yield engine
    engine.close()


@pytest.fixture
def model_engine(loaded_engine: LlamaEngine) -> Iterator[LlamaEngine]:
    """The real engine, loaded once; each test finds and leaves it empty."""
    yield loaded_engine
    for slot in range(loaded_engine.n_slots):
        loaded_engine.trim(slot, 0)
