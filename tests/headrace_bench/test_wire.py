from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace_bench.wire import Answer, Refused, chat

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % text.encode()


async def against(
    answer: bytes, cut: Callable[[bytes], list[bytes]] = lambda whole: [whole], into: Answer | None = None
) -> Answer:
    """One call of a server that reads the request and plays `answer` in pieces."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        for piece in cut(answer):
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await chat(f"http://127.0.0.1:{port}", {"messages": []}, timeout_s=10, into=into)


def test_only_text_counts() -> None:
    stream = (
        HEAD
        + b": hb\n\n"
        + b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        + event("a")
        + event("b")
        + b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"headrace":{"timeline":{"ttft":5}}}\n\n'
        + b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    )
    answer = asyncio.run(against(stream))
    assert answer.texts == ["a", "b"]
    assert len(answer.stamps) == 2
    assert len(answer.gaps) == 1
    assert answer.timeline == {"ttft": 5}
    assert answer.tokens == 3
    assert answer.prompt_tokens == 7
    assert answer.finish == "stop"
    assert answer.text == "ab"


def test_events_cut_anywhere_are_whole() -> None:
    stream = HEAD + event("é漢") + event("x") + b"data: [DONE]\n\n"
    answer = asyncio.run(against(stream, lambda whole: [whole[i : i + 1] for i in range(len(whole))]))
    assert answer.texts == ["é漢", "x"]


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "503"),
        (HEAD + event("a"), "cut short"),
        (HEAD + event("a") + b'data: {"error":{"message":"broke"}}\n\n', "broke"),
    ],
)
def test_a_stream_that_does_not_end_well_is_no_sample(stream: bytes, why: str) -> None:
    with pytest.raises(Refused, match=why):
        asyncio.run(against(stream))


def test_a_stream_can_be_watched_even_if_it_ends_badly() -> None:
    answer = Answer()
    with pytest.raises(Refused):
        asyncio.run(against(HEAD + event("a") + event("b"), into=answer))
    assert answer.text == "ab"


def test_a_rate_is_of_tokens_and_leaves_the_first_one_out() -> None:
    assert Answer(stamps=[1.0, 2.0, 3.0], texts=["a", "b", "c"], tokens=9).rate == 4.0
    for nothing in (Answer(stamps=[1.0, 2.0]), Answer(stamps=[1.0], tokens=2)):
        with pytest.raises(ValueError, match="no rate"):
            _ = nothing.rate


def test_a_key_goes_with_it() -> None:
    async def test(key: str | None) -> bytes:
        heads: list[bytes] = []

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.close()

        async with await asyncio.start_server(play, "127.0.0.1", 0) as server:
            with pytest.raises((Refused, OSError)):
                await chat(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, timeout_s=10, key=key)
        return heads[0]

    assert b"\r\nAuthorization: Bearer k1\r\n" in asyncio.run(test("k1"))
    assert b"Authorization" not in asyncio.run(test(None))
