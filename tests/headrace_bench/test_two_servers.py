"""Real servers, real runs: a difference is found, and one server does not differ from itself."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from headrace_bench.client.run import Run, run
from headrace_bench.client.target import Target
from headrace_bench.duel import Duel, Side, duel
from headrace_bench.figures.claim import Claim, conclude
from headrace_bench.load.arrivals import Constant
from headrace_bench.load.draw import draw
from headrace_bench.load.schedule import Schedule
from headrace_bench.load.workload import parse
from scripted_servers import serving


def short(seed: int) -> Schedule:
    return draw(Constant(40.0), parse("chat,max_in=16,max_out=8"), seed=seed, duration=0.2)


def whatever_the_machine_does(target: Target, schedule: Schedule, *, drain_s: float) -> Run:
    """A machine that runs tests is never quiet. That a client which is not in order does not count is tested elsewhere."""
    ran = run(target, schedule, drain_s=drain_s)
    return replace(ran, health=msgspec.structs.replace(ran.health, invalid=()))


def claimed(made: Duel) -> Claim:
    few = [figure for figure in made.figures if figure.name in ("ttft_p50", "attainment")]
    return conclude(made.a.name, made.b.name, made.pairs, made.floor, few, "ttft_p50", made.seed)


def test_a_faster_server_is_found_and_the_same_one_is_not() -> None:
    with serving(0.1) as slow, serving(0.05) as fast:
        a, b = Side("slow", Target(slow.url, "m")), Side("fast", Target(fast.url, "m"))
        made = duel(a, b, short, pairs=6, seed=1, run=whatever_the_machine_does, drain_s=2.0)
        claim = claimed(made)
        assert claim.claimed
        assert claim.sentence.endswith(": better")
        (primary, _) = claim.rows
        assert primary.found.ratio is not None
        assert 0.4 < primary.found.ratio < 0.75

        def differs(seed: int) -> bool:
            again = replace(a, name="slow again")
            same = duel(
                a, again, short, pairs=6, floor=made.floor, seed=seed, run=whatever_the_machine_does, drain_s=2.0
            )
            return claimed(same).claimed

        # Six pairs go the same way by chance once in 32 times: a claim has to come again with fresh ones.
        assert not (differs(2) and differs(3))
