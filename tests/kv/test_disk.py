from __future__ import annotations

import errno
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.kv.blob import Block, blocks, encode, fingerprint
from headrace.kv.disk import Disk
from kv.failing_files import FailingFiles, SmallDisk

ENGINE = fingerprint("x")
KV = random.Random(5).randbytes(1000)
PINNED_NONE: Callable[[bytes], bool] = lambda _key: False  # noqa: E731


def block(i: int, engine: bytes = ENGINE) -> Block:
    return blocks(engine, "", [i, 7])[0]


SIZE = sum(map(len, encode(block(0), KV)))
"""Of every file here."""


def opened(path: Path, limit: int = 10**6, engine: bytes = ENGINE, files: FailingFiles | None = None) -> Disk:
    disk = Disk(path, limit, engine, files)
    disk.open()
    return disk


def write(disk: Disk, *numbers: int) -> list[list[bytes]]:
    return [disk.write(block(i), KV, PINNED_NONE)[1] for i in numbers]


def size_of(path: Path) -> int:
    total = 0
    for file in path.iterdir():
        with suppress(FileNotFoundError):  # removed since it was listed
            total += file.stat().st_size if file.is_file() else 0
    return total


def files(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != "lock")


def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    disk = Disk(path, 10**6, ENGINE)
    assert disk.open() == []
    write(disk, 1, 2, 3)
    disk.touch([block(1).key])
    assert disk.used == size_of(path) == 3 * SIZE + 8
    again = Disk(path, 10**6, ENGINE)
    assert again.open() == [(block(2), 1000), (block(3), 1000), (block(1), 1000)], "the longest unused first"
    assert again.read(block(2).key) == (block(2), KV)
    assert again.read(block(9).key) is None
    assert (again.damaged, again.errors, again.used) == (0, 0, disk.used)


def test_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    write(opened(path), 1)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o600}


def test_another_engines_files_are_left_for_it_but_count(tmp_path: Path) -> None:
    other = fingerprint("y")
    opened(tmp_path, engine=other).write(block(1, other), KV, PINNED_NONE)
    disk = Disk(tmp_path, 2 * SIZE + 8, ENGINE)
    assert disk.open() == []
    assert disk.used == SIZE + 8
    assert write(disk, 1, 2) == [[], []]
    assert len(files(tmp_path)) == 2, "the other's was the longest unused"
    assert [found[0].key for found in Disk(tmp_path, 10**6, ENGINE).open()] == [block(1).key, block(2).key]


def test_what_is_not_named_like_ours_is_not_touched(tmp_path: Path) -> None:
    strange = ["notes.txt", "x.kv", f"{'a' * 32}.kv", f"{'a' * 32}-{'b' * 32}.kv.bak"]
    for name in strange:
        (tmp_path / name).write_bytes(KV)
    disk = opened(tmp_path, SIZE + 8)
    write(disk, 1, 2, 3)
    assert set(strange) < set(files(tmp_path))
    assert len(files(tmp_path)) == len(strange) + 1


# --- the limit


def test_the_longest_unused_makes_room(tmp_path: Path) -> None:
    disk = opened(tmp_path, 3 * SIZE + 8)
    write(disk, 1, 2, 3)
    disk.touch([block(1).key])
    assert write(disk, 4) == [[block(2).key]]
    assert size_of(tmp_path) <= 3 * SIZE + 8
    assert disk.write(block(5), KV, lambda key: key == block(3).key)[1] == [block(1).key]
    assert disk.write(block(6), KV, lambda _key: True) == (0, []), "pinned ones stay"
    assert disk.write(block(6), random.Random(1).randbytes(2000), lambda key: key != block(4).key) == (0, [])
    assert disk.read(block(4).key) is not None, "nobody goes if it would not be enough"
    assert disk.errors == 0


def test_a_block_above_the_limit_drives_nobody_out(tmp_path: Path) -> None:
    disk = opened(tmp_path, 2 * SIZE)
    write(disk, 1)
    assert disk.write(block(2), random.Random(1).randbytes(3000), PINNED_NONE) == (0, [])
    assert disk.read(block(1).key) is not None


def test_files_found_at_start_count_and_a_smaller_limit_holds_at_once(tmp_path: Path) -> None:
    write(opened(tmp_path), 1, 2, 3, 4, 5)
    disk = Disk(tmp_path, 2 * SIZE + 8, ENGINE)
    assert [found[0] for found in disk.open()] == [block(4), block(5)]
    assert size_of(tmp_path) == 2 * SIZE + 8


# --- damage


def truncate(n: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:n])


