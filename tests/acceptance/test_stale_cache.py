"""OC-44: KV of one model is never used with the weights of another.

A model is changed by a restart, over the same cache directory and the same Redis. What waits for several engines behind
one name: swapping A for B in a server that runs, with B's KV and A's side by side in its RAM.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from acceptance.asking import Answer, on_loop
from acceptance.test_kv_tiers import LONG, on_disk, served
from acceptance.tiered import cached
from headrace.settings import Tiers
from redis_server import RedisServer

pytestmark = pytest.mark.real

NOWHERE = Tiers(ram_mib=0, ssd_mib=0)
RAM = Tiers(ram_mib=64, ssd_mib=0, min_tokens=16)


def other_weights(data: bytes, bit: int) -> bytes:
    """The same file with one of the two lowest bits of each byte in its middle changed.

    Values change, none ceases to be finite: in a scale these bits belong to the mantissa. The middle is weights alone;
    what describes the model stands at the beginning.
    """
    third = len(data) // 3
    turned = int.from_bytes(data[third : 2 * third]) ^ int.from_bytes(bytes([1 << bit]) * third)
    return data[:third] + turned.to_bytes(third) + data[2 * third :]


@pytest.fixture(scope="module")
def others(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """B and C: A's shape and size, other weights."""
    folder, data = tmp_path_factory.mktemp("others"), demo_model.read_bytes()
    paths = folder / "b.gguf", folder / "c.gguf"
    for bit, path in enumerate(paths):
        path.write_bytes(other_weights(data, bit))
    return paths


@pytest.fixture(scope="module")
def cold(demo_model: Path, others: tuple[Path, Path]) -> list[str]:
    """What A, B and C say without any cache."""
    texts: list[str] = []

    @on_loop
    async def find_out() -> None:
        for path in (demo_model, *others):
            async with served(path, NOWHERE, on=False) as server:
                texts.append((await server.ask(LONG)).text)

    find_out()
    assert len(set(texts)) == 3, "the change of weights shows"
    return texts


async def restarted(path: Path, tiers: Tiers) -> Answer:
    """The first answer of a new server."""
    async with served(path, tiers) as server:
        return await server.ask(LONG)


@pytest.mark.parametrize("tier", ["ram", "ssd", "redis"])
def test_oc_44_other_weights_never_meet_old_kv(
    demo_model: Path,
    others: tuple[Path, Path],
    cold: list[str],
    tmp_path: Path,
    tier: str,
    request: pytest.FixtureRequest,
) -> None:
    (b, c), (text_a, text_b, text_c) = others, cold
    tiers = RAM
    if tier == "ssd":
        tiers = on_disk(tmp_path / "kv")
    elif tier == "redis":
        make_redis: Callable[..., RedisServer] = request.getfixturevalue("make_redis")
        redis = make_redis()
        redis.start()
        tiers = dataclasses.replace(RAM, redis_url=redis.url, redis_timeout_ms=2000.0)
    model = tmp_path / "a.gguf"
    model.write_bytes(demo_model.read_bytes())
    times = model.stat()

    @on_loop
    async def swap() -> None:
        async with served(model, tiers) as server:
            first, warm = await server.ask(LONG), await server.ask(LONG)
            assert (cached(first), first.text) == (0, text_a)
            assert cached(warm) > 0
            assert warm.text == text_a

        swapped = await restarted(b, tiers)
        assert (cached(swapped), swapped.text) == (0, text_b)

        back = await restarted(model, tiers)
        # RAM went with its server; the other two still have A's KV.
        assert (cached(back) > 0) == (tier != "ram")
        assert back.text == text_a

        # In place, by weights of which nothing was kept yet. Inode, size and times stay: only the bytes tell.
        with model.open("r+b") as file:
            file.write(c.read_bytes())
        os.utime(model, ns=(times.st_atime_ns, times.st_mtime_ns))
        now = model.stat()
        assert (now.st_ino, now.st_size, now.st_mtime_ns) == (times.st_ino, times.st_size, times.st_mtime_ns)

        new = await restarted(model, tiers)
        assert (cached(new), new.text) == (0, text_c)

    swap()
