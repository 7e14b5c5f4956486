from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from headrace.gateway.whole_file import alone, replace_file


def test_it_is_written_whole_and_only_for_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b"
    replace_file(file, b"one")
    inode = file.stat().st_ino
    replace_file(file, b"two")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"two", 0o600)
    assert file.stat().st_ino != inode, "who reads the old one goes on reading it"
    assert os.listdir(file.parent) == ["b"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_file(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"x"


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "file", b"x")
    assert os.listdir(tmp_path) == ["file"]


def test_one_after_the_other(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(30):
            with alone(tmp_path / "folder"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
