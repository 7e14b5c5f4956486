"""Bodies of requests to another OpenAI-compatible server, and how an answer that was begun goes on there.

    ask ── outgoing ──▶ body                                        from the beginning
    ask + told ── steps of its flavour ──▶ prompt ── going_on ──▶ body of /v1/completions

    vllm, headrace   chat: /tokenize of the messages gives the prompt's ids; told text: its ids, or /tokenize
    llama-server     chat: /apply-template gives the prompt's text; told text is appended
    all but openai completions: told text is appended to the prompt

Rules: the caller's fields go out as they came, but for the model's name, for usage (we always want to know), for our
own object, and for those that are ours to decide: whose cached prefixes it sees, and who is served first. Where they
are silent the other server's own sampling defaults hold, but for an answer that an engine of ours began: that goes on
with those that it began with. An answer of which more was shown than the text of one choice cannot go on. A field that
we do not know may mean anything for a chat; for its continuation only fields that completions have too are sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from headrace.core.errors import EngineUnavailable
from headrace.core.request import BATCH, Ask, Told
from headrace.protocol.defaults import spelt

Flavour = Literal["openai", "vllm", "llama-server", "headrace", "ollama", "sglang"]
FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
DEFAULT_MAX_TOKENS = 16
"""Of the completions API; llama-server has none."""

_CHAT_ONLY = frozenset((
    "messages", "max_completion_tokens", "max_tokens", "n", "logprobs", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "functions", "function_call", "response_format", "reasoning_effort", "modalities", "audio",
    "prediction", "verbosity", "web_search_options", "store", "metadata", "service_tier", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs", "documents",
    "stream_options", "headrace", "prompt", "echo", "suffix", "best_of",
))  # fmt: skip
_NO_CONTINUATION = ("tools", "functions", "logprobs", "suffix", "echo", "structured_outputs", "guided_json", "grammar")
_DECIDED = ("cache_salt", "extra_key", "priority")
"""Of vLLM and SGLang: not for a caller to say. vLLM refuses every priority but 0 unless it was started for them, so a
class of ours is not turned into one."""
_SALTED: frozenset[Flavour] = frozenset(("vllm", "sglang"))
"""Who keeps cached prefixes apart by `cache_salt`."""
_RENDERED = ("chat_template", "chat_template_kwargs")
"""What shapes the prompt besides the messages."""


def outgoing(ask: Ask, model: str, flavour: Flavour) -> bytes:
    """The body for `model` there."""
    fields = {**ask.fields, "model": model}
    _decide(fields, ask, flavour)
    if ask.options.stream:
        fields["stream_options"] = _stream_options(ask.fields)
    return encoded(fields)


def encoded(fields: Mapping[str, Any]) -> bytes:
    """JSON."""
    return msgspec.json.encode(fields)


def choices(ask: Ask) -> int:
    """Over all prompts."""
    prompt = ask.fields.get("prompt")
    several = not ask.chat and isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return ask.options.n * (len(prompt) if several and isinstance(prompt, list) else 1)


def check_continuable(ask: Ask) -> None:
    """Raises EngineUnavailable if no server could continue the answer."""
    fields = ask.fields
    form = fields.get("response_format")
    plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
    if choices(ask) != 1 or not plain or any(fields.get(name) for name in _NO_CONTINUATION):
        raise EngineUnavailable("an answer of this kind cannot be continued")
    if ask.chat and not _only_text(fields.get("messages")):
        raise EngineUnavailable("an answer to more than text cannot be continued")


def rendering(ask: Ask, model: str, flavour: Flavour) -> tuple[str, bytes] | None:
    """The request that turns the messages into a prompt: path under the server's root, body. None: it has none."""
    fields = ask.fields
    shape = {name: fields[name] for name in _RENDERED if fields.get(name) is not None}
    messages = fields.get("messages")
    if flavour in ("vllm", "headrace"):
        return "/tokenize", encoded({"model": model, "messages": messages, "add_generation_prompt": True, **shape})
    if flavour == "llama-server":
        return "/apply-template", encoded({"messages": messages, **shape})
    return None


