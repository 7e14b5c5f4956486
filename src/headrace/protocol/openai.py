"""OpenAI's chat and completion requests: bytes → a request that cannot be wrong, or InvalidRequest.

    bytes ── read ──▶ dict ── parse_chat ───────▶ ChatRequest
                        └──── parse_completion ─▶ CompletionRequest

Rules: a field we know is checked to its last value; one we do not know is ignored; one that asks for what we cannot do
yet is refused, never passed over. null is absence. The body is decoded once, so of a key that stands twice everybody
sees the last value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.core.request import BATCH, INTERACTIVE, ChatRequest, CompletionRequest, Decay, Options, Pacing, Sampling
from headrace.protocol.fields import (
    MAX_INT,
    Field,
    above_zero,
    boolean,
    decay,
    integer,
    logit_bias,
    mapping,
    nested_deeper,
    number,
    one_of,
    pace,
    shown,
    stop_strings,
    text,
    unsupported,
    wrong,
)
from headrace.protocol.messages import parse_messages

MAX_DEPTH = 200
"""Levels of arrays and objects in a body: far more than any schema needs, far less than a stack holds."""
MAX_PROMPTS = 256
"""Prompts in one completion request."""
COMPLETION_MAX_TOKENS = 16
"""The default of the completions API; a chat answer may fill the context."""
OPENAI = Sampling()
"""OpenAI's own defaults."""
_SEED_MASK = 2**63 - 1

# What both have in common ─────────────────────────────────────────────────────────────────────────────────────────────
MODEL: Field[str | None] = Field("model", text, None)
N: Field[int] = Field("n", integer(1, 16), 1)
MAX_TOKENS: Field[int | None] = Field("max_tokens", integer(1, MAX_INT), None)
MAX_COMPLETION_TOKENS: Field[int | None] = Field("max_completion_tokens", integer(1, MAX_INT), None)
STOP: Field[tuple[str, ...]] = Field("stop", stop_strings, ())
TEMPERATURE: Field[float] = Field("temperature", number(0, 2), 1.0)
TOP_P: Field[float] = Field("top_p", number(0, 1), 1.0)
TOP_K: Field[int] = Field("top_k", integer(-1, MAX_INT), 0)
MIN_P: Field[float] = Field("min_p", number(0, 1), 0.0)
REPETITION_PENALTY: Field[float] = Field("repetition_penalty", above_zero, 1.0)
PRESENCE_PENALTY: Field[float] = Field("presence_penalty", number(-2, 2), 0.0)
FREQUENCY_PENALTY: Field[float] = Field("frequency_penalty", number(-2, 2), 0.0)
SEED: Field[int | None] = Field("seed", integer(-(2**63), 2**63 - 1), None)
STREAM: Field[bool] = Field("stream", boolean, False)
STREAM_OPTIONS: Field[Mapping[str, Any] | None] = Field("stream_options", mapping, None)
INCLUDE_USAGE: Field[bool] = Field("stream_options.include_usage", boolean, False)
HEADRACE: Field[Mapping[str, Any]] = Field("headrace", mapping, {})
TIMINGS: Field[bool] = Field("headrace.timings", boolean, False)
CACHE: Field[bool] = Field("headrace.cache", boolean, True)
TEMPERATURE_DECAY: Field[Decay | None] = Field("headrace.temperature_decay", decay, None)
PRIORITY: Field[int] = Field("headrace.priority", one_of({"interactive": INTERACTIVE, "batch": BATCH}), INTERACTIVE)
RESUME: Field[bool] = Field("headrace.resume", boolean, False)
PACE: Field[Pacing] = Field("headrace.pace", pace, Pacing())
PACE_MAX_DELAY_MS: Field[float] = Field("headrace.pace_max_delay_ms", number(1, 10_000), 400.0)
TTFT_DEADLINE_MS: Field[float | None] = Field("headrace.ttft_deadline_ms", number(1, 600_000), None)

# Chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────
CHAT_LOGPROBS: Field[bool] = Field("logprobs", boolean, False)
TOP_LOGPROBS: Field[int | None] = Field("top_logprobs", integer(0, 20), None)

