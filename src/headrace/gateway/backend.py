"""An engine as a request meets it, whatever kind it is, and how a request gets one.

    App ── alias ──▶ Fleet ── Lease ──▶ Backend ── parse, prepare ──▶ Work ── submit ──▶ events
                                           llama: `model.ServedModel`      openai: `upstream.Upstream`

Rules: an attempt holds a lease from before its submit to its end, and says how it ended: that is how the fleet learns
who is well. A backend is asked in this order: `parse` (any thread), `prepare`, `submit`. Everything a refusal needs is
in the exception; what is refused was not begun.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrace.core.events import Answered, FinishReason
from headrace.core.request import Ask, Call, Generation, Options, Sampling
from headrace.engines.base import EngineStats, Lives

if TYPE_CHECKING:
    from headrace.gateway.model import ServedModel

Kind = Literal["llama", "openai"]
End = Literal["ok", "cancelled", "refused", "failed", "slow"]
"""How an attempt ended: with all of its answer; its client left; it was refused for what the client asked or because
our own queue is full, which says nothing of the engine; it broke off or did not take it; it gave no text in time."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request, ready for its engine. Choice index = prompt index * n + i."""

    parts: tuple[Generation | Call, ...]
    """One a prompt, or one call for all; none when no token is wanted."""
    choices: int
    prompt_tokens: int
    """Each prompt counted once, however many choices share it; 0 if only the engine can tell."""
    options: Options | None = None
    """The request's, as the engine's own reading gave them; None: as `Ask` has them."""
    echo: tuple[str, ...] = ()
    """For completions with echo: the text of each prompt."""
    reason: FinishReason = "length"
    """Why it is over, if no token is wanted."""
    hidden: int = 0
    """Characters at the beginning of its text that the reader of a continued answer has already."""


class Sink(Protocol):
    """Takes events, on the event loop."""

    def __call__(self, event: Answered, /) -> None: ...


class Backend(Protocol):
    """Everything but `parse` on the event loop."""

    @property
    def kind(self) -> Kind: ...

    @property
    def ready(self) -> bool:
        """Work submitted now is taken."""
        ...

    @property
    def created(self) -> int:
        """Unix time of the model, for `GET /v1/models`."""
        ...

    @property
    def clock_offset(self) -> float:
        """What to add to the stamps in `Marks` to read them on the server's clock, in s."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def lives(self) -> Lives: ...

    def parse(self, ask: Ask) -> Any:
        """What `prepare` takes. Raises RequestError, EngineUnavailable."""
        ...

    async def prepare(self, ask: Ask, parsed: Any, rids: Iterator[int]) -> Work:
        """Raises RequestError; EngineUnavailable if the engine cannot continue what was told (`ask.told`)."""
        ...

    def submit(self, part: Generation | Call, sink: Sink) -> None:
        """Raises ServiceError."""
        ...

    def cancel(self, rid: int) -> None:
        """Stop it at once; its sink is not called again. Unknown rids are ignored."""
        ...

    def pause(self, rid: int) -> None: ...

    def resume(self, rid: int) -> None: ...

    def predict(self, size: int, shared: float, priority: int) -> float:
        """Seconds to the first text of a prompt of `size` bytes of which the share `shared`, 0 to 1, came here before;
        0 if that is not known."""
        ...

    async def close(self) -> None: ...


class Lease(Protocol):
    """The right to use an engine for one attempt. It keeps a draining engine alive."""

    @property
    def engine(self) -> str:
        """Its name."""
        ...

    @property
    def backend(self) -> Backend: ...

    @property
    def family(self) -> str:
        """Engines of one family may continue each other's answers."""
        ...

    @property
    def ttft_timeout_s(self) -> float | None:
        """Without text for that long, another engine is tried."""
        ...

    def first_text(self, seconds: float) -> None:
        """Text came `seconds` after the submit."""
        ...

    def close(self, end: End) -> None:
        """Only the first call counts."""
        ...


class Fleet(Protocol):
    """Aliases and the engines behind them."""

    @property
    def aliases(self) -> Collection[str]:
        """Names that clients may ask for. Empty: nothing is loaded yet."""
        ...

    @property
    def backends(self) -> Mapping[str, Backend]:
        """Engine name → engine, those that are loaded."""
        ...

    def created(self, alias: str) -> int:
        """Unix time, for `GET /v1/models`."""
        ...

    def sampling(self, alias: str) -> Sampling | None:
        """What holds where a request is silent, for `GET /v1/models`: of the first engine of ours that is loaded; None
        if there is none."""
        ...

    def ready(self, alias: str) -> bool:
        """At least one of its engines takes work."""
        ...

    def lease(self, ask: Ask, *, without: Collection[str] = (), family: str | None = None) -> Lease:
        """The engine for `ask.model`, an alias: none of `without` (names), of `family` if that is given.

        Raises EngineUnavailable if there is none, ModelNotFound if there is no such alias.
        """
        ...

    def others(self, ask: Ask, *, without: Collection[str]) -> bool:
        """Would there be one?"""
        ...

    def own(self, alias: str) -> ServedModel:
        """An engine of ours that answers for `alias` and is loaded, for what costs it no token: no turn is taken and
        nothing counted. Raises EngineUnavailable if it is not loaded now, Unsupported if there is none."""
        ...

    async def close(self) -> None:
        """Close every engine."""
        ...
