"""Answers on the wire: one encoder a response, chat and completion alike to whoever uses them.

    streamed   delta* finish  (each choice)   …   end        whole   body

Rules: every chunk has the same id, created, model and object. A choice's first chunk, whatever it is, brings the role
(chat) or the echoed prompt (completions); its last has the finish reason and no text. Usage is written only where
it was asked for. What a chunk has around its text never changes, so it is made once: a text costs two concatenations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.events import Delta, FinishReason, Relayed, TokenLogprob
from headrace.core.request import Options
from headrace.protocol import sse
from headrace.protocol.envelope import error_event

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one response, over all its choices; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed again, <= prompt_tokens."""

    def report(self) -> dict[str, Any]:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice of a response that is not streamed."""

    index: int
    text: str
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


class Encoder(ABC):
    """What a stream writes for what it is told. It remembers what has begun: one response, one encoder."""

    passes = True
    """What another server wrote goes on as it is, its end too."""

    @abstractmethod
    def begin(self, index: int) -> None:
        """The choice was begun by another server: its first chunk is out."""

    @abstractmethod
    def delta(self, index: int, delta: Delta) -> bytes:
        """Whole events for `delta`; b"" if nothing in it is for the client."""

    @abstractmethod
    def finish(self, index: int, reason: FinishReason, timeline: Mapping[str, Any] | None) -> bytes:
        """The choice's last chunk, with `headrace.timeline` if given."""

    @abstractmethod
    def timing(self, timeline: Mapping[str, Any]) -> bytes:
        """`headrace.timeline` for an answer whose last chunk another server made."""

    @abstractmethod
    def end(self, usage: Usage | None) -> bytes:
        """The end of a stream that went well."""

    def relayed(self, event: Relayed) -> bytes:
        """Whole events for what another server wrote."""
        return event.raw

    def error(self, error: HeadraceError) -> bytes:
        """The end of a stream that did not."""
        return error_event(error)

    def joined(self, chunks: Sequence[bytes]) -> bytes:
        """What goes out in one write."""
        return b"".join(chunks)


