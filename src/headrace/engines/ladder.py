"""Which kernels to do without, when those that were to be used bring the worker down before it is up.

    as-configured ──► no-extra-buffers ──► no-flash-attention ──► one-thread ──► given up
          a signal, or numbers that are none      each rung with what the ones above gave up

Rules: this module decides, `supervisor` acts. A rung is settings of the blueprint, so nothing here depends on a build
of the library. What is no fault of kernels never leads down: SIGKILL (the kernel's out-of-memory killer, or somebody),
no memory, a stop, and whatever the worker could still say itself.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

TOP = "as-configured"
REBUILD = (
    "run scripts/install again, which builds llama.cpp for this machine (without it: `pip install --force-reinstall "
    "--no-cache-dir --no-binary llama-cpp-python llama-cpp-python`)"
)


class Rung(msgspec.Struct, frozen=True):
    """A way to run the engine."""

    name: str = TOP
    settings: dict[str, Any] = {}
    """Instead of the blueprint's own; those of the rungs above among them."""
    without: str = ""
    """What is not used any more, in words; "" at the top."""
    cost: str = ""
    """What that costs, in words."""


class Ending(msgspec.Struct, frozen=True):
    """How a worker ended that was not up yet. `code` as of `Popen`: negative for a signal."""

    code: int
    said: str = ""
    """The line of its last words that says why; "" if it said nothing."""
    untrue: str = ""
    """What it found wrong with its own numbers before it ended by itself; "" if it did not."""


class Kept(msgspec.Struct, frozen=True):
    """What is remembered of a rung that works, for the next start."""

    settings: dict[str, Any]
    why: str
    """What ended the worker on the rung above."""


def llama_rungs(settings: Mapping[str, Any]) -> tuple[Rung, ...]:
    """The ladder of an engine over llama.cpp; what its settings do without already is no rung of it."""
    rungs = [Rung()]
    given: dict[str, Any] = {}

    def step(name: str, changes: dict[str, Any], without: str, cost: str) -> None:
        if any(settings.get(key) != value for key, value in changes.items()):
            given.update(changes)
            rungs.append(Rung(name, dict(given), without, cost))

    step(
        "no-extra-buffers",
        {"extra_buffers": False},
        "the kernels for weights laid out anew for this CPU (AMX, repacked; engine.extra_buffers)",
        "prompts take up to five times as long",
    )
    # A quantised KV cache needs flash attention.
    other = {"kv_type": "f16"} if settings.get("kv_type") == "q8_0" else {}
    step(
        "no-flash-attention",
        {"flash_attention": False, **other},
        "flash attention (engine.flash_attention)" + (" and with it the small KV cache (engine.kv_type)" * bool(other)),
        "steps cost more the more cells of the KV pool are in use",
    )
    step(
        "one-thread",
        {"threads": 1, "threads_batch": 1},
        "more than one thread (engine.threads)",
        "everything takes as many times as long as this machine has cores",
    )
    return tuple(rungs)


def first_rung(rungs: Sequence[Rung], kept: Kept | None, settings: Mapping[str, Any]) -> int:
    """Where a start begins: the highest rung that does without all that the kept one did without."""
    if kept is not None:
        for at, rung in enumerate(rungs):
            here = {**settings, **rung.settings}
            if all(here.get(key) == value for key, value in kept.settings.items()):
                return at
    return 0


def descends(ending: Ending) -> bool:
    """May other kernels do better?"""
    if ending.untrue:
        return True
    if ending.code >= 0 or "bad_alloc" in ending.said:
        return False
    return -ending.code in _CRASHES


_CRASHES = frozenset(
    {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)


def signal_name(code: int) -> str:
    """`SIGSEGV` for -11; "" where no signal ended it."""
    if code >= 0:
        return ""
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def told(ending: Ending) -> str:
    """How it ended, in one line."""
    if ending.untrue:
        return ending.untrue
    last = f": {ending.said}" if ending.said else ""
    if ending.code < 0:
        return f"the process was ended by {signal_name(ending.code)}{last}"
    return f"the process ended with status {ending.code}{last}"


def stepped_down(rung: Rung, why: str, depth: int) -> str:
    """What is said, once, of an engine that runs below the top."""
    what = "the kernels that were to be used fail on this machine" if depth > 1 else "kernels fail on this machine"
    return f"{what} ({why}): it runs without {rung.without}; {rung.cost}. To mend it, {REBUILD}"


def given_up(ending: Ending, tried: int) -> str:
    """Why a worker cannot be started, and what to do, in one line. `tried`: rungs that failed."""
    how = told(ending)
    if ending.untrue:
        ways = "" if tried < 2 else f", with all {tried} sorts of kernels that were tried"
        return f"{how}{ways}: the file is damaged or was converted badly; get it again, or another one"
    if -ending.code == signal.SIGKILL:
        return (
            f"the engine was killed while it loaded the model (SIGKILL{_and(ending.said)}): by hand, or because memory "
            "ran out; lower engine.cells, choose a smaller file, or free memory"
        )
    if "bad_alloc" in ending.said:
        return f"the engine ran out of memory while it loaded the model ({ending.said}): lower engine.cells"
    if not descends(ending):
        return f"the engine died while it loaded the model: {how}"
    ways = "" if tried < 2 else f", also with the {tried - 1} plainer sorts of kernels that were tried"
    if _IS_CHECK.search(ending.said):
        remedy = f"the file is not one that this llama.cpp can run: get it again, or another one; else {REBUILD}"
    else:
        remedy = f"{REBUILD}; else the file may be damaged: get it again"
    return f"the engine died while it loaded the model: {how}{ways}; {remedy}"


_IS_CHECK = re.compile(r"GGML_ASSERT|\bwhat\(\)|std::|:\d+: ")


def _and(said: str) -> str:
    return f"; {said}" if said else ""
