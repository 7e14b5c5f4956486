"""Public doubles: an engine that plays a script, a clock that moves by hand, an ASGI `send` that remembers."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from headrace.core.attention import Attention
from headrace.core.clock import Clock
from headrace.core.events import TokenLogprob
from headrace.core.plan import Chunk, Draw, Drawn, StepResult
from headrace.core.verification import accepted
from headrace.engines.base import ModelInfo, StepAborted, StepFailed
from headrace.kv.blob import fingerprint, pack, unpack

END = b"<|im_end|>"
"""In a script: the token that ends the answer."""

_IM_START, _IM_END, _ENDOFTEXT = 257, 256, 258
_FIRST_WORD = 300
CONTROL = {"<|im_end|>": _IM_END, "<|im_start|>": _IM_START, "<|endoftext|>": _ENDOFTEXT}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ManualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class RecordingSend:
    """An ASGI `send`: keeps every message. `on_message` may raise or wait, to fail or hang at a chosen one."""

    def __init__(self, on_message: Callable[[int], Awaitable[None]] | None = None) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self._on_message = on_message

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if self._on_message is not None:
            await self._on_message(len(self.messages))
        self.messages.append(message)

    @property
    def status(self) -> int | None:
        """The response's status, None before its start."""
        return next((m["status"] for m in self.messages if m["type"] == "http.response.start"), None)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return {
            k.lower(): v for m in self.messages if m["type"] == "http.response.start" for k, v in m.get("headers", [])
        }

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages if m["type"] == "http.response.body")

    @property
    def finished(self) -> bool:
        return any(m["type"] == "http.response.body" and not m.get("more_body", False) for m in self.messages)


