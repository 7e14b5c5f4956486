from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headrace.kv.blob import Block, blocks, fingerprint
from headrace.kv.disk import Disk
from headrace.kv.store import Store
from headrace.kv.tiers import Hit
from headrace.testing import ManualClock
from kv.failing_files import FailingFiles, SmallDisk

ENGINE = fingerprint("x")
SOON = 30.0
"""Longer than anything here takes; a test that waits so long fails."""
PER_TOKEN = 10


def kv(block: Block) -> bytes:
    """What its KV would be: the same for the same block, and no shorter when compressed."""
    return random.Random(block.key).randbytes(PER_TOKEN * (block.end - block.start))


@contextmanager
def store(
    path: Path | None = None,
    *,
    ram: int = 10**6,
    ssd: int = 10**6,
    files: FailingFiles | None = None,
    clock: ManualClock | None = None,
    engine: bytes = ENGINE,
) -> Iterator[Store]:
    disk = Disk(path, ssd, engine, files) if path else None
    made = Store(engine, ram, clock or ManualClock(), disk=disk)
    made.start()
    assert made.opened(SOON)
    try:
        yield made
    finally:
        made.close(SOON)


def size_of(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        with suppress(FileNotFoundError):  # removed since it was listed
            total += file.stat().st_size
    return total


def talk(conversation: int, n: int) -> list[int]:
    return [1000 + conversation] * n


def keep(kept: Store, tokens: list[int], salt: str = "") -> list[Block]:
    """Save a conversation as the engine would; the blocks that were new."""
    new = kept.missing(tokens, salt)
    for block in new:
        kept.put(block, kv(block))
    return new


def fetched(kept: Store, keys: tuple[bytes, ...]) -> Mapping[bytes, bytes]:
    over, got = threading.Event(), dict[bytes, bytes]()

    def done(found: Mapping[bytes, bytes]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        got.update(found)
        over.set()

    kept.fetch(keys, done)
    assert over.wait(SOON)
    return got


def restored(kept: Store, tokens: list[int], salt: str = "") -> Hit:
    """What a request for these tokens would do; every byte is looked at."""
    hit = kept.match(tokens, salt)
    kept.used(hit)
    found = fetched(kept, hit.cold) if hit.cold else {}
    for part in hit.parts:
        payload = kept.get(part.block.key) or found.get(part.block.key)
        assert payload in (None, kv(part.block)), "wrong KV"
        if payload is None:
            return hit.first(part.block.start)
    return hit


# --- RAM


def test_what_was_put_is_there_at_once() -> None:
    with store() as kept:
        new = keep(kept, talk(1, 700))
        assert [(b.start, b.end) for b in new] == [(0, 256), (256, 512), (512, 700)]
        assert kept.missing(talk(1, 700)) == []
        hit = kept.match(talk(1, 650))
        assert (hit.length, hit.cold) == (650, ())
        assert [kept.get(part.block.key) for part in hit.parts] == [kv(b) for b in new]
        assert kept.get(b"?" * 16) is None
        stats = kept.stats
        assert (stats.ram_blocks, stats.ram_bytes, stats.ram_written) == (3, 7000, 7000)
        assert (stats.ram_hits, stats.ram_misses, stats.ram_read) == (3, 1, 7000)
        assert (stats.ssd_blocks, stats.ssd_bytes) == (0, 0)


def test_it_is_not_put_twice() -> None:
    with store() as kept:
        (block,) = keep(kept, talk(1, 100))
        assert not kept.put(block, kv(block))
        shorter = blocks(ENGINE, "", talk(1, 50))[0]
        assert not kept.put(shorter, kv(shorter)), "a longer one is there"
        assert kept.stats.ram_bytes == 1000
        keep(kept, talk(1, 120))
        assert (kept.stats.ram_blocks, kept.stats.ram_bytes) == (1, 1200), "the longer one replaced it"


def test_the_longest_unused_leaves_and_pinned_ones_stay() -> None:
    with store(ram=3000) as kept:
        (template,) = keep(kept, talk(1, 100))
        kept.pin([template.key])
        keep(kept, talk(2, 100))
        keep(kept, talk(3, 100))
        kept.used(kept.match(talk(2, 100)))
        keep(kept, talk(4, 100))
        assert kept.stats.ram_bytes == 3000
        assert [kept.match(talk(i, 100)).length for i in (1, 2, 3, 4)] == [100, 100, 0, 100]
        kept.unpin([template.key])
        keep(kept, talk(5, 100))
        assert kept.match(talk(1, 100)).length == 0


def test_nothing_fits_in_no_ram() -> None:
    with store(ram=0) as kept:
        (block,) = kept.missing(talk(1, 10))
        assert not kept.put(block, kv(block))
        assert kept.match(talk(1, 10)).length == 0


def test_tenants_see_their_own_and_what_is_pinned_for_all() -> None:
    with store() as kept:
        mine = keep(kept, talk(1, 300), "mine")
        common = keep(kept, talk(1, 256))
        assert kept.match(talk(1, 300), "mine").length == 300
        assert kept.match(talk(1, 300), "yours").length == 0
        assert kept.match(talk(1, 300), "").length == 256
        assert not {b.key for b in mine} & {b.key for b in common}
        kept.pin([common[0].key], public=256)
        assert kept.match(talk(1, 300), "yours").length == 256
        assert kept.match(talk(1, 300), "mine").length == 300


def test_restores_are_counted_and_make_estimates() -> None:
    with store() as kept:
        keep(kept, talk(1, 100))
        before = kept.estimate(kept.match(talk(1, 100)))
        kept.restored(1000, 100, 5.0)
        assert kept.estimate(kept.match(talk(1, 100))) > before
        stats = kept.stats
        assert (stats.restores, stats.restored_tokens, stats.restore_s) == (1, 100, 5.0)


# --- the disk


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        keep(kept, talk(1, 700))
        assert kept.flush(SOON)
        assert kept.stats.ssd_blocks == 3
    with store(tmp_path) as kept:
        hit = kept.match(talk(1, 999))
        assert (hit.length, len(hit.cold)) == (700, 3)
        assert restored(kept, talk(1, 999)).length == 700
        assert kept.match(talk(1, 999)).cold == (), "now it is in RAM"
        assert kept.missing(talk(1, 700)) == []
        assert (kept.stats.ssd_hits, kept.stats.ssd_read, kept.stats.ssd_written) == (3, 7000, 0)
    with store(tmp_path, engine=fingerprint("other weights")) as kept:
        assert kept.match(talk(1, 999)).length == 0
    with store(tmp_path) as kept:
        assert restored(kept, talk(1, 999)).length == 700, "the other one left it alone"


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        for i in range(20):
            keep(kept, talk(i, 100))
    with store(tmp_path) as kept:
        assert all(kept.match(talk(i, 100)).length == 100 for i in range(20))
        assert kept.stats.writes_dropped == 0
    assert not kept.put(blocks(ENGINE, "", talk(50, 10))[0], b"x"), "closed"
    heard: list[Mapping[bytes, bytes]] = []
    kept.fetch([b"x"], heard.append)
    assert heard == [{}]


def test_a_longer_block_replaces_the_shorter_one_on_disk_too(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        keep(kept, talk(1, 100))
        kept.flush(SOON)
        keep(kept, talk(1, 150))
        kept.flush(SOON)
        keep(kept, talk(2, 10))
    assert len([p for p in tmp_path.iterdir() if p.suffix == ".kv"]) == 2
    with store(tmp_path) as kept:
        assert restored(kept, talk(1, 999)).length == 150


def test_a_crash_between_two_lengths_leaves_one_after_the_next_start(tmp_path: Path) -> None:
    disk = Disk(tmp_path, 10**6, ENGINE)
    disk.open()
    for n in (120, 60, 90):
        block = blocks(ENGINE, "", talk(1, n))[0]
        disk.write(block, kv(block), lambda _key: False)
    with store(tmp_path) as kept:
        assert restored(kept, talk(1, 999)).length == 120
    assert len([p for p in tmp_path.iterdir() if p.suffix == ".kv"]) == 1


def test_what_leaves_ram_comes_back_from_disk(tmp_path: Path) -> None:
    with store(tmp_path, ram=3000) as kept:
        for i in range(10):
            keep(kept, talk(i, 100))
        assert kept.flush(SOON)
        assert kept.stats.ram_bytes <= 3000
        for i in range(10):
            assert restored(kept, talk(i, 120)).length == 100
            assert kept.stats.ram_bytes <= 3000


def test_a_fetch_finds_what_is_not_on_disk_yet_and_stops_at_a_gap(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        chain = keep(kept, talk(1, 700))
        keys = [b.key for b in chain]
        assert list(fetched(kept, (keys[0], b"?" * 16, keys[1]))) == keys[:1]
        assert kept.stats.ssd_misses == 1


def test_without_room_in_ram_a_fetch_still_hands_it_over(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        (block,) = keep(kept, talk(1, 100))
    with store(tmp_path, ram=0) as kept:
        assert restored(kept, talk(1, 100)).length == 100
        assert fetched(kept, (block.key,)) == {block.key: kv(block)}
        assert kept.stats.ram_bytes == 0


def test_what_waits_for_a_fetch_may_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with store(tmp_path) as kept:
        (block,) = keep(kept, talk(1, 100))

        def fails(_found: Mapping[bytes, bytes]) -> None:
            raise RuntimeError

        kept.fetch([block.key], fails)
        assert fetched(kept, (block.key,)) != {}, "the next one is served"
    assert "what waited" in caplog.text


@pytest.mark.parametrize("damage", ["flip", "gone", "empty", "directory"])
def test_damage_costs_a_miss_and_heals(tmp_path: Path, damage: str) -> None:
    """The tokens before it are used still; it is saved again, and then it is there."""
    with store(tmp_path) as kept:
        middle = keep(kept, talk(1, 700))[1]
    victim = tmp_path / f"{ENGINE.hex()}-{middle.key.hex()}.kv"
    with store(tmp_path) as kept:
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.unlink()
        if damage == "flip":
            victim.write_bytes(data)
        elif damage == "empty":
            victim.touch()
        elif damage == "directory":
            victim.mkdir()
        assert restored(kept, talk(1, 700)).length == 256
        assert kept.stats.damaged == (damage != "gone")
        assert keep(kept, talk(1, 700)) == [middle]
        assert restored(kept, talk(1, 700)).length == 700
        assert kept.stats.damaged == (damage != "gone")
    with store(tmp_path) as kept:
        assert restored(kept, talk(1, 700)).length == 700


def test_the_disk_fails_and_comes_back(tmp_path: Path) -> None:
    clock, system = ManualClock(), FailingFiles()
    with store(tmp_path, files=system, clock=clock) as kept:
        system.fails = lambda _n, name: errno.EIO if name == "write" else 0
        keep(kept, talk(1, 100))
        kept.flush(SOON)
        assert kept.stats.ssd_down
        asked = len(system.done)
        keep(kept, talk(2, 100))
        kept.flush(SOON)
        assert len(system.done) == asked, "it is left alone for a while"
        clock.advance(1.1)
        keep(kept, talk(3, 100))
        kept.flush(SOON)
        clock.advance(1.1)
        assert kept.stats.ssd_down, "longer the second time"
        assert (kept.stats.ssd_errors, kept.stats.writes_dropped) == (2, 1)
        assert [restored(kept, talk(i, 100)).length for i in (1, 2, 3)] == [100] * 3, "RAM has it all"
        system.fails = lambda _n, _name: 0
        clock.advance(2.0)
        keep(kept, talk(4, 100))
        kept.flush(SOON)
        assert not kept.stats.ssd_down
        assert kept.stats.ssd_blocks == 1
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]


def test_what_the_disk_missed_is_written_when_it_leaves_ram(tmp_path: Path) -> None:
    clock, system = ManualClock(), FailingFiles()
    with store(tmp_path, files=system, clock=clock, ram=2000) as kept:
        system.fails = lambda _n, name: errno.EIO if name == "create" else 0
        keep(kept, talk(1, 100))
        kept.flush(SOON)
        system.fails = lambda _n, _name: 0
        clock.advance(60.0)
        keep(kept, talk(2, 100))
        keep(kept, talk(3, 100))
        kept.flush(SOON)
        assert restored(kept, talk(1, 100)).length == 100


def test_whatever_fails_the_engine_never_hears_of_it(tmp_path: Path) -> None:
    """One operation after the other fails for good; whatever can still be had is right."""
    n, reached = 0, True
    while reached:
        n += 1
        path = tmp_path / str(n)
        system = FailingFiles()
        system.fails = lambda number, _name, n=n: errno.EIO if number >= n else 0  # type: ignore[misc]
        with store(path, files=system, ram=3000, ssd=5000) as kept:
            for i in range(6):
                keep(kept, talk(i, 100))
                kept.flush(SOON)
                assert restored(kept, talk(i, 120)).length == 100
            for i in range(6):
                assert restored(kept, talk(i, 120)).length in (0, 100)
        reached = len(system.done) >= n
        with store(path, ssd=5000) as kept:
            for i in range(6):
                assert restored(kept, talk(i, 120)).length in (0, 100)
            keep(kept, talk(9, 50))
            assert restored(kept, talk(9, 50)).length == 50
    assert n > 30


def test_a_full_disk_keeps_the_newest(tmp_path: Path) -> None:
    clock, system = ManualClock(), SmallDisk(tmp_path, 20_000)
    with store(tmp_path, files=system, clock=clock, ram=1000, ssd=10**6) as kept:
        for i in range(50):
            keep(kept, talk(i, 100))
            kept.flush(SOON)
            assert size_of(tmp_path) <= 20_000
        assert [restored(kept, talk(i, 100)).length for i in range(40, 50)] == [100] * 10
        assert [restored(kept, talk(i, 100)).length for i in range(10)] == [0] * 10
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]


def test_two_stores_share_a_directory(tmp_path: Path) -> None:
    limit = 12_000
    with store(tmp_path, ram=2000, ssd=limit) as a, store(tmp_path, ram=2000, ssd=limit) as b:

        def use(kept: Store, seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                tokens = talk(rng.randrange(16), 100)
                if restored(kept, tokens).length == 0:
                    keep(kept, tokens)
                assert size_of(tmp_path) <= limit

        threads = [threading.Thread(target=use, args=(kept, seed)) for seed, kept in enumerate((a, b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert (a.flush(SOON), b.flush(SOON)) == (True, True)
        assert (a.stats.damaged, b.stats.damaged, a.stats.ssd_errors, b.stats.ssd_errors) == (0, 0, 0, 0)
        assert size_of(tmp_path) <= limit
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]


def test_more_than_the_queue_holds_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kv.store.QUEUE_BYTES", 2500)
    gate = threading.Event()
    system = FailingFiles()
    with store(tmp_path, files=system) as kept:
        system.fails = lambda _n, name: 0 if name != "create" or gate.wait(SOON) else errno.EIO
        for i in range(5):
            keep(kept, talk(i, 100))
        gate.set()
        kept.flush(SOON)
        assert (kept.stats.ssd_blocks, kept.stats.writes_dropped) == (2, 3)
        assert [restored(kept, talk(i, 100)).length for i in range(5)] == [100] * 5
