"""An engine of ours behind an alias: how requests become its tokens.

Rules: lengths are checked here, before the engine hears of a request; a long text is rendered and tokenised on a thread
of its own, so that it does not stand in the way of other streams' tokens; a short one is done at once. An answer that
another engine began goes on from the exact token if the tokens are known, else from the exact character, or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from headrace.core.detokenizer import Detokenizer
from headrace.core.errors import ContextExceeded, EngineUnavailable, InvalidRequest, Unsupported
from headrace.core.request import Ask, Call, ChatRequest, CompletionRequest, Generation, Options, Sampling, Told
from headrace.core.tokenizer import Tokenizer
from headrace.engines.base import EngineStats, Lives, StreamEngine
from headrace.gateway.backend import Kind, Sink, Work
from headrace.protocol.chat_template import ChatTemplate, PieceEncoder
from headrace.protocol.fields import Field, boolean
from headrace.protocol.messages import parse_messages
from headrace.protocol.openai import OPENAI, parse_chat, parse_completion

LONG_TEXT = 20_000
"""Characters from which on the detour over a thread (about 0.1 ms) is worth it."""
THREADS = 2
BYTES_PER_TOKEN = 3.5
"""Of a request's body, for predictions: prose has 4 to 5 a token, code and JSON 2 to 3."""

ADD_SPECIAL: Field[bool] = Field("add_special_tokens", boolean, True)

T = TypeVar("T")