def tokenizing(text: str, model: str, flavour: Flavour) -> tuple[str, bytes] | None:
    """The request that turns text into token ids."""
    if flavour in ("vllm", "headrace"):
        return "/tokenize", encoded({"model": model, "prompt": text, "add_special_tokens": False})
    if flavour == "llama-server":
        return "/tokenize", encoded({"content": text, "add_special": False})
    return None


class Rendered(msgspec.Struct, frozen=True):
    """What these requests answer."""

    tokens: list[int] | None = None
    prompt: str | None = None
    max_model_len: int | None = None
    """Tokens of prompt and answer together."""


def rendered(body: bytes) -> Rendered:
    """Raises EngineUnavailable."""
    try:
        return msgspec.json.decode(body, type=Rendered)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EngineUnavailable("the engine does not say how it reads the prompt") from None


def prompt_of(ask: Ask) -> str | list[int]:
    """The prompt of a completion request with one. Raises EngineUnavailable."""
    prompt = ask.fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        return prompt
    raise EngineUnavailable("an answer to a prompt of this kind cannot be continued")


def going_on(
    ask: Ask, told: Told, model: str, flavour: Flavour, prompt: str | list[int], room: int | None = None
) -> bytes:
    """The body of the completion request that goes on after `prompt`, which ends with what was told already. `room`:
    tokens that the context still holds; None: not known. Raises EngineUnavailable."""
    given = ask.fields
    most = given.get("max_tokens") if given.get("max_tokens") is not None else given.get("max_completion_tokens")
    if type(most) is not int:
        most = None
    if most is None and not ask.chat and flavour != "llama-server":
        most = DEFAULT_MAX_TOKENS
    if most is not None:
        most -= told.tokens
        if most <= 0:
            raise EngineUnavailable("the answer has all its tokens")
    elif room is not None:
        most = room
    elif flavour != "llama-server":
        raise EngineUnavailable("the engine does not say how many tokens it has room for")
    fields = {name: value for name, value in given.items() if name not in _CHAT_ONLY}
    fields |= {"model": model, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    if most is not None:
        fields["max_tokens"] = most
    if ask.sampling is not None:
        # The other server's own defaults would change the way in which one answer is drawn, in the middle of it.
        begun = spelt(ask.sampling, llama_server=flavour == "llama-server")
        fields |= {name: value for name, value in begun.items() if given.get(name) is None}
    fields["headrace"] = given.get("headrace")
    _decide(fields, ask, flavour)
    return encoded(fields)


def _decide(fields: dict[str, Any], ask: Ask, flavour: Flavour) -> None:
    """What is not as the caller wrote it: tenant and class. Another Headrace gets our object, without what this server
    does itself."""
    for name in _DECIDED:
        fields.pop(name, None)
    if ask.salt and flavour in _SALTED:
        fields["cache_salt"] = hashlib.sha256(b"headrace" + ask.salt.encode()).hexdigest()[:32]
    ours = fields.pop("headrace", None)
    if flavour != "headrace":
        return
    ours = ours if isinstance(ours, dict) else {}
    own = ("resume", "timings", "priority")
    kept = {name: value for name, value in ours.items() if name not in own and "pace" not in name}
    if ask.options.priority == BATCH:
        kept["priority"] = "batch"
    if kept:
        fields["headrace"] = kept


def _stream_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = fields.get("stream_options")
    options = dict(given) if isinstance(given, dict) else {}
    # Usage on every chunk would be taken off again.
    options.pop("continuous_usage_stats", None)
    return {**options, "include_usage": True}


def _only_text(messages: Any) -> bool:
    """No picture or sound in it: a prompt in text or token ids cannot hold those."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(
            not isinstance(part, dict) or part.get("type") != "text" for part in content
        ):
            return False
    return True
