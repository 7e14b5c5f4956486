"""OC-45 to OC-48: KV outside the pool costs no answer, whatever becomes of it.

What needs a file system that fails at a chosen call, a process killed in the middle of a write, or minutes of waiting,
is in tests/kv: test_disk, test_store and test_shared.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from acceptance.asking import on_loop
from acceptance.tiered import Served, answering, cached
from headrace.assembly import make_engine
from headrace.settings import MIB, Config, Engine, Model, Optimizations, Templates, Tiers
from redis_server import RedisServer, free_port
from server.socket_client import until

pytestmark = pytest.mark.real

# Texts whose continuation is beyond doubt: rounding depends on a batch's shape, but cannot change the likeliest token.
P = " ".join(["The lighthouse stands on a rock."] * 20)
OTHERS = [" ".join([word, "wind"] * 12) for word in ("rain", "snow", "sun")]
LONG = " ".join(f"{i}," for i in range(1, 100))
"""More than a full block: what goes to Redis."""


@contextlib.asynccontextmanager
async def served(path: Path, tiers: Tiers, *, on: bool = True) -> AsyncIterator[Served]:
    # One thread: see `tiny`. Fixed chunks: nothing has to be measured first.
    config = dataclasses.replace(
        Config(),
        model=Model(str(path), "tiny"),
        engine=Engine(in_process=True, threads=1, threads_batch=1, cells=1024),
        optimizations=Optimizations(adaptive_chunks=False, tiers=on),
        tiers=tiers,
        templates=Templates(budget=0),
    )
    async with answering(config, make_engine(config)) as server:
        yield server


def on_disk(directory: Path, ssd_mib: int = 64) -> Tiers:
    return Tiers(ram_mib=64, ssd_mib=ssd_mib, ssd_path=str(directory), min_tokens=16)


def size_of(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def names(path: Path, suffix: str) -> list[str]:
    return [file.name for file in path.iterdir() if file.suffix == suffix]


# --- OC-45


@pytest.fixture(scope="module")
def saved(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory with the KV of P, and the texts after P and the others without any cache."""
    directory = tmp_path_factory.mktemp("kv")
    texts: list[str] = []

    @on_loop
    async def save() -> None:
        async with served(demo_model, on_disk(directory)) as server:
            answers = [await server.ask(prompt) for prompt in (P, *OTHERS)]
            texts.extend(answer.text for answer in answers)
            assert [cached(answer) for answer in answers] == [0] * 4

    save()
    for file in sorted(directory.glob("*.kv"), key=lambda file: file.stat().st_size)[:-1]:
        file.unlink()  # the others'
    return directory, texts


def flip(at: float) -> Callable[[Path], None]:
    def act(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(at * len(data))] ^= 1
        file.write_bytes(data)

    return act


def keep(part: float) -> Callable[[Path], object]:
    return lambda file: os.truncate(file, int(part * file.stat().st_size))


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def future_version(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[9] = 77
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "size 0": keep(0),
    "half": keep(0.5),
    "a flipped bit": flip(0.5),
    "wrong magic": flip(0),
    "future version": future_version,
    "a directory": replace_by_directory,
}


