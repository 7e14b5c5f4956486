"""The two ports behind which every engine stands.

`StepEngine` lets us schedule each token: it computes one batch at a time and decides nothing. `StreamEngine` takes
whole generations and answers with events. `stepper.LocalEngine` and `supervisor.WorkerEngine` make the second of the
first, so everything above `engines/` knows `StreamEngine` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from headrace.core.attention import Attention
from headrace.core.errors import StartupError
from headrace.core.events import Event
from headrace.core.kv import Pin
from headrace.core.plan import Chunk, StepResult
from headrace.core.request import Generation, SamplingDefaults
from headrace.engines.ladder import TOP
from headrace.kv.tiers import TierStats


class ModelInfo(msgspec.Struct, frozen=True):
    """What the server must know of a model."""

    name: str
    """The name clients use."""
    n_ctx: int
    """Tokens that one sequence may hold, prompt and answer together."""
    n_vocab: int
    chat_template: str | None = None
    """Jinja source."""
    bos: int | None = None
    add_bos: bool = False
    """The tokenizer's own rule for raw text."""
    eos: int | None = None
    eog: tuple[int, ...] = ()
    """Tokens that end an answer."""
    control: dict[str, int] = {}
    """Text → id of every control token."""
    created: int = 0
    """Unix time for `GET /v1/models`."""
    title: str = ""
    """What the model file calls the model (`general.name`), "" if it does not say; files made from it say the same."""
    sampling: SamplingDefaults = SamplingDefaults()
    """What the model file says of how it is to be sampled."""
    faults: tuple[str, ...] = ()
    """What it says of that and cannot be, one line each; it is not used."""
    trained: int = 0
    """Tokens that the model was trained for, as its file says; 0: not told."""

    def refusal(self, generation: Generation) -> str | None:
        """Why an engine would break on this; the server refuses such requests with a better message."""
        n = len(generation.prompt)
        if not 0 < n < self.n_ctx:
            return f"the prompt has {n} tokens; the engine takes 1 to {self.n_ctx - 1}"
        if generation.max_tokens < 1 or n + generation.max_tokens > self.n_ctx:
            return f"prompt and max_tokens are {n} + {generation.max_tokens}; the engine holds {self.n_ctx}"
        if min(generation.prompt) < 0 or max(generation.prompt) >= self.n_vocab:
            return f"a token id is outside 0 to {self.n_vocab - 1}"
        return None


class StepAborted(Exception):
    """`abort()` came while the step ran. The KV of the step's slots is as it was before the step."""


class StepFailed(Exception):
    """The engine could not compute the step; its message is for the log. The KV of the step's slots is undefined."""


class UntrueNumbers(StartupError):
    """What an engine computes while it warms up is not finite: the file's numbers are damaged, or a kernel is wrong."""


class StepEngine(Protocol):
    """Computes batches.

    One thread calls everything but `abort`. Nothing is validated twice: callers keep the rules below.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def n_slots(self) -> int:
        """KV sequence ids."""
        ...

    @property
    def n_cells(self) -> int:
        """KV cells in the pool, one a token."""
        ...

    @property
    def n_batch(self) -> int:
        """Most tokens in a step."""
        ...

    @property
    def n_drafts(self) -> int:
        """Most guesses in a step (`Draw.drafts`, summed over its chunks); 0: it cannot check any."""
        ...

    @property
    def attention(self) -> Attention:
        """How its steps are computed, for the cost model."""
        ...

    def piece(self, token: int) -> bytes:
        """The token's bytes as they appear in an answer; b"" for control tokens."""
        ...

    def copy(self, source: int, target: int, length: int) -> None:
        """Share positions [0, length) of `source` with the empty slot `target`."""
        ...

    def trim(self, slot: int, length: int) -> None:
        """Forget positions >= length of a slot; 0 empties it."""
        ...

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that name everything that shapes the KV; the first call may take a second."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """About how long a saved token is; 0: this engine's KV can neither be saved nor loaded."""
        ...

    def save(self, slot: int, start: int, end: int) -> bytes:
        """The KV of positions [start, end), which the slot holds. Raises StepFailed."""
        ...

    def load(self, slot: int, start: int, end: int, payload: bytes) -> Sequence[int]:
        """Append saved positions [start, end) to a slot that holds [0, start).

        Returns them in the order in which they took cells; empty: it could not, and the slot is as it was.
        """
        ...

    def deepen(self, slot: int, length: int) -> int:
        """Let a slot hold about `length` tokens more that mean nothing, for measuring; the tokens that it holds then.

        Milliseconds, not the time that computing them takes. As before where that cannot be done.
        """
        ...

    def arrange(self, split: int, pad: int) -> None:
        """How the next step is computed: its first `split` chunks in a batch of their own, and the last batch filled
        up with `pad` rows that nobody reads. Only as `attention` says that it can.

        That changes what the step costs, and nothing else: neither what a slot holds nor what its logits mean.
        """
        ...

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        """Compute one batch. Raises StepAborted, StepFailed."""
        ...

    def abort(self) -> None:
        """From any thread: give up the running step as soon as possible; if none runs, the next one may be given up."""
        ...

    def close(self) -> None: ...


class EngineStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How full an engine is, as of its last step."""

    running: int = 0
    """Sequences in prefill or decode."""
    waiting: int = 0
    cells_total: int = 0
    cells_running: int = 0
    """KV cells that running sequences hold."""
    cells_cached: int = 0
    """KV cells kept for reuse; given up as soon as they are needed."""
    slots_free: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Prefilled since start."""
    cached_tokens: int = 0
    """Prompt tokens reused since start."""
    completion_tokens: int = 0
    """Drawn since start."""
    preemptions: int = 0
    cells_shared: int = 0
    """KV cells that more than one sequence has."""
    cells_width: int = 0
    """The highest used KV cell + 1: every step pays for all cells below."""
    fragmentation: float = 0.0
    """Part of the free KV cells outside of their longest row, 0 to 1; looked up now and then, not at every step."""
    slots_running: int = 0
    slots_cached: int = 0
    """KV sequence ids of finished sequences, kept for reuse."""
    prefixes_pinned: int = 0
    """Prefixes that stay in RAM, given or mined."""
    prefill_s: float = 0.0
    """Seconds that a prompt token takes, learned; 0: not known yet."""
    decode_share: float = 0.0
    """What decodes take of each second, 0 to 1."""
    cost_error_p50: float = 0.0
    """|predicted - measured| / measured of the cost model's last steps, looked up now and then."""
    cost_error_p95: float = 0.0
    backlog_tokens: int = 0
    """Prompt tokens of running and waiting sequences that are still to be computed: those cached are not, those shared
    count once."""
    begun_tokens: int = 0
    """Those of them whose generations have begun: the others are counted by the server."""
    drafts: int = 0
    """Tokens guessed since start."""
    drafts_right: int = 0
    broken: int = 0
    """Generations that failed because their logits were not finite."""
    tiers: TierStats = TierStats()
    """KV outside the pool, as of now and then."""


class Lives(msgspec.Struct, frozen=True):
    """What the deaths of an engine's workers have come to since start."""

    restarts: int = 0
    replayed: int = 0
    """Streams that went on in another worker, counted each time."""
    given_up: int = 0
    """Streams that ended with an error because their worker died."""
    rung: str = TOP
    """Which kernels it runs with, see `ladder`."""
    depth: int = 0
    """Rungs below what was configured."""
    note: str = ""
    """Why it stands there, in one line; "" as configured."""


Sink = Callable[[Event], None]


class StreamEngine(Protocol):
    """Turns generations into events. Everything is called on the event loop; sinks too."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def ready(self) -> bool:
        """A generation submitted now is taken: worked on, or queued because the engine is back soon."""
        ...

    @property
    def clock_offset(self) -> float:
        """What to add to the stamps in `Marks` to read them on the server's clock, in s."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def lives(self) -> Lives: ...

    async def start(self) -> None:
        """Load. Raises StartupError."""
        ...

    async def close(self) -> None:
        """Stop; live generations get `Failed`."""
        ...

    def submit(self, generation: Generation, sink: Sink) -> None:
        """Start one. Raises EngineUnavailable, Overloaded. `sink` gets its events in the order of `core.events`."""
        ...

    def predict(self, tokens: int, priority: int) -> float:
        """Seconds to the first token of a prompt that comes now, of which `tokens` are to be computed; 0: not known."""
        ...

    def pin(self, pins: Sequence[Pin]) -> None:
        """Keep the KV of these prefixes warm, for everybody; those given before and not now are like any others."""
        ...

    def cancel(self, rid: int) -> None:
        """Stop it within one step; its sink is not called again. Unknown rids are ignored."""
        ...

    def pause(self, rid: int) -> None:
        """Draw no further tokens for it until `resume` (its reader is slow)."""
        ...

    def resume(self, rid: int) -> None: ...
