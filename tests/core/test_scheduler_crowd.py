"""Many who come at once, in virtual time, on a machine whose matrices are fast and on one whose are not."""

from __future__ import annotations

import random

import pytest

from core.simulator import Simulator
from headrace.core.attention import Attention
from headrace.core.budget import Pace
from headrace.core.costmodel import GROUP, CostModel, Work
from headrace.core.limits import Limits

AMX = (2.5e-3, 5e-4, 0.0, 1e-3, 7e-7, 1e-5, 0.0)
"""SmolLM2-135M on two cores with AMX: 1,900 prompt tokens a second, attention row by row 14 times as dear as tiles."""
PLAIN = (2.5e-3, 1.05e-3, 0.0, 2e-3, 7e-7, 2.2e-6, 5e-9)
"""The same in BF16 on two cores of an EPYC."""
USERS, PROMPT, ANSWER, TURNS = 16, 45, 64, 3


def sixteen(true: tuple[float, ...], **limits: bool) -> tuple[list[float], list[float], float]:
    """Each asks again as soon as it is answered: waits and gaps, sorted, in s; tokens per second."""
    pace = Pace(0.1, 0.13, 0.58, 0.25, 0.1)
    sim = Simulator(
        Limits(
            max_batch=8,
            max_running=16,
            step_tokens=576,
            idle_cells=1536,
            earliest_deadline=True,
            ttft=1.0,
            pace=pace,
            **limits,
        ),
        true=true,
    )
    rng = random.Random(1)
    turns = {sim.ask(rng.random() * 0.004, PROMPT, ANSWER): 1 for _ in range(USERS)}
    done: set[int] = set()

    def again(sim: Simulator) -> bool:
        for rid in [r for r in turns if r not in done and len(sim.heard.get(r, ())) == ANSWER]:
            done.add(rid)
            if turns[rid] < TURNS:
                turns[sim.ask(sim.now + 0.001, PROMPT, ANSWER)] = turns[rid] + 1
        return False

    sim.run(again)
    gaps = sorted(gap for rid in turns for gap in sim.gaps(rid))
    return sorted(map(sim.waited, turns)), gaps, ANSWER * len(turns) / sim.now


def at(values: list[float], share: float) -> float:
    return values[int(share * len(values))]


@pytest.mark.parametrize("true", [AMX, PLAIN], ids=["amx", "plain"])
def test_a_wider_batch_brings_all_of_them_sooner(true: tuple[float, ...]) -> None:
    waits, gaps, rate = sixteen(true, wider=True)
    before, gaps_before, rate_before = sixteen(true)
    assert at(waits, 0.95) < 0.85 * at(before, 0.95)
    assert at(gaps, 0.99) < at(gaps_before, 0.99)
    assert rate > 0.98 * rate_before


def test_the_first_tokens_of_sixteen_come_with_what_their_prompts_take() -> None:
    """16 · 45 tokens are 360 ms of this machine."""
    waits, _, _ = sixteen(AMX, wider=True)
    assert at(waits, 0.95) < 1.25 * (AMX[1] * USERS * PROMPT + 2 * AMX[0])


@pytest.mark.parametrize("pads", [True, False])
def test_fifteen_readers_are_filled_up_to_sixteen_rows_where_that_is_cheaper(pads: bool) -> None:
    """Kernels that take 16 rows at a time: a 1B model with K-quants on two cores."""
    grouped = (5e-3, 7.2e-3, 5e-3, 6e-3, 1e-6, 3e-6, 0.0)
    attention = Attention(32, 2, splits=True, pads=True)
    limits = Limits(max_batch=16, max_running=16, pads=pads, pace=Pace(0.1, 0.13, 0.58, 0.25, 0.1))
    sim = Simulator(limits, true=grouped, attention=attention)
    asked = [sim.ask(0.0, 10, 40) for _ in range(GROUP - 1)]
    sim.run()
    together = [step for step in sim.steps if len(step.reading) == GROUP - 1 and not step.prompts]
    assert len(together) > 20
    plain = CostModel(grouped, attention=attention).predict(Work(0, GROUP - 1, 500, 0, 500))
    assert all((step.seconds < 0.8 * plain) is pads for step in together)
    assert all(len(sim.heard[rid]) == 40 for rid in asked)
