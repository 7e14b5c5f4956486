"""Which run comes when, in a comparison: pairs of runs, each with its own schedule, in an order that is drawn.

    pair 1   seed 71   A B
    pair 2   seed 12   B A        both runs of a pair ask the same at the same times
    pair 3   seed 90   B A        half of the pairs begin with B: what a server's second place costs, both pay

Rules: all of it is drawn before the first run, from one seed; pairs that replace others are drawn with seeds of their
own; nothing here knows a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from headrace_bench.figures.trial import Which
from headrace_bench.load.schedule import Planned, Schedule


@dataclass(frozen=True, slots=True)
class Turn:
    """One pair to come."""

    pair: int
    """From 0; floor and real pairs are counted apart."""
    seed: int
    """Of its schedule."""
    order: tuple[Which, Which]


def plan(pairs: int, rng: np.random.Generator, first: int = 0) -> tuple[Turn, ...]:
    """`pairs` turns, counted from `first`: as many begin with A as with B (of an odd number, one more by lot)."""
    starts = [n % 2 for n in range(pairs - pairs % 2)]
    if pairs % 2:
        starts.append(int(rng.integers(2)))
    orders: tuple[tuple[Which, Which], ...] = (("a", "b"), ("b", "a"))
    return tuple(
        Turn(first + n, int(rng.integers(1, 2**31)), orders[start]) for n, start in enumerate(rng.permutation(starts))
    )


def salted(schedule: Schedule, salt: int) -> Schedule:
    """The same schedule, each conversation begun with six digits, the same in all of them.

    Where one server has to answer a schedule twice, the second time would find its prompts in the cache. With a salt
    of its own each run meets a server that never saw these prompts, while what the prompts of one run share, they
    still share. Digits, as most vocabularies give any six of them the same number of tokens.
    """
    return msgspec.structs.replace(schedule, requests=tuple(_salted(one, salt) for one in schedule.requests))


def _salted(one: Planned, salt: int) -> Planned:
    if one.turn > 0 or not one.messages:
        return one
    opening = {**one.messages[0], "content": f"{salt % 1_000_000:06d} {one.messages[0].get('content', '')}"}
    return msgspec.structs.replace(one, messages=(opening, *one.messages[1:]))


def alike(a: Schedule, b: Schedule) -> bool:
    """Both ask the same at the same times, so that their runs are a pair. Notes are not asked of anybody."""
    return msgspec.structs.replace(a, notes=()) == msgspec.structs.replace(b, notes=())
