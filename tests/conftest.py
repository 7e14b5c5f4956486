"""Fixtures for all tests: the demo model, the real engine with it, and a real Redis."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before the engine's library is loaded, which reads it once: tests share their cores with other work, and compute
# threads that wait busily for each other then take many times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from headrace.config import cache_home
from headrace.core.errors import StartupError
from headrace.engines.llama import LlamaEngine, LlamaSettings
from headrace.models import Store
from redis_server import RedisServer, redis_or_skip


def _own_cache() -> None:
    """A cache directory for this run, with the models of the real one: what other runs and servers kept of KV would
    make cold prompts warm, and what these keep is no business of theirs."""
    models = cache_home() / "models"
    models.mkdir(parents=True, exist_ok=True)
    home = tempfile.mkdtemp(prefix="headrace-tests-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    (Path(home) / "headrace").mkdir()
    (Path(home) / "headrace" / "models").symlink_to(models)
    os.environ["XDG_CACHE_HOME"] = home
    # Nor are the keys, templates and books of whoever runs the tests any business of theirs.
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        os.environ[name] = str(Path(home) / name)


_own_cache()
# Nor is any of their servers' twenty seconds: who wants to see a file measured asks for it.
os.environ["HEADRACE_MODEL_MEASURE"] = "false"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's file, fetched if it is not there yet."""
    try:
        return Store(cache_home() / "models").resolve("smollm2-135m")
    except StartupError as error:
        pytest.fail(f"these tests need the demo model: {error.message}", pytrace=False)


@pytest.fixture(scope="session")
def window_model() -> Path:
    """A model with sliding-window layers and a large vocabulary: Gemma 3 270M, without a chat template. Whoever runs
    these tests fetches it under Google's terms (https://ai.google.dev/gemma/terms)."""
    try:
        return Store(cache_home() / "models", accept_terms=True).resolve("gemma3-270m")
    except StartupError as error:
        pytest.fail(f"these tests need gemma3-270m: {error.message}", pytrace=False)


@pytest.fixture(scope="session")
def loaded_engine(demo_model: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine(LlamaSettings(demo_model, "demo", cells=2048, slots=16, batch=256, drafts=32), time.monotonic)
    yield engine
    engine.close()


@pytest.fixture
def model_engine(loaded_engine: LlamaEngine) -> Iterator[LlamaEngine]:
    """The real engine, loaded once; each test finds and leaves it empty."""
    yield loaded_engine
    for slot in range(loaded_engine.n_slots):
        loaded_engine.trim(slot, 0)


@pytest.fixture
def make_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Makes servers with the given options, not started yet; they are stopped after the test."""
    program, made = redis_or_skip(), list[RedisServer]()

    def make(*options: str) -> RedisServer:
        made.append(RedisServer(program, tmp_path, *options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def redis_server(make_redis: Callable[..., RedisServer]) -> RedisServer:
    """One that runs."""
    server = make_redis()
    server.start()
    return server


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, here and in what is started here, also where whoever started the tests ignores it: a shell
    does so for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
