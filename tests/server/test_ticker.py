from __future__ import annotations

from itertools import pairwise

from headrace.server.ticker import AT_ONCE, CHECKED, TURN_S, Ticker
from server.asgi_driver import on_loop


class Member:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def tick(self, now: float) -> None:
        self.seen.append(now)


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
    turns: list[int] = []
    looks = 0
    for turn in range(1, 81):
        now[0] = turn * 0.25 / 20
        ticker._fire(now[0])
        turns.append(sum(len(member.seen) for member in members) - looks)
        looks += turns[-1]
    assert set(turns) == {AT_ONCE}
    assert {len(member.seen) for member in members} == {4}
    for member in members:
        apart = [b - a for a, b in pairwise(member.seen)]
        assert all(abs(seconds - 0.25) < 1e-6 for seconds in apart)
    for member in members:
        ticker.remove(member)
    assert not ticker.running


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
    assert first == members[:CHECKED]
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
    ticker = Ticker(lambda: 0.0, lag=lambda late: None)
    heir = Member()

    class Leaver(Member):
        def tick(self, now: float) -> None:
            ticker.remove(self)
            assert not ticker.running
            ticker.add(heir)

    ticker.add(Leaver())
    ticker._fire(0.0)
    assert ticker.running
    timer = ticker._timer
    ticker.add(heir)
    assert ticker._timer is timer, "one timer, not two"
    ticker.remove(heir)
    assert not ticker.running
