from __future__ import annotations

import ctypes
import platform
import threading

import pytest

from headrace.server.slice import _ATTR, shorten

GETATTR = {"x86_64": 315, "aarch64": 275}


def slice_ns() -> int:
    """The calling thread's own slice, 0 if it has none."""
    buffer = ctypes.create_string_buffer(_ATTR.size)
    assert ctypes.CDLL(None).syscall(GETATTR[platform.machine()], 0, buffer, _ATTR.size, 0) == 0
    return int(_ATTR.unpack(buffer.raw)[5])


def in_a_thread_of_its_own(slice_us: int, seen: list[object]) -> None:
    seen.append(shorten(slice_us))
    seen.append(slice_ns())
    inner: list[int] = []
    thread = threading.Thread(target=lambda: inner.append(slice_ns()))
    thread.start()
    thread.join()
    seen.append(inner[0])


def test_the_kernel_takes_it_or_nothing_happens() -> None:
    if platform.machine() not in GETATTR:
        assert shorten(100) is False
        return
    seen: list[object] = []
    thread = threading.Thread(target=in_a_thread_of_its_own, args=(200, seen))
    thread.start()
    thread.join()
    granted, mine, inherited = seen
    assert granted is True
    assert inherited != 200_000, "what it starts must not inherit the short slice"
    if tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 12):
        assert mine == 200_000


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert shorten(100) is False
