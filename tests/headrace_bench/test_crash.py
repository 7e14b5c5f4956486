from __future__ import annotations

import asyncio

import pytest

from headrace_bench import crash
from headrace_bench.crash import BEGUN, ENOUGH, STREAMS, _together, begun, compare
from headrace_bench.wire import Answer, Refused

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNK = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


def said(text: str) -> Answer:
    return Answer(texts=[text])


def test_right_is_what_any_undisturbed_run_wrote() -> None:
    runs: list[list[object]] = [
        [said("a"), said("b"), said("c"), said("d")],
        [said("a"), said("B"), said("c"), Refused("broke")],
    ]
    assert compare([said("a"), said("B"), said("x"), said("d")], runs) == {
        "finished": 4,
        "right": 3,
        "undisturbed_agree": 3,
    }
    assert compare([None, said("b"), said("c"), None], runs) == {"finished": 2, "right": 2, "undisturbed_agree": 3}


def test_there_are_eight() -> None:
    assert STREAMS == 8


def test_it_is_time_when_all_have_begun_or_the_first_gets_far() -> None:
    assert not begun([BEGUN - 1, ENOUGH - 1])
    assert begun([BEGUN, BEGUN])
    assert begun([0, ENOUGH])


@pytest.mark.parametrize(("early", "times"), [(False, 1), (True, 0)])
def test_the_engine_is_killed_once_all_have_begun(early: bool, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three scripted streams stop in the middle and go on only after the kill; with `early` they end before that."""
    monkeypatch.setattr(crash, "LOOK_S", 0.001)
    calls: list[int] = []

    async def run() -> list[Answer | BaseException]:
        killed = asyncio.Event()

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.write(HEAD)
            for _ in range(1 if early else BEGUN):
                writer.write(CHUNK)
                await writer.drain()
                await asyncio.sleep(0)
            if not early:
                await killed.wait()
            writer.write(CHUNK + b"data: [DONE]\n\n")
            writer.close()

        def kill() -> None:
            calls.append(1)
            killed.set()

        server = await asyncio.start_server(play, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await _together(url, [{"messages": []}] * 3, kill)

    answers = asyncio.run(run())
    assert len(calls) == times
    assert all(isinstance(answer, Answer) for answer in answers)
