"""The states of an engine, and which may follow which.

Rule: `TRANSITIONS` is all there is: the pool changes a state through `check` only, and the picture in the guide is
drawn from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum


class State(StrEnum):
    """What an engine may be used for: only one that is READY gets requests."""

    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


MEANING: Mapping[State, str] = {
    State.LOADING: "its memory is being filled, or its address looked up",
    State.WARMING: "it computes what it will need first",
    State.READY: "it gets requests",
    State.DRAINING: "it finishes what it has and gets nothing new",
    State.GONE: "declared, and no memory is used",
}

TRANSITIONS: Mapping[tuple[State, State], str] = {
    (State.GONE, State.LOADING): "load",
    (State.LOADING, State.WARMING): "loaded",
    (State.LOADING, State.GONE): "failed, or stopped",
    (State.WARMING, State.READY): "warm",
    (State.WARMING, State.GONE): "failed, or stopped",
    (State.READY, State.DRAINING): "drain",
    (State.DRAINING, State.GONE): "its last request is over, or its time",
    (State.DRAINING, State.READY): "taken back in time",
}
"""(from, to) → why."""


def check(old: State, new: State) -> None:
    """Raises ValueError if `new` cannot follow `old`."""
    if (old, new) not in TRANSITIONS:
        raise ValueError(f"an engine that is {old} cannot become {new}")


def picture() -> Iterator[str]:
    """The table as the lines of a Mermaid diagram and of a list of what the states mean."""
    yield from ("```mermaid", "stateDiagram-v2", "    [*] --> GONE: declare")
    for (old, new), why in TRANSITIONS.items():
        yield f"    {old.name} --> {new.name}: {why}"
    yield from ("    GONE --> [*]: forget", "```", "", "| state | meaning |", "|---|---|")
    for state, meaning in MEANING.items():
        yield f"| {state.name} | {meaning} |"