class Answer(Encoder):
    """OpenAI's answers."""

    _OBJECT: str
    _CHUNK: str
    # A choice's JSON after its index: what stands before its text, before its first text, after it, and instead of it.
    _BEFORE: bytes
    _BEFORE_FIRST: bytes
    _AFTER: bytes
    _LAST: bytes
    _NO_LOGPROBS: bytes

    def __init__(self, id: str, created: int, model: str, *, options: Options) -> None:
        """`id` with the prefix that clients expect (`chatcmpl-`, `cmpl-`); `created` in Unix seconds."""
        self._head = {"id": id, "object": self._OBJECT, "created": created, "model": model}
        self._opening = b"data: " + sse.json_value({**self._head, "object": self._CHUNK, "choices": []})[: -len("]}")]
        self._usage = options.include_usage
        self._closing = b',"usage":null}\n\n' if self._usage else b"}\n\n"
        self._logprobs = options.sampling.logprobs is not None
        self._before: dict[int, bytes] = {}
        """Of each choice that has begun: all bytes of a chunk before its text."""
        self._after = self._AFTER + self._NO_LOGPROBS + b',"finish_reason":null}]' + self._closing

    def begin(self, index: int) -> None:
        self._before[index] = self._opening + b'{"index":%d,' % index + self._BEFORE

    def timing(self, timeline: Mapping[str, Any]) -> bytes:
        """A chunk of no choice with `headrace.timeline`, for an answer whose last chunk another server made."""
        return self._opening + b'],"headrace":' + sse.json_value({"timeline": timeline}) + self._closing

    def delta(self, index: int, delta: Delta) -> bytes:
        """The chunk for `delta`, a whole event; b"" if nothing in it is for the client."""
        logprobs = delta.logprobs if self._logprobs else ()
        before = self._before.get(index)
        if before is not None and not logprobs:
            return before + sse.json_string(delta.text) + self._after if delta.text else b""
        return self._slowly(index, delta.text, logprobs) if delta.text or logprobs else b""

    def finish(self, index: int, reason: FinishReason, timeline: Mapping[str, Any] | None) -> bytes:
        """The choice's last chunk, with `headrace.timeline` if given; before it the first chunk if there was none."""
        first = b"" if index in self._before else self._slowly(index, "", ())
        ours = b"" if timeline is None else b',"headrace":' + sse.json_value({"timeline": timeline})
        ending = self._NO_LOGPROBS + b',"finish_reason":' + sse.json_string(reason) + b"}]"
        return first + self._opening + b'{"index":%d,' % index + self._LAST + ending + ours + self._closing

    def end(self, usage: Usage | None) -> bytes:
        """The end of a stream that went well: the usage chunk, if it is given and was asked for, and `[DONE]`."""
        if usage is None or not self._usage:
            return sse.DONE
        return self._opening + b'],"usage":' + sse.json_value(usage.report()) + b"}\n\n" + sse.DONE

    def body(self, choices: Sequence[Choice], usage: Usage, timeline: Mapping[str, Any] | None) -> bytes:
        """The JSON of a response that is not streamed."""
        in_order = sorted(choices, key=lambda choice: choice.index)
        answer = {**self._head, "choices": [self._whole(choice) for choice in in_order], "usage": usage.report()}
        if timeline is not None:
            answer["headrace"] = {"timeline": timeline}
        return sse.json_value(answer)

    def _slowly(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """A chunk that is its choice's first or carries logprobs."""
        before = self._before.get(index)
        if before is None:
            start = self._opening + b'{"index":%d,' % index
            self._before[index] = start + self._BEFORE
            before, text = start + self._BEFORE_FIRST, self._echoed(index) + text
        if not logprobs:
            return before + sse.json_string(text) + self._after
        report = b',"logprobs":' + sse.json_value(self._report(index, logprobs)) + b',"finish_reason":null}]'
        return before + sse.json_string(text) + self._AFTER + report + self._closing

    def _echoed(self, index: int) -> str:
        """What stands before the choice's first text."""
        return ""

    @abstractmethod
    def _report(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` object of a chunk: the choice's next tokens."""

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """The choice as it stands in `body`."""


class ChatAnswer(Answer):
    """`POST /v1/chat/completions`"""

    _OBJECT = "chat.completion"
    _CHUNK = "chat.completion.chunk"
    _BEFORE = b'"delta":{"content":'
    _BEFORE_FIRST = b'"delta":{"role":"assistant","content":'
    _AFTER = b"}"
    _LAST = b'"delta":{}'
    _NO_LOGPROBS = b""

    def _report(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return _chat_logprobs(logprobs)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.reason,
        }


class CompletionAnswer(Answer):
    """`POST /v1/completions`. Log probabilities cover the answer's tokens, not those of an echoed prompt."""

    _OBJECT = "text_completion"
    _CHUNK = "text_completion"
    _BEFORE = b'"text":'
    _BEFORE_FIRST = b'"text":'
    _AFTER = b""
    _LAST = b'"text":""'
    _NO_LOGPROBS = b',"logprobs":null'

    def __init__(self, id: str, created: int, model: str, *, options: Options, echo: Sequence[str] = ()) -> None:
        """`echo`: the text of each prompt, in order, if the caller wants it in front of the answers; else empty."""
        super().__init__(id, created, model, options=options)
        self._echo = echo
        self._n = options.n
        self._offsets: dict[int, int] = {}
        """Characters of each choice's text before its next token."""

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._n] if self._echo else ""

    def _report(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        offset = self._offsets.get(index)
        report, self._offsets[index] = _completion_logprobs(
            logprobs, len(self._echoed(index)) if offset is None else offset
        )
        return report

    def _whole(self, choice: Choice) -> dict[str, Any]:
        echoed = self._echoed(choice.index)
        return {
            "index": choice.index,
            "text": echoed + choice.text,
            "logprobs": _completion_logprobs(choice.logprobs, len(echoed))[0] if self._logprobs else None,
            "finish_reason": choice.reason,
        }


# Log probabilities ────────────────────────────────────────────────────────────────────────────────────────────────────


def _finite(logprob: float) -> float:
    """<= 0 and >= MIN_LOGPROB, whatever the engine's arithmetic gave; NaN counts as the least."""
    return min(0.0, logprob) if logprob > MIN_LOGPROB else MIN_LOGPROB


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    """`token` is for reading: bytes that are no whole character become U+FFFD; `bytes` are exact."""
    return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {**_token(entry.piece, entry.logprob), "top_logprobs": [_token(piece, value) for _, piece, value in entry.top]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, Any], int]:
    """The older format, lists side by side. `offset` (characters): where the first token begins; gives the end too."""
    offsets: list[int] = []
    top: list[dict[str, float]] = []
    for entry in logprobs:
        offsets.append(offset)
        # Characters are counted where they begin, so that a token of half a character moves on by one or by none.
        offset += sum(byte & 0xC0 != 0x80 for byte in entry.piece)
        likeliest: dict[str, float] = {}
        for _, piece, value in ((entry.token, entry.piece, entry.logprob), *entry.top):
            likeliest.setdefault(piece.decode("utf-8", "replace"), _finite(value))
        top.append(likeliest)
    report = {
        "tokens": [entry.piece.decode("utf-8", "replace") for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }
    return report, offset
