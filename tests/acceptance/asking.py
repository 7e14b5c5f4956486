"""Clients of a server: whole requests over httpx, and a raw connection that sees every byte."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ParamSpec, Self

import httpx
import uvloop

from server.socket_client import Connection

P = ParamSpec("P")
TIMEOUT_S = 60.0
TEST_S = 100.0
"""Until a test counts as hanging."""
CHAT = "/v1/chat/completions"
COMP = "/v1/completions"


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a coroutine test on the loop that we serve on."""

    @functools.wraps(test)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        uvloop.run(_limited(test(*args, **kwargs)))

    return wrapper


async def _limited(test: Coroutine[Any, Any, None]) -> None:
    # pytest's own limit is a signal, and while uvloop runs, nobody hears of one.
    async with asyncio.timeout(TEST_S):
        await test


def strict_json(data: bytes | str) -> Any:
    """JSON without NaN and its kin, in UTF-8 without lone surrogates."""

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    value = json.loads(data.decode() if isinstance(data, bytes) else data, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def events_of(body: bytes) -> list[bytes]:
    """The data of each event of an event stream as we write it: one `data:` line each, comments apart."""
    assert body.endswith(b"\n\n"), body[-200:]
    out = []
    for block in body.removesuffix(b"\n\n").split(b"\n\n"):
        assert b"\n" not in block, block
        assert b"\r" not in block, block
        if not block.startswith(b":"):
            assert block.startswith(b"data: "), block
            out.append(block.removeprefix(b"data: "))
    return out


class Answer:
    """A complete response. `stream`: it was read as an event stream."""

    def __init__(self, status: int, headers: httpx.Headers, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.stream = headers.get("content-type", "").startswith("text/event-stream")

    def __repr__(self) -> str:
        return f"<Answer [{self.status}, {self.body[:300]!r}]>"

    @functools.cached_property
    def json(self) -> Any:
        """The body of a response that is not a stream."""
        assert not self.stream
        return strict_json(self.body)

    @functools.cached_property
    def events(self) -> list[bytes]:
        """The data of every event, `[DONE]` among them."""
        assert self.stream
        return events_of(self.body)

    @functools.cached_property
    def chunks(self) -> list[dict[str, Any]]:
        """Every event but `[DONE]`, decoded."""
        return [strict_json(data) for data in self.events if data != b"[DONE]"]

    @property
    def done(self) -> bool:
        """The stream ended well: `[DONE]` once, as its last bytes."""
        return self.body.endswith(b"data: [DONE]\n\n") and self.events.count(b"[DONE]") == 1

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """What stands in `choices` for that choice, one a chunk (or one in all)."""
        documents = self.chunks if self.stream else [self.json]
        return [c for d in documents for c in d.get("choices", []) if c["index"] == index]

    def texts(self, index: int = 0) -> list[str]:
        """The choice's text, one a chunk that has any."""
        parts = (
            c["text"] if "text" in c else (c.get("delta") or c.get("message") or {}).get("content")
            for c in self.choices(index)
        )
        return [part for part in parts if part]

    def cat(self, index: int = 0) -> str:
        """CAT of that choice, or its text in a response that is not a stream."""
        return "".join(self.texts(index))

    @property
    def text(self) -> str:
        """CAT."""
        return self.cat()

    @property
    def finish(self) -> list[str]:
        """Every finish reason that was given for choice 0."""
        return [c["finish_reason"] for c in self.choices() if c.get("finish_reason") is not None]

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """The entries of choice 0's `logprobs.content`."""
        return [entry for c in self.choices() if c.get("logprobs") for entry in c["logprobs"]["content"]]

    @property
    def usage(self) -> dict[str, Any]:
        """The one usage there is."""
        found = [d["usage"] for d in (self.chunks if self.stream else [self.json]) if d.get("usage") is not None]
        assert len(found) == 1
        return dict(found[0])


_SECRETS = re.compile(rb"Traceback|File \\?\"|\.py\b|\.gguf\b|/(?:usr|home|root|work|tmp|src)/|<html|<!doctype", re.I)


def envelope(answer: Answer, status: int, *params: str | None, code: str | None = None) -> dict[str, Any]:
    """ENVELOPE(status, param): the error. `params`: the fields it may name (None: no field); none given: any."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert not _SECRETS.search(answer.body), answer
    body = strict_json(answer.body)
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"].strip()
    assert isinstance(error["type"], str)
    assert error["type"]
    assert not params or error["param"] in params, error
    assert code is None or error["code"] == code, error
    return dict(error)


class Asking:
    """A client of one server and model. Use it inside `calls`."""

    def __init__(self, url: str, model: str, key: str | None) -> None:
        self.url = url
        self.model = model
        self.key = key
        self._client: httpx.AsyncClient | None = None

    @contextlib.asynccontextmanager
    async def calls(self) -> AsyncIterator[Self]:
        """Requests can be made inside."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, trust_env=False, verify=False, limits=limits
        ) as client:
            self._client = client
            try:
                yield self
            finally:
                self._client = None

    async def send(self, method: str, path: str, **request: Any) -> Answer:
        """One request; the headers are the caller's, but for the key."""
        assert self._client is not None, "outside of calls()"
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        headers |= request.pop("headers", None) or {}
        response = await self._client.request(method, path, headers=headers, **request)
        return Answer(response.status_code, response.headers, response.content)

    async def get(self, path: str) -> Answer:
        return await self.send("GET", path)

    async def post(self, path: str, body: bytes, *, headers: dict[str, str] | None = None) -> Answer:
        """POST these very bytes as JSON."""
        return await self.send(
            "POST", path, content=body, headers={"content-type": "application/json"} | (headers or {})
        )

    async def chat(self, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """CHAT{fields}"""
        return await self.post(CHAT, dumps(chat_fields(self.model, fields)), headers=headers)

    async def comp(self, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """COMP{fields}"""
        return await self.post(COMP, dumps(comp_fields(self.model, fields)), headers=headers)


def chat_fields(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """CHAT{fields} as an object."""
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}


def comp_fields(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """COMP{fields} as an object."""
    return {"model": model, "prompt": "hi", **fields}


def dumps(value: Any) -> bytes:
    """JSON as most clients write it."""
    return json.dumps(value, allow_nan=False).encode()


class Wire(Connection):
    """A raw connection to the server; see `Connection` for `request`, `head`, `chunk`, `answer`, `reset`, `close`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str, key: str | None) -> None:
        super().__init__(reader, writer)
        self._model = model
        self._auth = f"authorization: Bearer {key}\r\n".encode() if key else b""
        self._rest = b""

    @classmethod
    async def open(cls, port: int, model: str, key: str | None) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port), model, key)

    async def chat(self, **fields: Any) -> None:
        """Send CHAT{fields}."""
        await self.request("POST", CHAT, dumps(chat_fields(self._model, fields)), head=self._auth)

    async def comp(self, **fields: Any) -> None:
        """Send COMP{fields}."""
        await self.request("POST", COMP, dumps(comp_fields(self._model, fields)), head=self._auth)

    async def raw(self, data: bytes) -> None:
        """Send these very bytes."""
        self.writer.write(data)
        await self.writer.drain()

    def half_close(self) -> None:
        """FIN: no more is sent, but what comes is still read."""
        self.writer.write_eof()

    async def block(self) -> bytes:
        """The next event or comment of a chunked event stream, without its empty line; b"" at the body's proper end."""
        while b"\n\n" not in self._rest:
            chunk = await self.chunk()
            if not chunk:
                assert not self._rest, self._rest
                return b""
            self._rest += chunk
        block, _, self._rest = self._rest.partition(b"\n\n")
        return block

    async def event(self) -> Any:
        """The next event decoded, comments passed over; "[DONE]"; None at the body's proper end."""
        while (block := await self.block()).startswith(b":"):
            pass
        if not block:
            return None
        data = block.removeprefix(b"data: ")
        return "[DONE]" if data == b"[DONE]" else strict_json(data)

    async def rest(self) -> list[Any]:
        """All further events, to the body's proper end."""
        events = []
        while (event := await self.event()) is not None:
            events.append(event)
        return events

    async def everything(self) -> bytes:
        """All bytes until the server closes."""
        return await self.reader.read()