def flip(at: int) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)

    return act


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_full_directory(path: Path) -> None:
    replace_by_directory(path)
    (path / "file").write_text("")


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "size 0": truncate(0),
    "1 byte": truncate(1),
    "half": truncate(SIZE // 2),
    "last byte missing": truncate(-1),
    "flipped byte": flip(SIZE // 2),
    "flipped byte in the header": flip(20),
    "wrong magic": flip(0),
    "future version": flip(8),
    "a directory": replace_by_directory,
    "a directory with something in it": replace_by_full_directory,
    "a link to itself": replace_by_link,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "another block": lambda path: path.write_bytes(b"".join(encode(block(8), KV))),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("when", ["before the start", "while indexed"])
def test_damage_is_dropped_and_counted_once(tmp_path: Path, damage: Callable[[Path], object], when: str) -> None:
    first = opened(tmp_path)
    write(first, 1, 2)
    victim = tmp_path / f"{ENGINE.hex()}-{block(1).key.hex()}.kv"
    disk = Disk(tmp_path, 10**6, ENGINE)
    if when == "while indexed":
        assert len(disk.open()) == 2
        damage(victim)
    else:
        damage(victim)
        disk.open()
    for _ in range(3):
        assert disk.read(block(1).key) is None
    assert disk.damaged == 1
    assert disk.read(block(2).key) == (block(2), KV)
    if victim.is_dir():  # it was not empty, so it is not ours to remove
        assert disk.write(block(1), KV, PINNED_NONE) == (0, [])
        assert disk.errors == 0
        return
    assert not victim.exists()
    write(disk, 1)
    assert disk.read(block(1).key) == (block(1), KV)
    assert disk.damaged == 1


def test_an_unreadable_file_that_cannot_be_removed_counts_once(tmp_path: Path) -> None:
    """As one of mode 000 is for anybody but root."""
    write(opened(tmp_path), 1)
    system = FailingFiles(lambda _n, name: errno.EACCES if name in ("head", "read", "remove") else 0)
    disk = Disk(tmp_path, 10**6, ENGINE, system)
    assert disk.open() == []
    assert [disk.read(block(1).key) for _ in range(3)] == [None] * 3
    assert disk.damaged == 1


def test_deleted_while_indexed_is_no_damage(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    write(disk, 1)
    (tmp_path / f"{ENGINE.hex()}-{block(1).key.hex()}.kv").unlink()
    assert disk.read(block(1).key) is None
    disk.touch([block(1).key])
    disk.remove([block(1).key])
    assert (disk.damaged, disk.errors, disk.used) == (0, 0, 8)


def test_a_shortage_of_descriptors_is_not_the_files_fault(tmp_path: Path) -> None:
    system = FailingFiles()
    disk = opened(tmp_path, files=system)
    write(disk, 1)
    system.fails = lambda _n, name: errno.EMFILE if name == "read" else 0
    assert disk.read(block(1).key) is None
    system.fails = lambda _n, _name: 0
    assert disk.read(block(1).key) == (block(1), KV)
    assert (disk.damaged, disk.errors) == (0, 1)


# --- errors


def test_whatever_fails_nothing_half_stays_and_the_limit_holds(tmp_path: Path) -> None:
    """One operation after the other fails once, with each of four errors; then nothing fails any more."""
    for code in (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS):
        n, reached = 0, True
        while reached:
            n += 1
            path = tmp_path / f"{code}-{n}"
            system = FailingFiles()
            system.fails = lambda number, _name, n=n, code=code: code if number == n else 0  # type: ignore[misc]
            disk = Disk(path, 3 * SIZE + 8, ENGINE, system)
            disk.open()
            for i in range(5):
                with suppress(OSError):
                    disk.write(block(i), KV, PINNED_NONE)
                disk.touch([block(i).key])
                disk.read(block(i).key)
                assert not path.exists() or size_of(path) <= 3 * SIZE + 8
            reached = len(system.done) >= n
            system.fails = lambda _number, _name: 0
            write(disk, 6, 7)
            assert disk.read(block(7).key) == (block(7), KV)
            assert not [name for name in files(path) if name.endswith(".tmp")]
            assert disk.used == size_of(path) <= 3 * SIZE + 8
            after = Disk(path, 3 * SIZE + 8, ENGINE)
            found = after.open()
            assert all(after.read(b.key) == (b, KV) for b, _ in found)
            assert after.damaged == 0
        assert n > 40, "all of the operations had their turn"


def test_a_disk_that_stays_broken_raises_for_every_write_only(tmp_path: Path) -> None:
    disk = opened(tmp_path, files=FailingFiles(lambda _n, _name: errno.EIO))
    for i in range(3):
        with pytest.raises(OSError, match="fails"):
            write(disk, i)
    disk.remove([block(1).key])
    disk.touch([block(1).key])
    assert disk.read(block(1).key) is None
    assert disk.errors >= 4


def test_a_disk_smaller_than_the_limit_goes_on_with_what_fits(tmp_path: Path) -> None:
    system = SmallDisk(tmp_path, 4 * SIZE + 100)
    disk = opened(tmp_path, 50 * SIZE, files=system)
    for i in range(20):
        write(disk, i)
        assert size_of(tmp_path) <= 4 * SIZE + 100
    assert disk.read(block(19).key) == (block(19), KV)
    assert disk.errors == 0
    system.capacity = 0
    with pytest.raises(OSError, match="No space"):
        write(disk, 20)
    assert disk.errors == 1
    system.capacity = 10**6
    write(disk, 21, 22)
    assert not [name for name in files(tmp_path) if name.endswith(".tmp")]


# --- two of them


def test_two_share_a_directory_and_its_limit(tmp_path: Path) -> None:
    limit = 4 * SIZE + 8
    a, b = opened(tmp_path, limit), opened(tmp_path, limit)
    rng = random.Random(6)
    for _ in range(200):
        disk = rng.choice((a, b))
        i = rng.randrange(12)
        if rng.random() < 0.5:
            write(disk, i)
        else:
            assert disk.read(block(i).key) in (None, (block(i), KV))
        assert size_of(tmp_path) <= limit
    assert (a.damaged, b.damaged, a.errors, b.errors) == (0, 0, 0, 0)
    write(a, 99)
    write(b, 98)
    assert a.read(block(98).key) == (block(98), KV)
    assert b.used == size_of(tmp_path)


def test_while_one_writes_the_other_gives_up_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kv.disk._PAUSE_S", 0.0)
    disk = opened(tmp_path)
    system = FailingFiles()
    holder = system.lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        write(disk, 1)
    system.close(holder)
    write(disk, 1)
    assert disk.read(block(1).key) is not None


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    disk = opened(path)
    write(disk, 1)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    write(disk, 2)
    assert disk.used == size_of(path)


KILLED = """
import os, random, sys
from pathlib import Path
from headrace.kv.blob import blocks, fingerprint
from headrace.kv.disk import Disk, Files

class Dying(Files):
    def sync(self, descriptor):
        os.kill(os.getpid(), 9)

e = fingerprint("x")
disk = Disk(Path(sys.argv[1]), 10**6, e, Dying())
disk.open()
disk.write(blocks(e, "", [1, 7])[0], bytes(1000), lambda key: False)
"""


def test_the_orphan_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    alive = opened(tmp_path)
    write(alive, 3)
    for restart in (True, False):
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
        assert killed.returncode == -9
        assert any(name.endswith(".tmp") for name in files(tmp_path))
        if restart:
            assert [b for b, _ in Disk(tmp_path, 10**6, ENGINE).open()] == [block(3)]
        else:
            write(alive, 4)  # the other one sees it as well
        assert not any(name.endswith(".tmp") for name in files(tmp_path))
    assert alive.used == size_of(tmp_path)


SHARING = """
import random, sys
from pathlib import Path
from headrace.kv.blob import blocks, fingerprint
from headrace.kv.disk import Disk

e, rng = fingerprint("x"), random.Random(int(sys.argv[3]))
kv = random.Random(5).randbytes(1000)
disk = Disk(Path(sys.argv[1]), int(sys.argv[2]), e)
disk.open()
for i in range(150):
    block = blocks(e, "", [rng.randrange(12), 7])[0]
    got = disk.read(block.key)
    assert got in (None, (block, kv)), "wrong KV"
    if got is None:
        disk.write(block, kv, lambda key: False)
    if i == 50:
        print("a third", flush=True)
print(disk.damaged, disk.errors, flush=True)
"""


def test_two_processes_share_a_directory_while_one_is_killed(tmp_path: Path) -> None:
    limit = 5 * SIZE + 8

    def sharing(seed: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SHARING, str(tmp_path), str(limit), str(seed)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    survivor, victim = sharing(1), sharing(2)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "a third\n"
    victim.kill()
    victim.communicate()
    heir = sharing(3)
    while survivor.poll() is None or heir.poll() is None:
        assert size_of(tmp_path) <= limit
    assert [process.communicate()[0].split() for process in (survivor, heir)] == [["a", "third", "0", "0"]] * 2
    assert [survivor.returncode, heir.returncode] == [0, 0]
    write(opened(tmp_path, limit), 99)
    assert size_of(tmp_path) <= limit
    assert not [name for name in files(tmp_path) if name.endswith(".tmp")]
