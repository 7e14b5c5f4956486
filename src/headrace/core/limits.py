"""What the scheduler is told about the engine and about what people shall have to wait."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.budget import Pace


@dataclass(frozen=True, slots=True)
class Limits:
    """The few numbers the scheduler needs; all in tokens or sequences."""

    max_batch: int = 16
    """Sequences that run at the same time."""
    max_running: int = 16
    """… when they have burnt their fuse."""
    step_tokens: int = 512
    """Tokens the engine takes in a step."""
    prefill_chunk: int = 512
    """Prompt tokens in a step while nobody decodes, at most."""
    prefill_chunk_busy: int = 128
    """Prompt tokens in a step while somebody decodes; only without `pace`."""
    idle_cells: int = 4096
    """KV cells that finished sequences may keep."""
    warm_cells: int | None = None
    """KV cells that they keep of what is saved outside; None: as many."""
    prefix_cache: bool = True
    await_prefix: bool = True
    earliest_deadline: bool = False
    """Off: first come, first served."""
    ttft: float = 0.0
    """Seconds to the first token that a prompt has at least, before it is due."""
    fuse: bool = True
    efficient: bool = True
    """A step may be somewhat longer than its target where that brings far more tokens a second."""
    wider: bool = False
    """More than `max_batch` sequences may run as long as their steps are short."""
    splits: bool = True
    """Readers and prompts of a step may be computed one after the other."""
    pads: bool = True
    """A step of fewer rows than a tile may be filled up with rows that nobody reads."""
    speculation: bool = False
    overlap: bool = False
    """Readers are told beside the next step."""
    pace: Pace | None = None
    """Steps are as long as this says, by a cost model; None: as long as the two fixed chunks make them."""