class ScriptedTokenizer:
    """One token a byte; control tokens as in ChatML; words that scripts use get ids of their own."""

    def __init__(self, n_vocab: int = 4096) -> None:
        self.n_vocab = n_vocab
        self._words: list[bytes] = []
        self._ids: dict[bytes, int] = {END: _IM_END}

    def word(self, piece: bytes) -> int:
        """The id of a script's token."""
        if len(piece) == 1:
            return piece[0]
        if piece not in self._ids:
            self._ids[piece] = _FIRST_WORD + len(self._words)
            self._words.append(piece)
        return self._ids[piece]

    def encode(self, text: str, *, special: bool) -> list[int]:
        if not special:
            return list(text.encode("utf-8", "surrogatepass"))
        ids: list[int] = []
        while text:
            found = next((c for c in CONTROL if text.startswith(c)), None)
            ids += [CONTROL[found]] if found else list(text[0].encode("utf-8", "surrogatepass"))
            text = text[len(found) if found else 1 :]
        return ids

    def piece(self, token: int) -> bytes:
        for text, control in CONTROL.items():
            if control == token:
                return text.encode()
        return self.answer_piece(token)

    def answer_piece(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        word = token - _FIRST_WORD
        return self._words[word] if 0 <= word < len(self._words) else b""


Script = Sequence[Sequence[bytes]]
"""Steps of one or more tokens; END ends the answer, and so does the script's own end."""


class ScriptedEngine:
    """A StepEngine that ignores the prompt and plays a script, step by step, for every sequence.

    It keeps the books of a real one (what each slot holds) and fails an assertion when a caller breaks the port's
    rules. Records: `prompts` (ids of each prompt as first drawn from), `prefilled` (chunks without a draw), `produced`
    (tokens), `draws`, `aborts`, `batches` (tokens per chunk of each step).
    """

    def __init__(
        self,
        script: Script | Callable[[Sequence[int]], Script],
        *,
        step_s: float = 0.0,
        prefill_s: float = 0.0,
        fail_at: Iterable[int] = (),
        exit_at: int | None = None,
        n_ctx: int = 4096,
        cells: int = 16384,
        slots: int = 64,
        batch: int = 576,
        drafts: int = 64,
        clock: Clock | None = None,
        wait: Callable[[float], bool] | None = None,
        tokenizer: ScriptedTokenizer | None = None,
        name: str = "scripted",
        record: bool = True,
    ) -> None:
        self.tokenizer = tokenizer or ScriptedTokenizer()
        if not callable(script):
            for token in (token for step in script for token in step):
                self.tokenizer.word(token)  # every engine of this script, a replay's too, has the same ids
        self._script = script if callable(script) else lambda _prompt: script
        self._counts = not callable(script) and all(len(step) == 1 for step in script)
        """Token number i is step number i."""
        self._record = record
        self._step_s, self._prefill_s = step_s, prefill_s
        self._fail_at, self._exit_at = frozenset(fail_at), exit_at
        self._clock = clock or (lambda: 0.0)
        self._aborted = threading.Event()
        self._wait = wait or self._aborted.wait
        """Takes seconds; True when the step was aborted meanwhile."""
        self.info = ModelInfo(
            name=name,
            n_ctx=n_ctx,
            n_vocab=self.tokenizer.n_vocab,
            chat_template=CHATML,
            eos=_IM_END,
            eog=(_IM_END,),
            control=CONTROL,
        )
        self.n_slots, self.n_cells, self.n_batch, self.n_drafts = slots, cells, batch, drafts
        self.attention = Attention(splits=True, pads=True)
        self.arranged: list[tuple[int, int]] = []
        """What `arrange` was called with."""
        self.bytes_per_token = 4
        """A saved token is its id."""
        self.fingerprint = fingerprint("scripted", name)
        self.slots: dict[int, list[int]] = {}
        self.prompts: list[list[int]] = []
        self.draws: list[Draw] = []
        self.batches: list[list[int]] = []
        self.prefilled = 0
        self.produced = 0
        self.aborts = 0
        self.steps = 0
        self.closed = False

    def piece(self, token: int) -> bytes:
        return self.tokenizer.answer_piece(token)

    def copy(self, source: int, target: int, length: int) -> None:
        assert not self.slots.get(target), f"copy into slot {target}, which is not empty"
        assert len(self.slots.get(source, ())) >= length, f"copy of {length} tokens from a shorter slot {source}"
        self.slots[target] = self.slots[source][:length]

    def trim(self, slot: int, length: int) -> None:
        del self.slots.get(slot, [])[length:]

    def save(self, slot: int, start: int, end: int) -> bytes:
        held = self.slots.get(slot, [])
        assert 0 <= start < end <= len(held), f"save of [{start}, {end}) from slot {slot}, which holds {len(held)}"
        return pack(held[start:end])

    def load(self, slot: int, start: int, end: int, payload: bytes) -> Sequence[int]:
        held = self.slots.setdefault(slot, [])
        assert 0 <= start == len(held), f"load of [{start}, {end}) into slot {slot}, which holds {len(held)}"
        if len(payload) != self.bytes_per_token * (end - start):
            return ()
        held.extend(unpack(payload))
        return range(start, end)

    def deepen(self, slot: int, length: int) -> int:
        held = self.slots.setdefault(slot, [])
        held.extend([0] * length)
        return len(held)

    def arrange(self, split: int, pad: int) -> None:
        assert split >= 0
        assert 0 <= pad < self.n_batch
        self.arranged.append((split, pad))

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        self.steps += 1
        if self.steps == self._exit_at:
            os._exit(9)
        if self.steps in self._fail_at:
            raise StepFailed("the script says so")
        self._check(chunks)
        prefills = sum(1 for c in chunks if c.draw is None or c.draw.position == c.draw.prompt)
        pause = self._prefill_s * prefills + (self._step_s if len(chunks) > prefills else 0.0)
        aborted = bool(pause) and self._wait(pause)
        self._aborted.clear()  # at the end: an abort that comes just before a step must not be lost
        if aborted:
            raise StepAborted
        if self._record:
            self.batches.append([len(c.tokens) for c in chunks])
        return StepResult(tuple(self._compute(c) for c in chunks), self._clock())

    def _check(self, chunks: Sequence[Chunk]) -> None:
        total = sum(len(c.tokens) for c in chunks)
        if not 0 < total <= self.n_batch:
            raise StepFailed(f"a step of {total} tokens; the batch holds 1 to {self.n_batch}")
        guesses = sum(c.draw.drafts for c in chunks if c.draw)
        assert guesses <= self.n_drafts, f"a step of {guesses} guesses; the engine checks at most {self.n_drafts}"
        assert len({c.slot for c in chunks}) == len(chunks), "two chunks of one slot in a step"
        for c in chunks:
            assert 0 <= c.slot < self.n_slots
            held = len(self.slots.get(c.slot, ()))
            assert c.start == held, f"slot {c.slot} holds {held} tokens, the chunk starts at {c.start}"
            if c.draw:
                assert c.start < c.draw.position == c.start + len(c.tokens) - c.draw.drafts, "drawn elsewhere"

    def _compute(self, chunk: Chunk) -> Drawn | None:
        tokens = self.slots.setdefault(chunk.slot, [])
        tokens.extend(chunk.tokens)
        want = chunk.draw
        if want is None:
            self.prefilled += 1
            return None
        prompt = list(want.history[: want.prompt])
        if self._record:
            self.draws.append(want)
            if want.position == want.prompt:
                self.prompts.append(prompt)
        drawn = self._said(prompt, want.position - want.prompt)
        if want.drafts:
            drawn = self._verified(prompt, want.position - want.prompt, chunk.tokens[-want.drafts :])
        else:
            tokens.extend(drawn[:-1])
        self.produced += len(drawn)
        top = want.sampling.logprobs
        return Drawn(drawn, () if top is None else tuple(self._logprob(t, top) for t in drawn))

    def _verified(self, prompt: list[int], done: int, guesses: Sequence[int]) -> tuple[int, ...]:
        """The slot holds all guesses, right or wrong, until it is trimmed."""
        said = [self._said(prompt, done + i)[0] for i in range(len(guesses) + 1)]
        return tuple(said[: accepted(said, guesses, frozenset(self.info.eog)) + 1])

    def _said(self, prompt: list[int], done: int) -> tuple[int, ...]:
        return tuple(self.tokenizer.word(t) for t in self._next(prompt, done))

    def _next(self, prompt: list[int], done: int) -> Sequence[bytes]:
        script = self._script(prompt)
        if self._counts:
            return script[done] if done < len(script) else (END,)
        for step in script:
            if done < len(step):
                return step[done:]  # a replay may begin inside a burst
            done -= len(step)
        return (END,)

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        alternatives = tuple((i, self.tokenizer.piece(i), -1.0 - i / 10) for i in range(top))
        return TokenLogprob(token, self.tokenizer.piece(token), -0.5, alternatives)

    def abort(self) -> None:
        self.aborts += 1
        self._aborted.set()

    def close(self) -> None:
        self.closed = True


def scripted_worker(settings: dict[str, Any], clock: Clock) -> ScriptedEngine:
    """A factory for `engines.worker.Blueprint`; `script` is a list of lists of text."""
    script = [[t.encode() for t in step] for step in settings.get("script", [])]
    options = {k: v for k, v in settings.items() if k != "script"}
    return ScriptedEngine(script, clock=clock, **options)


def counting_worker(settings: dict[str, Any], clock: Clock) -> ScriptedEngine:
    """A factory too: an engine that counts, one number a token, until it is stopped: `1 2 3 …`."""
    n_ctx = settings["n_ctx"]
    return ScriptedEngine(
        [[piece] for piece in _counted(n_ctx)],
        clock=clock,
        tokenizer=counting_tokenizer(n_ctx),
        record=False,
        **settings,
    )


def counting_tokenizer(n_ctx: int) -> ScriptedTokenizer:
    """One that knows the words of a `counting_worker` of that context."""
    pieces = _counted(n_ctx)
    tokenizer = ScriptedTokenizer(n_vocab=_FIRST_WORD + len(pieces))
    for piece in pieces:
        tokenizer.word(piece)
    return tokenizer


def _counted(n_ctx: int) -> list[bytes]:
    return [f"{i} ".encode() for i in range(1, n_ctx)]