# Completions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
ECHO: Field[bool] = Field("echo", boolean, False)
PARSE_SPECIAL: Field[bool] = Field("parse_special", boolean, False)
ECHO_MAX_TOKENS: Field[int] = Field("max_tokens", integer(0, MAX_INT), COMPLETION_MAX_TOKENS)
LOGPROBS: Field[int | None] = Field("logprobs", integer(0, 20), None)
BEST_OF: Field[int | None] = Field("best_of", integer(1, MAX_INT), None)

# What is not there yet ────────────────────────────────────────────────────────────────────────────────────────────────
RESPONSE_FORMAT: Field[None] = Field("response_format", unsupported("structured output is", {"type": "text"}), None)
CHAT_UNSUPPORTED = (
    Field("tools", unsupported("tool calls are", []), None),
    Field("tool_choice", unsupported("tool calls are", "none", "auto"), None),
    Field("functions", unsupported("tool calls are", []), None),
    Field("function_call", unsupported("tool calls are", "none", "auto"), None),
    RESPONSE_FORMAT,
)
COMPLETION_UNSUPPORTED = (
    Field("suffix", unsupported("inserting before a suffix is", ""), None),
    RESPONSE_FORMAT,
)


def read(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is. Strict JSON in UTF-8; a byte order mark is accepted. Raises InvalidRequest."""
    if not body:
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        value = msgspec.json.decode(body.removeprefix(b"\xef\xbb\xbf"))
    except RecursionError:
        raise InvalidRequest(_too_deep()) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {shown(value)}")
    if nested_deeper(value, MAX_DEPTH):
        raise InvalidRequest(_too_deep())
    return value


def _too_deep() -> str:
    return f"the body is nested too deep; at most {MAX_DEPTH} levels of arrays and objects are accepted"


def model_of(fields: Mapping[str, Any]) -> str:
    """The name of the model asked for. Raises InvalidRequest."""
    model = MODEL.read(fields)
    if not model:
        raise wrong("model", "the name of a model", fields.get("model"))
    return model


def common_options(fields: Mapping[str, Any]) -> Options:
    """What must be known of a request whatever engine it goes to; the rest is for the engine to judge.

    Raises InvalidRequest.
    """
    max_tokens = fields.get("max_tokens", fields.get("max_completion_tokens"))
    return _options(fields, Sampling(), max_tokens if type(max_tokens) is int else None)


def parse_chat(
    fields: Mapping[str, Any], *, n_vocab: int, seed: Callable[[], int], defaults: Sampling = OPENAI
) -> ChatRequest:
    """The request in `read`'s object. Raises InvalidRequest.

    `n_vocab` bounds token ids; `seed()` draws a seed, 0 <= seed < 2**63, for a caller who gave none; `defaults`: the
    temperature and what narrows the choice, where the request is silent.
    """
    model = model_of(fields)
    for row in CHAT_UNSUPPORTED:
        row.read(fields)
    logprobs = CHAT_LOGPROBS.read(fields)
    top = TOP_LOGPROBS.read(fields)
    if top is not None and not logprobs:
        raise InvalidRequest(f"top_logprobs is {top}, which needs logprobs to be true", param="top_logprobs")
    max_tokens, newer = MAX_TOKENS.read(fields), MAX_COMPLETION_TOKENS.read(fields)
    if max_tokens is None:
        max_tokens = newer
    elif newer not in (None, max_tokens):
        raise InvalidRequest(
            f"max_tokens is {max_tokens} and max_completion_tokens is {newer}; send one of them", param="max_tokens"
        )
    wanted = (top or 0) if logprobs else None
    sampling = _sampling(fields, n_vocab=n_vocab, seed=seed, defaults=defaults, logprobs=wanted)
    return ChatRequest(
        model=model, messages=parse_messages(fields.get("messages")), options=_options(fields, sampling, max_tokens)
    )


def parse_completion(
    fields: Mapping[str, Any], *, n_vocab: int, seed: Callable[[], int], defaults: Sampling = OPENAI
) -> CompletionRequest:
    """The request in `read`'s object. Raises InvalidRequest.

    `n_vocab` bounds token ids; `seed()` draws a seed, 0 <= seed < 2**63, for a caller who gave none; `defaults`: the
    temperature and what narrows the choice, where the request is silent.
    """
    model = model_of(fields)
    for row in COMPLETION_UNSUPPORTED:
        row.read(fields)
    echo = ECHO.read(fields)
    max_tokens = ECHO_MAX_TOKENS.read(fields)
    if max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens must be at least 1 unless echo is true; got 0", param="max_tokens")
    sampling = _sampling(fields, n_vocab=n_vocab, seed=seed, defaults=defaults, logprobs=LOGPROBS.read(fields))
    options = _options(fields, sampling, max_tokens)
    best_of = BEST_OF.read(fields)
    if best_of not in (None, options.n):
        raise InvalidRequest(f"best_of must be equal to n, which is {options.n}; got {best_of}", param="best_of")
    return CompletionRequest(
        model=model,
        prompts=_prompts(fields.get("prompt"), n_vocab),
        echo=echo,
        parse_special=PARSE_SPECIAL.read(fields),
        options=options,
    )


def _sampling(
    fields: Mapping[str, Any], *, n_vocab: int, seed: Callable[[], int], defaults: Sampling, logprobs: int | None
) -> Sampling:
    given = SEED.read(fields)
    return Sampling(
        temperature=TEMPERATURE.read_or(fields, defaults.temperature),
        top_p=TOP_P.read_or(fields, defaults.top_p),
        top_k=max(0, TOP_K.read_or(fields, defaults.top_k)),  # -1 and 0 are two spellings of "off"
        min_p=MIN_P.read_or(fields, defaults.min_p),
        repetition_penalty=REPETITION_PENALTY.read_or(fields, defaults.repetition_penalty),
        presence_penalty=PRESENCE_PENALTY.read(fields),
        frequency_penalty=FREQUENCY_PENALTY.read(fields),
        logit_bias=_logit_bias(n_vocab).read(fields),
        seed=seed() if given is None else given & _SEED_MASK,  # a negative seed keeps its low 63 bits
        logprobs=logprobs,
        decay=TEMPERATURE_DECAY.read(HEADRACE.read(fields)),
    )


def _logit_bias(n_vocab: int) -> Field[tuple[tuple[int, float], ...]]:
    return Field("logit_bias", logit_bias(n_vocab), ())


def _options(fields: Mapping[str, Any], sampling: Sampling, max_tokens: int | None) -> Options:
    stream = STREAM.read(fields)
    stream_options = STREAM_OPTIONS.read(fields)
    if stream_options is not None and not stream:
        raise InvalidRequest("stream_options is only for a request with stream set to true", param="stream_options")
    ours = HEADRACE.read(fields)
    deadline_ms = TTFT_DEADLINE_MS.read(ours)
    return Options(
        max_tokens=max_tokens,
        n=N.read(fields),
        stop=STOP.read(fields),
        sampling=sampling,
        stream=stream,
        include_usage=INCLUDE_USAGE.read(stream_options or {}),
        timings=TIMINGS.read(ours),
        cache=CACHE.read(ours),
        priority=PRIORITY.read(ours),
        deadline=None if deadline_ms is None else deadline_ms / 1000,
        resume=RESUME.read(ours),
        pacing=replace(PACE.read(ours), max_delay_s=PACE_MAX_DELAY_MS.read(ours) / 1000),
    )


# Prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _prompts(prompt: Any, n_vocab: int) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each text or token ids. Text may be empty: only a tokenizer knows what becomes of it."""
    rule = "a string, a list of strings, a list of token ids or a list of such lists"
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        raise wrong("prompt", rule, prompt)
    if isinstance(prompt[0], (int, float)):
        return (_token_ids("prompt", prompt, n_vocab),)
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are accepted", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    if all(isinstance(item, list) for item in prompt):
        return tuple(_token_ids(f"prompt[{i}]", ids, n_vocab) for i, ids in enumerate(prompt))
    raise InvalidRequest(f"prompt must be {rule}; its items are of different or other kinds", param="prompt")


def _token_ids(at: str, ids: list[Any], n_vocab: int) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest(f"{at} is an empty list; give at least one token id", param="prompt")
    for i, token in enumerate(ids):
        # type() rather than isinstance(): true is no token id.
        if type(token) is not int or not 0 <= token < n_vocab:
            raise InvalidRequest(
                f"{at}[{i}] must be a token id from 0 to {n_vocab - 1}; got {shown(token)}", param="prompt"
            )
    return tuple(ids)
