"""What is asked for, once it has been parsed: types that cannot be wrong.

`protocol/` makes them from bytes, nobody checks them again. `Generation` is the engine's share of a request and the
only one that crosses a process boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec


class Decay(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Temperature that falls along the answer: before token number i (from 0) of the answer it is
    max(floor, temperature · factor^(i // every)), and never above `temperature`."""

    every: int
    """Tokens between two reductions, >= 1."""
    factor: float
    """0 < factor <= 1"""
    floor: float
    """>= 0"""


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the next token is drawn. Ranges are checked by `protocol/`."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, addend to its logit); ids are within the vocabulary."""
    seed: int = 0
    """0 <= seed < 2**63. A request without one gets a random one at the edge."""
    logprobs: int | None = None
    """None: off. k >= 0: the drawn token's and the k likeliest alternatives'."""
    decay: Decay | None = None
    """None: the temperature stays as it is."""


class SamplingDefaults(msgspec.Struct, frozen=True, gc=False):
    """How a model's makers say that it is to be sampled, as far as they say it. Names and ranges are a request's; None:
    they do not say."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """These, and the other's where these say nothing."""
        return SamplingDefaults(**(_said(other) | _said(self)))

    def sampling(self) -> Sampling:
        """What holds for a request that says nothing: these, and OpenAI's where these say nothing."""
        return Sampling(**_said(self))


def _said(defaults: SamplingDefaults) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(defaults).items() if value is not None}


INTERACTIVE, BATCH = 0, 1
"""Priorities: somebody waits for it; nobody does, it may be passed by all others."""


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to continue, `n` times. Choice i of it draws with seed + i."""

    rid: int
    """Unique within the server's life; names the stream between server and engine."""
    prompt: list[int]
    """At least one token; len(prompt) + max_tokens <= the engine's n_ctx."""
    max_tokens: int
    """>= 1"""
    n: int = 1
    stop: tuple[str, ...] = ()
    """At most four, none empty."""
    sampling: Sampling = Sampling()
    cache: bool = True
    """False: neither read nor leave cached prefixes."""
    priority: int = INTERACTIVE
    deadline: float | None = None
    """Seconds from arrival within which the first token is wanted; None: as the engine's settings say."""
    salt: str = ""
    """Whose cached prefixes it may see: those of the same salt, and those of no salt that were pinned for all."""
    resume: tuple[tuple[int, ...] | None, ...] = ()
    """A replay: for each choice the tokens that its reader has seen; None for a choice that is over. Empty: a new
    generation."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """How an answer is released to its reader. The default: everything at once."""

    window: int = 1
    """Tokens a write; the first text goes at once."""
    adaptive: bool = False
    """Evenly, at the rate at which it comes."""
    max_delay_s: float = 0.4
    """What that may add to any piece of text; > 0."""

    @property
    def off(self) -> bool:
        """Nothing is ever held."""
        return self.window == 1 and not self.adaptive


@dataclass(frozen=True, slots=True)
class Options:
    """What chat and completion requests have in common."""

    max_tokens: int | None = None
    """None: as much as the context holds. 0 only for completions with echo."""
    n: int = 1
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    include_usage: bool = False
    timings: bool = False
    """`"headrace": {"timings": true}`: the timeline on the last chunk."""
    cache: bool = True
    priority: int = INTERACTIVE
    deadline: float | None = None
    """Seconds; see Generation."""
    resume: bool = False
    """`"headrace": {"resume": true}`: the stream can be taken up again, so its events carry ids."""
    pacing: Pacing = Pacing()


@dataclass(frozen=True, slots=True)
class Message:
    """One turn as the chat template sees it: `fields` holds role, content and what else the template may read.

    `content` is text (parts already joined); "" when the caller gave null or nothing.
    """

    role: str
    content: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Further keys: name, tool_calls, tool_call_id."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`POST /v1/chat/completions`"""

    model: str
    messages: tuple[Message, ...]
    options: Options


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`POST /v1/completions`. Choice index = prompt index * n + i."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    parse_special: bool
    """Read control-token texts inside a text prompt as control tokens (`"parse_special": true`); off by default."""
    options: Options


@dataclass(frozen=True, slots=True)
class Told:
    """What the reader has of an answer that another engine is to continue (choice 0 of one)."""

    text: str
    ids: tuple[int, ...] | None
    """The tokens it is made of, and those drawn since of which nothing was shown yet; None: not known."""
    tokens: int
    """How many they are, as far as that can be told."""
    exact: bool = False
    """`ids` are known to say `text` and no more."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request before an engine is chosen: what every engine must know, and the caller's fields for the engine's own
    reading. Every attempt at it is made from the same one."""

    chat: bool
    """`/v1/chat/completions`; else `/v1/completions`."""
    model: str
    """The name that the client asked for: an alias."""
    fields: Mapping[str, Any]
    """The body's object."""
    size: int
    """Bytes of the body."""
    options: Options
    seed: int
    """For an engine of ours if the caller gave none; the same for each attempt."""
    salt: str = ""
    """The tenant; see Generation."""
    told: Told | None = None
    """None: from the beginning."""
    sampling: Sampling | None = None
    """With `told`: how the engine of ours that began the answer drew its tokens, so that its rest is drawn so too
    wherever the request is silent; None: another server began it, whose defaults nobody knows."""
    request_id: str = ""
    """Handed on to a server behind us; fit for a header."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request to another OpenAI-compatible server. Its events are `Relayed`, or, if `told` was given, those of an
    engine of ours."""

    rid: int
    ask: Ask
    n: int = 1
    """Choices, over all prompts."""
