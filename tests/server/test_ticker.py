from __future__ import annotations

import math
from itertools import pairwise

from headrace.server.ticker import AT_ONCE, CHECKED, FAR_S, TURN_S, Ticker
from server.asgi_driver import on_loop


class Member:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def tick(self, now: float) -> float | None:
        self.seen.append(now)
        return None


@on_loop
async def test_looks_at_all_members() -> None:
    ticker = Ticker(lambda: 0.0, lag=lambda late: None)
    members = [Member(), Member()]
    for member in members:
        ticker.add(member)
    assert len(ticker) == 2
    ticker.tick(3.0)
    ticker.remove(members[0])
    ticker.tick(4.0)
    assert [member.seen for member in members] == [[3.0], [3.0, 4.0]]
    ticker.remove(members[1])


@on_loop
async def test_runs_only_while_it_has_members() -> None:
    ticker = Ticker(lambda: 0.0, lag=lambda late: None)
    member = Member()
    assert not ticker.running
    ticker.add(member)
    assert ticker.running
    ticker.remove(member)
    assert not ticker.running
    ticker.remove(member)
    ticker.add(member)
    assert ticker.running
    ticker.remove(member)


@on_loop
async def test_a_member_may_leave_while_it_is_looked_at() -> None:
    ticker = Ticker(lambda: 0.0, lag=lambda late: None)

    class Leaver(Member):
        def tick(self, now: float) -> None:
            super().tick(now)
            ticker.remove(self)

    leaver, stayer = Leaver(), Member()
    ticker.add(leaver)
    ticker.add(stayer)
    ticker.tick(1.0)
    ticker.tick(2.0)
    assert (leaver.seen, stayer.seen) == ([1.0], [1.0, 2.0])
    ticker.remove(stayer)


@on_loop
async def test_measures_how_late_it_is_and_goes_on() -> None:
    late: list[float] = []
    now = [10.0]
    ticker = Ticker(lambda: now[0], lag=late.append, interval=0.25)
    member = Member()
    ticker.add(member)
    now[0] = 10.35
    ticker._fire(10.25)
    assert abs(late[0] - 0.1) < 1e-9
    assert member.seen == [10.35]
    assert ticker.running
    ticker._fire(11.0)
    assert late[1] == 0.0, "early is not late"
    ticker.remove(member)


@on_loop
async def test_many_members_are_looked_at_in_short_turns_each_once_an_interval() -> None:
    now = [0.0]
    ticker = Ticker(lambda: now[0], lag=lambda late: None, interval=0.25)
    members = [Member() for _ in range(20 * AT_ONCE)]
    for member in members:
        ticker.add(member)
    for tick in range(1, 4):
        now[0] = tick * 0.25
        looks = [sum(len(member.seen) for member in members)]
        while ticker._slot <= tick:
            ticker._fire(now[0])
            looks.append(sum(len(member.seen) for member in members))
        turns = [b - a for a, b in pairwise(looks)]
        assert max(turns) == AT_ONCE
        assert {len(member.seen) for member in members} == {tick}
        ticker._fire(now[0])
        assert {len(member.seen) for member in members} == {tick}, "the rest of the interval is quiet"
    for member in members:
        ticker.remove(member)
    assert not ticker.running


@on_loop
async def test_a_member_is_looked_at_when_it_said_or_just_before() -> None:
    now = [100.0]
    ticker = Ticker(lambda: now[0], lag=lambda late: None, interval=0.25)
    start = now[0]

    class Later(Member):
        def __init__(self, after: float) -> None:
            super().__init__()
            self.after = after

        def tick(self, at: float) -> float:
            super().tick(at)
            return at + self.after

    members = [Later(after) for after in (0.0, 0.1, 0.3, 1.0, 15.0, FAR_S, math.inf)]
    for member in members:
        ticker.add(member)
    while now[0] < start + 3 * FAR_S:
        now[0] += 0.25
        ticker._fire(now[0])
    for member in members:
        assert member.seen[0] == start + 0.25
        apart = [b - a for a, b in pairwise(member.seen)]
        wanted = min(member.after, FAR_S)
        assert all(max(0.25, wanted - 0.25) <= seconds <= max(0.25, wanted) for seconds in apart), member.after
    for member in members:
        ticker.remove(member)


@on_loop
async def test_a_member_that_waits_may_leave_and_come_again() -> None:
    now = [0.0]
    ticker = Ticker(lambda: now[0], lag=lambda late: None, interval=0.25)

    class Later(Member):
        def tick(self, at: float) -> float:
            super().tick(at)
            return at + 10.0

    member, other = Later(), Member()
    ticker.add(member)
    ticker.add(other)
    now[0] = 0.25
    ticker._fire(0.25)
    ticker.remove(member)
    ticker.add(member)
    ticker.add(member)
    assert len(ticker) == 2
    now[0] = 0.5
    ticker._fire(0.5)
    assert member.seen == [0.25, 0.5], "who comes anew is looked at soon"
    ticker.remove(member)
    ticker.remove(other)
    assert not ticker._slots


@on_loop
async def test_a_turn_that_takes_long_leaves_the_rest_to_the_next() -> None:
    now = [0.0]

    class Slow(Member):
        def tick(self, at: float) -> None:
            super().tick(at)
            now[0] += TURN_S / 4

    ticker = Ticker(lambda: now[0], lag=lambda late: None, interval=0.25)
    members = [Slow() for _ in range(64)]
    for member in members:
        ticker.add(member)
    now[0] = 0.25
    ticker._fire(0.25)
    first = [member for member in members if member.seen]
    assert len(first) == CHECKED
    for _ in range(7):
        ticker._fire(now[0])
    assert all(member.seen for member in members), "the loop turns in between, and nobody is left out"
    for member in members:
        ticker.remove(member)


@on_loop
async def test_members_that_came_while_a_turn_was_waited_for_do_not_make_it_long() -> None:
    now = [0.0]
    ticker = Ticker(lambda: now[0], lag=lambda late: None, interval=0.25)
    members = [Member() for _ in range(10 * AT_ONCE)]
    for member in members:
        ticker.add(member)
    now[0] = 0.25
    ticker._fire(0.25)
    assert sum(len(member.seen) for member in members) == AT_ONCE
    for _ in range(9):
        ticker._fire(0.25)
    assert {len(member.seen) for member in members} == {1}
    for member in members:
        ticker.remove(member)


@on_loop
async def test_the_last_member_may_leave_and_another_come_in_one_look() -> None:
    now = [0.0]
    ticker = Ticker(lambda: now[0], lag=lambda late: None)
    heir = Member()

    class Leaver(Member):
        def tick(self, now: float) -> None:
            ticker.remove(self)
            assert not ticker.running
            ticker.add(heir)

    ticker.add(Leaver())
    now[0] = 0.25
    ticker._fire(0.25)
    assert ticker.running
    assert heir.seen == []
    timer = ticker._timer
    ticker.add(heir)
    assert ticker._timer is timer, "one timer, not two"
    now[0] = 0.5
    ticker._fire(0.5)
    assert heir.seen == [0.5]
    ticker.remove(heir)
    assert not ticker.running