@on_loop
async def test_oc_45_what_is_on_disk_is_warm_after_a_restart(
    demo_model: Path, saved: tuple[Path, list[str]], tmp_path: Path
) -> None:
    directory, texts = saved
    shutil.copytree(directory, tmp_path / "kv")
    async with served(demo_model, on_disk(tmp_path / "kv")) as server:
        warm = await server.ask(P)
        assert cached(warm) == warm.usage["prompt_tokens"] - 1
        assert warm.text == texts[0]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_oc_45_a_damaged_file(
    demo_model: Path, saved: tuple[Path, list[str]], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    directory, texts = saved
    shutil.copytree(directory, tmp_path / "kv")
    (file,) = (tmp_path / "kv").glob("*.kv")
    damage(file)

    @on_loop
    async def check() -> None:
        async with served(demo_model, on_disk(tmp_path / "kv")) as server:
            answers = [await server.ask(prompt) for prompt in (P, *OTHERS)]
            assert [answer.text for answer in answers] == texts
            assert cached(answers[0]) == 0
            again = await server.ask(P)
            assert again.text == texts[0]
            assert cached(again) > 0
            await until(lambda: server.engine.stats.tiers.damaged > 0)  # the figures are looked up when it rests
            assert b'headrace_tier_damaged_total{model="tiny"} 1.0' in await metrics(server)
        async with served(demo_model, on_disk(tmp_path / "kv")) as server:
            assert cached(await server.ask(P)) > 0, "saved anew"
            assert b'headrace_tier_damaged_total{model="tiny"} 0.0' in await metrics(server)

    check()


async def degraded(server: Served) -> object:
    """What health says is missing; it is good all the same."""
    health = await server.get("/health")
    assert health.status == 200
    return health.json["degraded"]


async def until_degraded(server: Served, *names: str) -> None:
    """Ask for what only Redis could have until the engine has seen how it is; it looks when it rests."""
    async with asyncio.timeout(60):
        for i in itertools.count():
            if await degraded(server) == list(names):
                return
            await server.ask(f"{names} {i} {LONG}")


async def metrics(server: Served) -> bytes:
    return (await server.get("/metrics")).body


# --- OC-46


@pytest.mark.parametrize("there", [False, True], ids=["no Redis", "another password"])
def test_oc_46_no_redis_and_one_with_another_password(
    demo_model: Path,
    saved: tuple[Path, list[str]],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    there: bool,
) -> None:
    port = free_port()
    if there:
        redis: RedisServer = request.getfixturevalue("make_redis")("--requirepass", "another")
        redis.start()
        port = redis.port
    url = f"redis://:hunter2@127.0.0.1:{port}"
    tiers = Tiers(ram_mib=64, ssd_mib=0, redis_url=url, redis_timeout_ms=2000.0, min_tokens=16)

    @on_loop
    async def check() -> None:
        async with served(demo_model, tiers) as server:
            for prompt, text in zip((P, *OTHERS, P), (*saved[1], saved[1][0]), strict=True):
                assert (await server.ask(prompt)).text == text
            # Only a full block is sought in Redis: P and the others did not ask it.
            assert await degraded(server) == []
            await until_degraded(server, "redis")

    check()
    lines = [record for record in caplog.records if record.name == "headrace.kv.shared"]
    assert len(lines) == 1
    assert "hunter2" not in caplog.text


def test_oc_46_redis_is_killed_among_streams(demo_model: Path, make_redis: Callable[..., RedisServer]) -> None:
    redis = make_redis()
    redis.start()
    tiers = Tiers(ram_mib=64, ssd_mib=0, redis_url=redis.url, redis_timeout_ms=2000.0, min_tokens=16)

    @on_loop
    async def check() -> None:
        async with served(demo_model, tiers) as server:
            first = await server.ask(LONG)
            assert cached(first) == 0
        async with served(demo_model, tiers) as server:
            warm = await server.ask(LONG)
            assert cached(warm) == 256, "from Redis; the pool and the RAM of this server are new"
            assert warm.text == first.text
            asked = [asyncio.ensure_future(server.ask(f"{i} {prompt}")) for i, prompt in enumerate((*OTHERS, LONG))]
            await until(lambda: server.engine.stats.running > 0)
            redis.stop()
            assert len(await asyncio.gather(*asked)) == 4
            again = await server.ask(LONG)
            assert again.text == first.text
            assert cached(again) > 256
            await until_degraded(server, "redis")
            redis.start()
            await until_degraded(server)

    check()


# --- OC-47


@on_loop
async def test_oc_47_the_directory_stays_within_its_limit(demo_model: Path, tmp_path: Path) -> None:
    texts: list[str] = []
    prompts = [f"{i}. {P}" for i in range(5)]
    for _ in range(2):
        async with served(demo_model, on_disk(tmp_path, 10)) as server:
            for i, prompt in enumerate(prompts):
                answer = await server.ask(prompt)
                assert size_of(tmp_path) <= 10 * MIB
                texts.append(answer.text)
                assert answer.text == texts[i]
        assert size_of(tmp_path) <= 10 * MIB
    assert not names(tmp_path, ".tmp")
    assert len(names(tmp_path, ".kv")) < len(prompts)


# --- OC-48


@on_loop
async def test_oc_48_two_servers_over_one_directory(demo_model: Path, tmp_path: Path) -> None:
    prompts = [f"{i}. {P}" for i in range(3)]
    async with served(demo_model, Tiers(ram_mib=0, ssd_mib=0), on=False) as server:
        cold = [(await server.ask(prompt)).text for prompt in prompts]
    tiers = on_disk(tmp_path, 10)
    async with served(demo_model, tiers) as one, served(demo_model, tiers) as other:
        for _ in range(2):
            answers = await asyncio.gather(*(server.ask(prompt) for prompt in prompts for server in (one, other)))
            assert [answer.text for answer in answers] == [text for text in cold for _ in "ab"]
            assert size_of(tmp_path) <= 10 * MIB
    assert size_of(tmp_path) <= 10 * MIB
    assert not names(tmp_path, ".tmp")
    async with served(demo_model, tiers) as heir:
        answers = [await heir.ask(prompt) for prompt in prompts]
        assert [answer.text for answer in answers] == cold
        assert any(map(cached, answers))
