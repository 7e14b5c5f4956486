"""What becomes of a step whose logits are not finite: who is to blame, and can the others go on?

A number that is none stays in the KV, and attention reads the cells of others too, only to weigh them with nothing:
nothing times NaN is NaN. So one bad sequence may break the others of its step and of those after it, and a cell that it
had is bad until it is written again.

    alone, KV can be written    it fails, the free cells are written over, the engine goes on
    anything else               `Poisoned`: the worker ends, and who was at work is tried one at a time (`quarantine`)
"""

from __future__ import annotations

from headrace.core.events import Event
from headrace.core.plan import NOT_FINITE, Plan, StepResult
from headrace.core.scheduler import Scheduler
from headrace.engines.base import StepEngine


class Poisoned(Exception):
    """The KV is not to be trusted, and nobody can say whose doing that is."""


def fail_broken(scheduler: Scheduler, engine: StepEngine, plan: Plan, result: StepResult) -> list[Event]:
    """End the one generation that runs. Raises Poisoned if it is not the only one.

    The engine writes its cells over when it is told to forget them, see `LlamaEngine.trim`.
    """
    broken = {plan.shares[i].sequence.generation.rid for i in result.broken}
    running = {sequence.generation.rid for sequence in scheduler.running}
    if len(running | broken) > 1 or not engine.bytes_per_token:
        raise Poisoned(
            f"the logits of {len(broken)} generations are NaN or infinite while {len(running)} run: the KV is not to "
            "be trusted any more"
        )
    return scheduler.fail(plan, NOT_FINITE)
