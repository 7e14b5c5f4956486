"""Another OpenAI-compatible server as an engine: requests go out over HTTP, its answers come back as events.

    Sending ──▶ Connections ──▶ Answering ──▶ Admitted, Relayed*            its bytes go on
                                    └───────▶ Admitted, Delta*, Finished    it continues an answer

Rules: a client that leaves cuts the connection at once. Nobody waits for ever: a server that says nothing for
`SILENCE_S` has failed. The key is in the head of a request and nowhere else.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace import __version__
from headrace.core.clock import Clock
from headrace.core.errors import StartupError, UpstreamFailed
from headrace.core.events import Admitted, Relayed
from headrace.engines.answering import MAX_WHOLE, Answering, Ledger, Sending, Sink
from headrace.engines.base import EngineStats
from headrace.engines.connections import Connections, Origin
from headrace.engines.http1 import Head, WireFault
from headrace.protocol.api_path import api_path

SILENCE_S = 600.0
"""Without a byte for so long an answer has failed."""
SWEEP_S = 5.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A small answer, read whole."""

    status: int
    body: bytes
    server: str = ""
    """What its `Server` header says."""


def parse_url(url: str, *, tls: ssl.SSLContext | None = None) -> tuple[Origin, str]:
    """`http://host:port/v1` → where it listens, and the path before `/chat/completions`; `/v1` is added if no part of
    the path is a version. `tls` replaces the usual trust. Raises StartupError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise StartupError("url: should read http://HOST:PORT/v1") from None
    # Looked for in the text itself: an empty name, query or fragment is none to whoever splits it.
    plain = url.isascii() and url.isprintable() and not any(sign in url for sign in " @?#")
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise StartupError("url: should read http://HOST:PORT/v1 or https://…, without a key, ? or # in it")
    secure = parts.scheme == "https"
    context = (tls or ssl.create_default_context()) if secure else None
    return Origin(parts.hostname, port or (443 if secure else 80), context), api_path(parts.path)


class OpenAIServer:
    """One server, on one event loop. `prefix`: the path of its API; `key` "": none is sent."""

    def __init__(
        self,
        origin: Origin,
        prefix: str,
        clock: Clock,
        *,
        key: str = "",
        silence_s: float = SILENCE_S,
        connections: Connections | None = None,
    ) -> None:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise StartupError("the key for the engine holds characters that do not fit a header")
        self.prefix = prefix
        self.root = prefix.removesuffix("/v1")
        """Before paths that are not of the OpenAI API."""
        self.connections = connections or Connections(origin, clock)
        self.ledger = Ledger(clock)
        self._silence_s = silence_s
        self._sweeping: asyncio.TimerHandle | None = None
        head = f"host: {origin.authority}\r\nuser-agent: headrace/{__version__}\r\n"
        self._head = (head + (f"authorization: Bearer {key}\r\n" if key else "")).encode()

    def __repr__(self) -> str:
        return f"<OpenAIServer [{self.running} running]>"

    @property
    def running(self) -> int:
        return len(self.ledger.answers)

    @property
    def stats(self) -> EngineStats:
        ledger = self.ledger
        return EngineStats(
            running=len(ledger.answers),
            prompt_tokens=ledger.prompt_tokens,
            cached_tokens=ledger.cached_tokens,
            completion_tokens=ledger.completion_tokens,
        )

    def submit(self, sending: Sending, sink: Sink) -> None:
        """Send it. Raises UpstreamFailed."""
        answer = Answering(self.ledger, sending, sink)
        stream = sending.ask.options.stream
        request = self._request("POST", sending.path, sending.body, sending.ask.request_id, stream=stream)
        try:
            answer.transfer = self.connections.start(request, answer)
        except WireFault as fault:
            answer.give_up()
            raise UpstreamFailed(f"the engine failed: {fault}") from None
        self.ledger.answers[sending.rid] = answer
        # How long it queues over there nobody knows: whoever waits here for a place of ours has it.
        sink(Relayed(sending.rid, b"", content="") if sending.ask.told is None else Admitted(sending.rid, 0, 0))
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def cancel(self, rid: int) -> None:
        answer = self.ledger.answers.pop(rid, None)
        if answer is not None:
            answer.give_up()

    def pause(self, rid: int) -> None:
        answer = self.ledger.answers.get(rid)
        if answer is not None and answer.transfer is not None:
            answer.paused = True
            answer.transfer.pause()

    def resume(self, rid: int) -> None:
        answer = self.ledger.answers.get(rid)
        if answer is not None and answer.transfer is not None:
            answer.paused = False
            answer.heard = self.ledger.clock()
            answer.transfer.resume()

    async def ask(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Reply:
        """One small request and its whole answer. Raises UpstreamFailed."""
        reader = _Small()
        try:
            transfer = self.connections.start(self._request(method, path, body, "", stream=False), reader)
            try:
                async with asyncio.timeout(timeout_s):
                    return await reader.reply
            finally:
                transfer.cancel()
        except TimeoutError:
            raise UpstreamFailed(f"the engine gave no answer within {timeout_s:g} s") from None
        except WireFault as fault:
            raise UpstreamFailed(f"the engine failed: {fault}") from None

    async def close(self) -> None:
        """Answers that run get `Broken`."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        await self.connections.close()

    def _request(self, method: str, path: str, body: bytes, request_id: str, *, stream: bool) -> bytes:
        accept = "text/event-stream" if stream else "application/json"
        head = f"{method} {path} HTTP/1.1\r\naccept: {accept}\r\naccept-encoding: identity\r\n"
        if request_id:
            head += f"x-request-id: {request_id}\r\n"
        if method == "POST":
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + self._head + b"\r\n" + body

    def _sweep(self) -> None:
        """Give up on answers that have been silent for too long."""
        self._sweeping = None
        now = self.ledger.clock()
        for answer in tuple(self.ledger.answers.values()):
            if not answer.paused and now - answer.heard >= self._silence_s:
                answer.break_off(UpstreamFailed(f"the engine said nothing for {self._silence_s:g} s"))
        if self.ledger.answers:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


class _Small:
    """Reads a small answer."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._head: Head | None = None
        self._body = bytearray()

    def head(self, head: Head) -> None:
        self._head = head

    def body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > MAX_WHOLE and not self.reply.done():
            self.reply.set_exception(WireFault("its answer is too long"))

    def end(self, fault: WireFault | None) -> None:
        if self.reply.done():
            return
        if fault is not None or self._head is None:
            self.reply.set_exception(fault or WireFault("no answer"))
        else:
            self.reply.set_result(Reply(self._head.status, bytes(self._body), self._head.value("server")))
