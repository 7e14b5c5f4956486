"""An OpenAI-compatible server behind an alias: vLLM, SGLang, llama-server, Ollama, a cloud, another Headrace.

    parse: fields ─▶ body      prepare: [told] what is to be continued ─▶ prompt ─▶ body      submit ─▶ engines/openai

Rules: what a request's fields mean is for the other server to say, so nothing is checked here that it checks. What is
prepared is complete: nothing of a request is kept here before its submit. An answer goes on exactly from what its
reader has, or not at all.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import (
    EngineUnavailable,
    HeadraceError,
    RequestError,
    ServiceError,
    StartupError,
    UpstreamFailed,
)
from headrace.core.request import Ask, Call, Generation, Told
from headrace.engines.answering import Sending
from headrace.engines.base import EngineStats, Lives
from headrace.engines.openai import OpenAIServer, Reply, parse_url
from headrace.gateway.backend import Kind, Sink, Work
from headrace.protocol.continuation import (
    FLAVOURS,
    Flavour,
    check_continuable,
    choices,
    encoded,
    going_on,
    outgoing,
    prompt_of,
    rendered,
    rendering,
    tokenizing,
)
from headrace.protocol.refusal import refusal

START_S = 10.0
WARM_S = 120.0
PROBE_S = 2.0
RENDER_S = 5.0
"""For a prompt to continue: its reader waits."""

PROBES: dict[Flavour, str] = {
    "vllm": "/health",
    "sglang": "/health",
    "llama-server": "/health",
    "headrace": "/readyz",
}
"""Where a server says whether it can answer, under its root; the others are asked for their models."""
OWNERS: dict[str, Flavour] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama-server",
    "headrace": "headrace",
    "library": "ollama",
}
"""`owned_by` in a list of models → who made it."""

log = logging.getLogger(__name__)


class _Card(msgspec.Struct):
    id: str = ""
    owned_by: str = ""
    created: int = 0


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class Upstream:
    """`name`: the engine's, for the log; `url`, `model`: where and what it serves; `flavour` "auto": found out at
    start; `tls` replaces the usual trust. Raises StartupError."""

    kind: Kind = "openai"
    clock_offset = 0.0

    def __init__(
        self,
        name: str,
        url: str,
        model: str,
        clock: Clock,
        *,
        key: str = "",
        flavour: str = "auto",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        known = [one for one in FLAVOURS if one == flavour]
        if flavour != "auto" and not known:
            raise StartupError(f"flavour: should be auto or one of {', '.join(FLAVOURS)}")
        origin, prefix = parse_url(url, tls=tls)
        self.name = name
        self.model = model
        self.server = OpenAIServer(origin, prefix, clock, key=key)
        self.flavour: Flavour = known[0] if known else "openai"
        self.created = 0
        self.lives = Lives()
        self._detect = not known
        self._started = False

    # Life ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ready(self) -> bool:
        return self._started

    @property
    def stats(self) -> EngineStats:
        return self.server.stats

    async def start(self) -> None:
        """Is it there, and what is it? Raises StartupError."""
        reply = await self._ask("GET", f"{self.server.prefix}/models", b"", START_S)
        if reply.status in (401, 403):
            raise StartupError(f"engine {self.name}: it does not accept the key (it answered {reply.status})")
        if reply.status >= 500 or reply.status in range(300, 400):
            raise StartupError(f"engine {self.name}: it answered {reply.status} when asked for its models")
        card = self._card(reply)
        self.created = card.created
        if self._detect:
            by_server: Flavour = "llama-server" if reply.server == "llama.cpp" else "openai"
            self.flavour = OWNERS.get(card.owned_by, by_server)
        log.info("engine %s: a server of flavour %s", self.name, self.flavour)
        self._started = True

    async def warm(self) -> None:
        """One token, so that whatever it loads at the first request is loaded. Raises StartupError."""
        prefix, body = self.server.prefix, {"model": self.model, "max_tokens": 1, "stream": False}
        chat = encoded({**body, "messages": [{"role": "user", "content": "hi"}]})
        reply = await self._ask("POST", f"{prefix}/chat/completions", chat, WARM_S)
        if reply.status in (400, 404, 422):  # it may have no chat template
            first, plain = reply, encoded({**body, "prompt": "hi"})
            reply = await self._ask("POST", f"{prefix}/completions", plain, WARM_S)
            reply = reply if reply.status == 200 else first
        if reply.status != 200:
            raise StartupError(f"engine {self.name}: {refusal(reply.status, '', reply.body).message}")

    async def probe(self) -> bool:
        """Does it answer, and well?"""
        path = PROBES.get(self.flavour)
        at = f"{self.server.prefix}/models" if path is None else self.server.root + path
        try:
            reply = await self.server.ask("GET", at, timeout_s=PROBE_S)
        except UpstreamFailed:
            return False
        return reply.status == 200

    async def close(self) -> None:
        """Running answers end with an error."""
        self._started = False
        await self.server.close()

    # Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def parse(self, ask: Ask) -> bytes:
        """The body as it goes out; b"" where an answer is to be continued."""
        return outgoing(ask, self.model, self.flavour) if ask.told is None else b""

    async def prepare(self, ask: Ask, parsed: Any, rids: Iterator[int]) -> Work:
        """Raises EngineUnavailable where it cannot continue."""
        n = choices(ask)
        path = "/chat/completions" if ask.chat else "/completions"
        body = parsed
        if ask.told is not None:
            path, body = "/completions", await self._continued(ask, ask.told)
        sending = Sending(next(rids), ask, n, self.server.prefix + path, body)
        return Work((sending,), n, 0)

    def submit(self, part: Generation | Call, sink: Sink) -> None:
        """Raises UpstreamFailed, EngineUnavailable."""
        assert isinstance(part, Sending), "what `prepare` made"
        if not self._started:
            raise EngineUnavailable("the engine is not there any more; try again shortly")
        self.server.submit(part, sink)

    def cancel(self, rid: int) -> None:
        self.server.cancel(rid)

    def pause(self, rid: int) -> None:
        self.server.pause(rid)

    def resume(self, rid: int) -> None:
        self.server.resume(rid)

    def predict(self, size: int, shared: float, priority: int) -> float:
        return self.server.ledger.predict(size * (1.0 - shared))

    # ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _card(self, reply: Reply) -> _Card:
        """Our model's in its list, else the first one's."""
        try:
            cards = msgspec.json.decode(reply.body, type=_Cards).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            cards = []
        ours = [card for card in cards if card.id == self.model]
        return (ours or cards or [_Card()])[0]

    async def _ask(self, method: str, path: str, body: bytes, timeout_s: float) -> Reply:
        """Raises StartupError."""
        try:
            return await self.server.ask(method, path, body, timeout_s=timeout_s)
        except UpstreamFailed as error:
            raise StartupError(f"engine {self.name}: {error.message}") from None

    async def _continued(self, ask: Ask, told: Told) -> bytes:
        """The body of the request that goes on from `told`. Raises EngineUnavailable."""
        check_continuable(ask)
        flavour = self.flavour
        if flavour == "openai":
            raise EngineUnavailable("this engine cannot continue an answer")
        room: int | None = None
        prompt: str | list[int]
        if ask.chat:
            how = rendering(ask, self.model, flavour)
            if how is None:
                raise EngineUnavailable("this engine cannot continue a chat")
            answer = rendered(await self._rendered(*how))
            if answer.tokens is not None:
                prompt = answer.tokens
                room = answer.max_model_len
            elif answer.prompt is not None:
                prompt = answer.prompt
            else:
                raise EngineUnavailable("the engine does not say how it reads the prompt")
        else:
            prompt = prompt_of(ask)
        if isinstance(prompt, str):
            whole: str | list[int] = prompt + told.text
        else:
            whole = prompt + await self._ids(told)
            room = None if room is None else room - len(whole)
        return going_on(ask, told, self.model, flavour, whole, room)

    async def _ids(self, told: Told) -> list[int]:
        """The tokens of what was told. Raises EngineUnavailable."""
        if not told.text:
            return []
        if told.ids is not None and told.exact:
            return list(told.ids)
        # It would go on behind all of them, and what they say beyond the text nobody would ever see.
        how = tokenizing(told.text, self.model, self.flavour)
        tokens = None if how is None else rendered(await self._rendered(*how)).tokens
        if tokens is None:
            raise EngineUnavailable("this engine does not turn text into tokens")
        return tokens

    async def _rendered(self, path: str, body: bytes) -> bytes:
        try:
            reply = await self.server.ask("POST", self.server.root + path, body, timeout_s=RENDER_S)
        except ServiceError as error:
            raise EngineUnavailable(error.message) from None
        if reply.status != 200:
            refused: HeadraceError = refusal(reply.status, "", reply.body)
            wrong = isinstance(refused, RequestError)
            raise EngineUnavailable("the engine cannot read the prompt" if wrong else refused.message)
        return reply.body
