"""A model as the server sees it: an engine, and how requests become its tokens.

Rules: lengths are checked here, before the engine hears of a request; a long text is rendered and tokenised on a thread
of its own, so that it does not stand in the way of other streams' tokens; a short one is done at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from headrace.core.errors import ContextExceeded, InvalidRequest
from headrace.core.request import ChatRequest, CompletionRequest, Generation, Options
from headrace.core.tokenizer import Tokenizer
from headrace.engines.base import StreamEngine
from headrace.protocol.chat_template import ChatTemplate, PieceEncoder

LONG_TEXT = 20_000
"""Characters from which on the detour over a thread (about 0.1 ms) is worth it."""
THREADS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready for the engine. Choice index = prompt index * n + i."""

    generations: tuple[Generation, ...]
    """One a prompt; none when no token is wanted."""
    choices: int
    prompt_tokens: int
    """Each prompt counted once, however many choices share it."""
    echo: tuple[str, ...] = ()
    """For completions with echo: the text of each prompt."""


class ServedModel:
    """One name that clients can ask for. `template` None: the model cannot chat."""

    def __init__(
        self, engine: StreamEngine, tokenizer: Tokenizer, template: ChatTemplate | None, encoder: PieceEncoder
    ) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._template = template
        self._encoder = encoder
        # Threads start with the first long text.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-tokenize")

    @property
    def name(self) -> str:
        return self.engine.info.name

    def close(self) -> None:
        """Give up the threads; the engine is closed by whoever started it."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def chat(self, request: ChatRequest, rids: Iterator[int]) -> Job:
        """Render, tokenise, check. Raises InvalidRequest and ContextExceeded, both with param "messages"."""
        size = sum(len(message.content) for message in request.messages)
        prompt = await self._run(size, lambda: self.prepare_chat(request))
        return self._job([prompt], request.options, rids, param="messages")

    async def completion(self, request: CompletionRequest, rids: Iterator[int]) -> Job:
        """Tokenise, check. Raises InvalidRequest and ContextExceeded, both with param "prompt"."""
        size = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, str))
        prompts = await self._run(size, lambda: self.prepare_completion(request))
        echo = self._echo(request, prompts) if request.echo else ()
        return self._job(prompts, request.options, rids, param="prompt", echo=echo)

    def prepare_chat(self, request: ChatRequest) -> list[int]:
        """The prompt's token ids. Any thread."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
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

    def _job(
        self, prompts: list[list[int]], options: Options, rids: Iterator[int], *, param: str, echo: tuple[str, ...] = ()
    ) -> Job:
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
            )
            for prompt, room in zip(prompts, rooms, strict=True)
            if options.max_tokens != 0
        )
        return Job(generations, len(prompts) * options.n, sum(map(len, prompts)), echo)

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
