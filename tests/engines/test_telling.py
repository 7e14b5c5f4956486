from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from headrace.core.events import Event, Finished
from headrace.core.request import Generation
from headrace.core.sequence import sequences
from headrace.core.teller import Taken
from headrace.engines.base import EngineStats
from headrace.engines.telling import BEHIND, Telling

PATIENCE = 10.0
(SEQUENCE,) = sequences(Generation(1, [1], 9), 0.0, lambda token: b"")


def taken(n: int) -> list[Taken]:
    return [Taken(SEQUENCE, (n,), (), None, False, None, n, 0.0)]


def stats(n: int) -> EngineStats:
    return EngineStats(steps=n)


class Readers:
    """What was told, by which thread; `gate` holds the telling thread back."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.fail_at = 0

    def tell(self, steps: Sequence[Taken]) -> list[Event]:
        self.inside.set()
        if threading.current_thread().name == "telling":
            assert self.gate.wait(PATIENCE)
        return [Finished(1, 0, "stop", one.drawn) for one in steps]

    def deliver(self, events: list[Event], stats: EngineStats) -> None:
        if stats.steps == self.fail_at:
            raise ZeroDivisionError
        self.heard.append(stats.steps)
        self.threads.append(threading.current_thread().name)
        assert all(isinstance(e, Finished) and e.completion_tokens == stats.steps for e in events)


@contextmanager
def telling(readers: Readers, *, overlap: bool = True) -> Iterator[Telling]:
    made = Telling(readers.tell, readers.deliver, overlap=overlap)
    try:
        yield made
    finally:
        readers.gate.set()
        made.close()
        assert not any(thread.name == "telling" for thread in threading.enumerate())


HERE = threading.current_thread().name


def test_without_overlap_everything_is_told_at_once_and_here() -> None:
    readers = Readers()
    with telling(readers, overlap=False) as t:
        for n in (1, 2, 3):
            t.tell(taken(n), stats(n), now=n == 2)
            assert readers.heard == list(range(1, n + 1))
            t.start()
        assert set(readers.threads) == {HERE}


def test_a_step_is_told_when_the_next_one_begins() -> None:
    readers = Readers()
    with telling(readers) as t:
        t.tell(taken(1), stats(1), now=False)
        assert readers.heard == []
        t.start()
        t.drain()
        assert (readers.heard, readers.threads) == ([1], ["telling"])
        t.start()
        t.drain()
        assert readers.heard == [1], "once"


def test_whoever_cannot_wait_tells_what_no_step_followed() -> None:
    readers = Readers()
    with telling(readers) as t:
        t.tell(taken(1), stats(1), now=False)
        t.drain()
        assert (readers.heard, readers.threads) == ([1], [HERE])


@pytest.mark.parametrize("act", ["deliver", "now", "close"])
def test_nothing_overtakes(act: str) -> None:
    readers = Readers()
    with telling(readers) as t:
        readers.gate.clear()
        t.tell(taken(1), stats(1), now=False)
        t.start()
        t.tell(taken(2), stats(2), now=False)
        assert readers.inside.wait(PATIENCE)
        assert readers.heard == []
        acts: dict[str, Callable[[], None]] = {
            "deliver": lambda: t.deliver([], stats(3)),
            "now": lambda: t.tell(taken(3), stats(3), now=True),
            "close": t.close,
        }
        threading.Timer(0, readers.gate.set).start()
        acts[act]()
        assert readers.heard == ([1, 2] if act == "close" else [1, 2, 3])


def test_the_engine_waits_when_too_much_is_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = Readers()
    with telling(readers) as t:
        drain = t.drain

        def opening() -> None:
            readers.gate.set()
            drain()

        monkeypatch.setattr(t, "drain", opening)
        readers.gate.clear()
        for n in range(1, BEHIND + 1):
            t.tell(taken(n), stats(n), now=False)
            t.start()
        assert readers.heard == []
        assert not readers.gate.is_set(), "it did not wait for fewer"
        t.tell(taken(BEHIND + 1), stats(BEHIND + 1), now=False)
        t.start()
        assert readers.heard == list(range(1, BEHIND + 2))


def test_a_step_that_was_given_up_before_it_began_loses_nothing() -> None:
    readers = Readers()
    with telling(readers) as t:
        t.tell(taken(1), stats(1), now=False)
        t.tell(taken(2), stats(2), now=False)
        assert readers.heard == [1]
        t.drain()
        assert readers.heard == [1, 2]


@pytest.mark.parametrize("call", ["start", "drain", "close"])
def test_what_breaks_over_there_comes_out_here(call: str) -> None:
    readers = Readers()
    readers.fail_at = 2
    with telling(readers) as t:
        readers.gate.clear()
        for n in (1, 2, 3):
            t.tell(taken(n), stats(n), now=False)
            t.start()
        readers.gate.set()

        def go_on() -> None:
            for n in range(4, 4 + 2 * BEHIND):  # `start` hands over until it sees
                t.tell(taken(n), stats(n), now=False)
                getattr(t, call)()

        with pytest.raises(ZeroDivisionError):
            go_on()
        assert readers.heard == [1], "nothing is told after what broke"
