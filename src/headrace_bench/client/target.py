"""The server that is measured: where it is, what it is asked, and whether it is there at all.

    Target(url, model, …) ── check ──► the same, its model known, `headrace` set
                             └───────► Fault: one line that says what is wrong and what to do

Rules: a check sends no request that costs anything; a server is a Headrace if its list of models says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace_bench.client import place, sse
from headrace_bench.client.answer import Head
from headrace_bench.client.connection import Ask, Line
from headrace_bench.client.place import Place
from headrace_bench.client.pool import Pool
from headrace_bench.fault import Fault, Misuse
from headrace_bench.record import Outcome

OWNER = "headrace"
"""What a Headrace's models are owned by."""
CHECK_S = 10.0
"""A server that does not list its models in this time is not there."""
READY = "/readyz"
"""Answers 503 while a server has no model to answer with; most others give 404."""
SHOWN = 8
"""Models that are named when the wanted one is not there."""


@dataclass(frozen=True, slots=True)
class Target:
    """What requests go to. Raises Misuse for a URL, a key or a timeout that cannot be."""

    url: str
    model: str
    """Empty: `check` takes the only one there is."""
    key: str | None = None
    http2: bool = False
    """By prior knowledge on http://, by ALPN on https://."""
    keep_alive: bool = True
    """False: a new connection for every request."""
    timeout_s: float = 60.0
    """Of silence."""
    timings: bool = True
    """Ask a Headrace for its timeline."""
    headrace: bool = False
    """`check` has seen that it is one."""
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", place.parse(self.url))
        if self.key is not None and not (self.key and self.key.isascii() and self.key.isprintable()):
            raise Misuse("the API key is empty or has characters that no header can carry: give it as it was issued")
        if not self.timeout_s > 0:
            raise Misuse(f"a timeout of {self.timeout_s:g} s leaves no time to answer: give a number above 0")


async def check(target: Target) -> Target:
    """Asks for the models. `target` as it is to be used: with its model, and `headrace` if it is one.

    Raises Fault: no such server, no TLS, a wrong key, no such model, not an OpenAI-compatible server.
    """
    where = target.place
    pool = Pool(where, time.monotonic, http2=target.http2, keep_alive=target.keep_alive)
    try:
        async with asyncio.timeout(min(CHECK_S, target.timeout_s)):
            status, body = await fetch(pool, target, "GET", "/v1/models")
            if status in (404, 405):
                # Some servers list nothing. One that knows the path of chats complains of an empty one.
                chat, _ = await fetch(pool, target, "POST", "/v1/chat/completions", b"{}")
                if chat in (400, 401, 403, 413, 415, 422, 429) or chat >= 500:
                    return target
            if status == 200 and _models(body) == []:
                await _loaded(pool, target)
    except TimeoutError:
        raise Fault(f"{where}: it was asked for its models and said nothing for {CHECK_S:g} s: is it busy?") from None
    except OSError as error:
        raise Fault(_unreachable(where, target, error)) from None
    finally:
        await pool.close()
    return _judge(target, status, body)


async def _loaded(pool: Pool, target: Target) -> None:
    """Fault: a server without a model says that it is not ready. A Headrace lists none while it loads."""
    try:
        status, body = await fetch(pool, target, "GET", READY)
    except OSError:
        return  # it knows nothing of readiness, and the empty list stands
    if status == 503:
        raise Fault(f"{target.place}: it is not ready yet ({sse.refusal(body)}): wait until it has loaded its model")


def _judge(target: Target, status: int, body: bytes) -> Target:
    where = target.place
    said = sse.refusal(body)
    if status in (401, 403):
        missing = "it wants an API key: give it with --key" if target.key is None else "it does not take this API key"
        raise Fault(f"{where}: {missing} (status {status}: {said})")
    if 300 <= status < 400:
        raise Fault(f"{where}: it points elsewhere (status {status}): give the URL it points to")
    if status >= 500 or status == 429:
        raise Fault(f"{where}: it cannot answer now (status {status}: {said}): wait until it is ready")
    models = _models(body) if status == 200 else None
    if models is None:
        raise Fault(
            f"{where}: not an OpenAI-compatible server: {where}/v1/models gives status {status}, {said[:80]!r}: "
            "give the address before /v1"
        )
    names = [name for model in models for name in _names(model)]
    listed = ", ".join([str(model["id"]) for model in models][:SHOWN]) + (", …" if len(models) > SHOWN else "")
    if not target.model:
        if len(models) != 1:
            raise Fault(f"{where}: it has {len(models)} models, name one with --model: {listed or 'it lists none'}")
        target = dataclasses.replace(target, model=models[0]["id"])
    elif target.model not in names:
        raise Fault(f"{where}: it has no model {target.model!r}: there is {listed or 'none at all'}")
    return dataclasses.replace(target, headrace=any(model.get("owned_by") == OWNER for model in models))


def _models(body: bytes) -> list[dict[str, Any]] | None:
    """None: the body is no list of models."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, list):
        return None
    return [model for model in data if isinstance(model, dict) and isinstance(model.get("id"), str)]


def _names(model: dict[str, Any]) -> list[str]:
    """All names that a model answers to."""
    aliases = model.get("aliases")
    more = [alias for alias in aliases if isinstance(alias, str)] if isinstance(aliases, list) else []
    return [model["id"], *more]


def _unreachable(where: Place, target: Target, error: OSError) -> str:
    words = " ".join(str(error.strerror or error).split()) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{where}: its certificate is not trusted ({error.verify_message}): name its authority in SSL_CERT_FILE"
    if isinstance(error, ssl.SSLError):
        return f"{where}: no TLS with it ({words}): does it listen for http:// instead?"
    if isinstance(error, ConnectionAbortedError):
        wrong = "leave HTTP/2 out" if target.http2 else "is something else on that port?"
        return f"{where}: {words}: {wrong}"
    if isinstance(error, ConnectionResetError):
        other = "http://" if where.tls else "https://"
        return f"{where}: it took the connection and gave no answer ({words}): is it {other} instead?"
    return f"{where}: no server answers there ({words}): is it running, and are host and port right?"


async def fetch(pool: Pool, target: Target, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one request. Raises OSError; ConnectionAbortedError where it speaks something else."""
    line: Line = pool.idle() or await pool.open()
    whole = _Whole()
    line.send(Ask(target.place, method, path, target.key, target.keep_alive), body, whole)
    return await whole.over


class _Whole:
    """A listener that collects."""

    def __init__(self) -> None:
        self.over: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body = bytearray()

    def sent(self, at: float) -> None: ...

    def head(self, head: Head, at: float) -> None:
        self._status = head.status

    def body(self, data: bytes, at: float) -> None:
        self._body += data

    def ended(self, at: float) -> None:
        if not self.over.done():
            self.over.set_result((self._status, bytes(self._body)))

    def broken(self, at: float, outcome: Outcome, why: str, untouched: bool) -> None:
        if self.over.done():
            return
        # A server that closes at once, or answers in bytes that are no HTTP, may be waiting for TLS.
        error = ConnectionAbortedError if outcome == "protocol" else ConnectionResetError
        self.over.set_exception(error(why))
