from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec
import pytest
import uvloop

from headrace_bench.client import rehearsal
from headrace_bench.client.connection import Clock
from headrace_bench.client.golden import CASES, Case
from headrace_bench.client.rehearsal import Played, agrees, rehearse, server, strict
from headrace_bench.client.request import Client
from headrace_bench.client.target import Target
from headrace_bench.fault import Fault
from headrace_bench.load.schedule import Planned
from headrace_bench.record import Record

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as found:
        yield found


def rehearsed(case: Case, url: str, tries: int = 10) -> list[Played]:
    """A test's machine may be a very busy one: each try has to be right to count, so more of them prove no less."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(rehearse(case, Target(url, "scripted"), tries))


@pytest.mark.parametrize("name", [case.name for case in CASES if not case.name.startswith("OC")])
def test_the_golden_cases(name: str, url: str) -> None:
    played = rehearsed(BY_NAME[name], url)[-1]
    assert played.differences == [], (played.wanted, played.found, played.server_late, played.waited)


def test_a_wrong_client_is_found_out(url: str) -> None:
    right = BY_NAME["a"]
    wrong = Case(
        "a", right.what, right.asks, lambda times: {**right.wants(times), "ttft": times[0].ttft(1), "tokens": 2}
    )
    for played in rehearsed(wrong, url, tries=2):
        assert played.differences == ["ttft", "tokens"]


class Omitting(Client):
    """One request at a time, and each counts from when its turn came: what the stall did to the others is left out."""

    def __init__(self, target: Target, clock: Clock) -> None:
        super().__init__(target, clock)
        self._turn = asyncio.Lock()

    async def send(self, planned: Planned, messages: Sequence[dict[str, str]], keep_text: bool = False) -> Record:
        async with self._turn:
            record = await super().send(planned, messages, keep_text)
            return msgspec.structs.replace(record, scheduled=record.dispatched)


def test_coordinated_omission_is_found_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "Client", Omitting)
    played = rehearsed(BY_NAME["k"], url, tries=1)[0]
    assert "ttfts" in played.differences
    assert "late by 25 ms and more" in played.differences
    assert played.found["late by 25 ms and more"] < 10
    assert played.wanted["late by 25 ms and more"] >= 20


def test_only_a_noisy_machine_has_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def tries(*outcomes: tuple[bool, float, float | None]) -> int:
        """(It differs, the server's lateness, the wait) of each try."""
        rest = list(outcomes)

        async def play(case: Case, target: Target) -> Played:
            differs, late, waited = rest.pop(0)
            return Played(case, {"x": 1}, {"x": 2 if differs else 1}, late, waited)

        monkeypatch.setattr(rehearsal, "play", play)
        return len(asyncio.run(rehearse(CASES[0], Target("http://127.0.0.1:1", "m"))))

    assert tries((False, 9.0, 9.0)) == 1
    assert tries((True, 0.0005, 0.0005)) == 1
    assert tries((True, 0.0005, None)) == 1
    assert tries((True, 0.002, None), (False, 0.0, 0.0)) == 2
    assert tries((True, 0.0, 0.002), (True, 0.0, 0.0)) == 2
    assert tries(*[(True, 0.002, 0.002)] * 3) == 3


@pytest.mark.parametrize(
    ("wanted", "found", "same"),
    [
        (0.1, 0.1019, True), (0.1, 0.1021, False), (0.1, None, False), (0.1, 0, False), (None, 0.0, False),
        (None, None, True), (1, 1, True), (1, 2, False),
        ((0, 0.1), (0.0, 0.101), True), ((0, 0.1), (0.001, 0.1), False),
        ((0.1,), (0.1, 0.1), False), ((0.1,), None, False), ({"a": 1}, {"a": 1}, True), ({"a": 1}, {}, False),
    ],
)  # fmt: skip
def test_agrees(wanted: object, found: object, same: bool) -> None:
    assert agrees(wanted, found) is same


def test_strict() -> None:
    assert strict(b'{"a":null}')
    assert not strict(b'{"a":NaN}')
    assert not strict(b'{"a":Infinity}')
    assert not strict(b"{")


def test_another_server_has_no_log() -> None:
    from bench_servers import Reader, Writer, by_hand, request, sized

    async def play(reader: Reader, writer: Writer) -> None:
        while await request(reader):
            writer.write(sized(b"", b"HTTP/1.1 404 No\r\n"))

    async def test() -> None:
        async with by_hand(play) as url:
            with pytest.raises(Fault, match="not the scripted server"):
                await rehearsal.play(BY_NAME["a"], Target(url, "m"))

    asyncio.run(test())


def test_the_server_is_ended_with_the_rehearsal() -> None:
    with server() as url:
        assert url.startswith("http://127.0.0.1:")
        target = Target(url, "m")

    async def gone() -> bool:
        try:
            await asyncio.open_connection(target.place.host, target.place.port)
        except ConnectionRefusedError:
            return True
        return False

    assert asyncio.run(gone())
