"""What an engine says about a generation, in order, for each (rid, index):

    Admitted → Delta* → Finished          the good end
    Admitted? → Delta* → Failed           the bad one: `Failed` ends all choices of its rid at once

After `Finished` of every choice, or `Failed`, nothing more comes for that rid. After a cancel nothing comes either.
Stamps are seconds on the clock of the process that made them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.core.errors import HeadraceError

FinishReason = Literal["stop", "length"]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token of the answer with its log probability under the model's own distribution (before temperature)."""

    token: int
    piece: bytes
    logprob: float
    """<= 0, finite; -9999.0 stands for minus infinity."""
    top: tuple[tuple[int, bytes, float], ...] = ()
    """The likeliest tokens, best first: (id, bytes, logprob)."""


class Marks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When a choice passed the engine's stages on its way to the first text."""

    queued: float
    """The engine has the request."""
    scheduled: float
    """The first plan with it in: the queue ends."""
    restored: float
    """Cached prefix in place, first batch starts."""
    prefilled: float
    """The batch that held the prompt's last token is computed."""
    sampled: float
    """The first visible text exists."""


class Admitted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    """The choice left the queue; prefill starts."""

    rid: int
    index: int
    cached: int
    """Prompt tokens that need not be computed, <= len(prompt) - 1."""


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """More of the answer. `text` may be empty when tokens gave no visible text (only with logprobs)."""

    rid: int
    index: int
    text: str
    tokens: int
    """Tokens since the last event of this choice."""
    logprobs: tuple[TokenLogprob, ...] = ()
    marks: Marks | None = None
    """On the first delta with text."""
    ids: tuple[int, ...] = ()
    """The tokens themselves, `tokens` of them: what a replay goes on from."""
    holds: bool = False
    """They say more than was shown so far: what may become a stop string, or half a character, is held back."""


class Finished(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """The choice is complete."""

    rid: int
    index: int
    reason: FinishReason
    completion_tokens: int
    """All tokens drawn, the ending token among them."""
    prompt_tokens: int = 0
    """Those of the request's prompt, from an engine that alone can tell; 0: whoever asks counted them."""


class Failed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """The generation cannot go on. `message` is fit for the user; `code` is the error's code."""

    rid: int
    code: str
    message: str


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """What a server behind us says a request cost; its own count."""

    prompt: int
    completion: int
    cached: int = 0


class Relayed(msgspec.Struct, frozen=True):
    """Bytes of another server's answer that go to the client as they are: whole events of a stream, or a whole body.

    Made and read in the server's process only.
    """

    rid: int
    raw: bytes
    """To be written; b"" if the event only tells."""
    text: str = ""
    """What of it a reader sees: content, reasoning and arguments of calls, of all choices. It says when the first text
    is there."""
    content: str | None = None
    """The content of choice 0, if that is all that `raw` adds to the answer: such an answer another engine can
    continue. None if there is more to it (calls, logprobs, further choices)."""
    tokens: int = 0
    """As far as that can be told: one a chunk with text; `usage` corrects it."""
    over: bool = False
    """Nothing more comes for the rid: all choices are complete. The terminator of a stream is not part of `raw`."""
    identity: tuple[str, int] | None = None
    """`id` and `created` of the answer, with the first event."""
    usage: Tokens | None = None
    marks: Marks | None = None
    """With the first event that has text."""


class Broken(msgspec.Struct, frozen=True):
    """`Failed` for what happens in the server's process: it ends the rid with an error as it is."""

    rid: int
    error: HeadraceError


Event = Admitted | Delta | Finished | Failed
Answered = Event | Relayed | Broken
"""What a response may be told."""
