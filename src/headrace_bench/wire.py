"""One streamed chat request over a plain socket: when did which text arrive?

Rules: nothing is parsed before it is stamped; a chunk counts when its delta carries text; one stamp a socket read,
because that is what a reader sees. Loopback and HTTP/1.1 only.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any


class Refused(Exception):
    """The server did not answer with a stream that ends well; the message says what it did."""


@dataclass(slots=True)
class Answer:
    """A finished stream. `stamps`: seconds from the request's write to each chunk of text."""

    stamps: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: int | None = None
    """By the server's usage, if it was asked for."""
    prompt_tokens: int | None = None
    finish: str | None = None
    """Why it ended, in the server's word."""
    timeline: dict[str, Any] | None = None
    """What a Headrace says of itself, in ms."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def rate(self) -> float:
        """Tokens per second from the first text to the last. ValueError without usage or with nothing to time."""
        if self.tokens is None or len(self.stamps) < 2:
            raise ValueError(f"no rate of {len(self.stamps)} chunks, {self.tokens} tokens")
        return (self.tokens - 1) / (self.stamps[-1] - self.stamps[0])

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks of text."""
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]


async def chat(
    url: str, body: dict[str, Any], *, timeout_s: float = 300.0, into: Answer | None = None, key: str | None = None
) -> Answer:
    """POST `body` to /v1/chat/completions as a stream; who gives `into` can watch it grow.

    Raises Refused, OSError, TimeoutError.
    """
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    data = json.dumps({**body, "stream": True}).encode()
    bearer = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n{bearer}"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    ).encode()
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            start = time.perf_counter()
            writer.write(head + data)
            return await _read(reader, start, Answer() if into is None else into)
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader, start: float, answer: Answer) -> Answer:
    rest, status, over = b"", None, False
    while data := await reader.read(1 << 16):
        now = time.perf_counter() - start
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if status is None:
                status = int(line.split()[1])
            elif line.startswith(b"data:"):
                over = over or _take(line[5:].strip(), now, answer)
    if status != 200 or not over:
        raise Refused(f"HTTP {status}, {len(answer.stamps)} chunks, {'whole' if over else 'cut short'}")
    return answer


def _take(data: bytes, now: float, answer: Answer) -> bool:
    """Book one event; True for the last one."""
    if data == b"[DONE]":
        return True
    event = json.loads(data)
    if "error" in event:
        raise Refused(str(event["error"])[:200])
    choices = event.get("choices") or [{}]
    text = (choices[0].get("delta") or {}).get("content")
    if text:
        answer.stamps.append(now)
        answer.texts.append(text)
    answer.finish = choices[0].get("finish_reason") or answer.finish
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]
        answer.prompt_tokens = event["usage"]["prompt_tokens"]
    if "headrace" in event:
        answer.timeline = event["headrace"].get("timeline")
    return False