class ServedModel:
    """`template` None: the model cannot chat. `sampling`: what holds where a request is silent."""

    kind: Kind = "llama"

    def __init__(
        self,
        engine: StreamEngine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        encoder: PieceEncoder,
        *,
        sampling: Sampling = OPENAI,
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self._tokenizer = tokenizer
        self._template = template
        self._encoder = encoder
        # Threads start with the first long text.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-tokenize")

    @property
    def name(self) -> str:
        return self.engine.info.name

    @property
    def ready(self) -> bool:
        return self.engine.ready

    @property
    def created(self) -> int:
        return self.engine.info.created

    @property
    def clock_offset(self) -> float:
        return self.engine.clock_offset

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def lives(self) -> Lives:
        return self.engine.lives

    async def close(self) -> None:
        """Close the engine and give up the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.engine.close()

    def parse(self, ask: Ask) -> ChatRequest | CompletionRequest:
        """Raises InvalidRequest; EngineUnavailable while the model loads."""
        parse = parse_chat if ask.chat else parse_completion
        defaults = ask.sampling or self.sampling  # one answer is drawn in one way, whoever goes on with it
        return parse(ask.fields, n_vocab=self.engine.info.n_vocab, seed=lambda: ask.seed, defaults=defaults)

    async def prepare(self, ask: Ask, parsed: ChatRequest | CompletionRequest, rids: Iterator[int]) -> Work:
        """Render, tokenise, check. Raises InvalidRequest and ContextExceeded, with param "messages" or "prompt"."""
        options = replace(parsed.options, priority=ask.options.priority)
        if isinstance(parsed, ChatRequest):
            size = sum(len(message.content) for message in parsed.messages)
            prompt = await self._run(size, lambda: self.prepare_chat(parsed))
            work = self._work([prompt], options, rids, ask.salt, param="messages")
        else:
            size = sum(len(prompt) for prompt in parsed.prompts if isinstance(prompt, str))
            prompts = await self._run(size, lambda: self.prepare_completion(parsed))
            echo = self._echo(parsed, prompts) if parsed.echo else ()
            work = self._work(prompts, options, rids, ask.salt, param="prompt", echo=echo)
        return work if ask.told is None else self._continued(work, ask.told)

    def submit(self, part: Generation | Call, sink: Sink) -> None:
        """Raises EngineUnavailable, Overloaded."""
        assert isinstance(part, Generation)
        self.engine.submit(part, sink)

    def cancel(self, rid: int) -> None:
        self.engine.cancel(rid)

    def pause(self, rid: int) -> None:
        self.engine.pause(rid)

    def resume(self, rid: int) -> None:
        self.engine.resume(rid)

    def predict(self, size: int, shared: float, priority: int) -> float:
        return self.engine.predict(int(size / BYTES_PER_TOKEN * (1.0 - shared)) + 1, priority)

    async def tokens(self, fields: Mapping[str, Any]) -> list[int]:
        """Ids of `messages`, rendered, or of the text `prompt`. Raises InvalidRequest."""
        chat, text = fields.get("messages"), fields.get("prompt")
        if (chat is None) == (text is None) or not isinstance(text, str | None):
            raise InvalidRequest("give either messages, or prompt as one text", param="prompt")
        if chat is not None:
            messages = parse_messages(chat)
            size = sum(len(message.content) for message in messages)
            return await self._run(size, lambda: self.prepare_chat(ChatRequest("", messages, Options())))
        assert text is not None
        info, special = self.engine.info, ADD_SPECIAL.read(fields)
        bos = info.bos if special else None
        return await self._run(
            len(text),
            lambda: self._encoder.encode_raw(text, parse_special=False, bos=bos, add_bos=special and info.add_bos),
        )

    def _continued(self, work: Work, told: Told) -> Work:
        """`work`, from where its reader is. Raises EngineUnavailable if that cannot be told exactly."""
        if len(work.parts) != 1 or work.choices != 1 or work.echo:
            raise EngineUnavailable("an answer of several parts cannot be continued")
        (generation,) = work.parts
        assert isinstance(generation, Generation)
        ids = list(told.ids) if told.ids is not None else self._tokenizer.encode(told.text, special=False)
        detokenizer = Detokenizer(generation.stop)
        shown = "".join(detokenizer.feed(self._tokenizer.piece(token)) for token in ids)
        # What the engine holds back the reader may have: a server behind us need not hold back what may become a stop
        # string. It must not come twice.
        held = detokenizer.held
        if not told.text.startswith(shown) or not (shown + held).startswith(told.text):
            raise EngineUnavailable("the answer cannot be continued from where it is")
        if detokenizer.stopped and told.text == shown:
            return replace(work, parts=(), reason="stop")
        if len(ids) >= generation.max_tokens and told.text == shown + held:
            return replace(work, parts=())
        if detokenizer.stopped or len(ids) >= generation.max_tokens:
            raise EngineUnavailable("the answer has all its tokens, but not all of them were shown")
        going_on = msgspec.structs.replace(generation, resume=(tuple(ids),))
        return replace(work, parts=(going_on,), hidden=len(told.text) - len(shown))

    def prepare_chat(self, request: ChatRequest) -> list[int]:
        """The prompt's token ids. Any thread."""
        if self._template is None:
            raise Unsupported("this model has no chat template; use /v1/completions", param="messages")
        info = self.engine.info
        pieces = self._template.render(request.messages)
        return self._encoder.encode(pieces, bos=info.bos, add_bos=info.add_bos)

    def prepare_completion(self, request: CompletionRequest) -> list[list[int]]:
        """The token ids of each prompt. Any thread."""
        info = self.engine.info
        return [
            self._encoder.encode_raw(prompt, parse_special=request.parse_special, bos=info.bos, add_bos=info.add_bos)
            if isinstance(prompt, str)
            else list(prompt)
            for prompt in request.prompts
        ]

    def _echo(self, request: CompletionRequest, prompts: list[list[int]]) -> tuple[str, ...]:
        return tuple(
            prompt if isinstance(prompt, str) else self._text(tokens)
            for prompt, tokens in zip(request.prompts, prompts, strict=True)
        )

    def _text(self, tokens: list[int]) -> str:
        return b"".join(map(self._tokenizer.piece, tokens)).decode(errors="replace")

    def _work(
        self,
        prompts: list[list[int]],
        options: Options,
        rids: Iterator[int],
        salt: str,
        *,
        param: str,
        echo: tuple[str, ...] = (),
    ) -> Work:
        n_ctx = self.engine.info.n_ctx
        rooms = [_room(len(prompt), n_ctx, options, param) for prompt in prompts]
        generations = tuple(
            Generation(
                rid=next(rids),
                prompt=prompt,
                max_tokens=room if options.max_tokens is None else min(options.max_tokens, room),
                n=options.n,
                stop=options.stop,
                sampling=options.sampling,
                cache=options.cache,
                priority=options.priority,
                deadline=options.deadline,
                salt=salt,
            )
            for prompt, room in zip(prompts, rooms, strict=True)
            if options.max_tokens != 0
        )
        return Work(generations, len(prompts) * options.n, sum(map(len, prompts)), options, echo)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Here if `size` characters are few, else on a thread."""
        if size <= LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _room(prompt: int, n_ctx: int, options: Options, param: str) -> int:
    """Tokens that an answer to `prompt` tokens may have. Raises InvalidRequest, ContextExceeded."""
    if prompt == 0:
        raise InvalidRequest(f"{param} gives no tokens: the model needs at least one to start from", param=param)
    wanted = 0 if options.max_tokens == 0 else 1
    if prompt + wanted > n_ctx:
        raise ContextExceeded(
            f"the prompt is {prompt} tokens and the model's context holds {n_ctx}, the answer included: "
            f"shorten the prompt to at most {n_ctx - wanted}",
            param=param,
        )
    return n_ctx - prompt
