from __future__ import annotations

from headrace.server.ticker import Ticker
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
