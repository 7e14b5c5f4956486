from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.hand_backend import Works, ask
from headrace.core.errors import Conflict, InternalError, InvalidRequest, LoadFailed, StartupError
from headrace.gateway.spec import AliasSpec, EngineSpec, MirrorSpec
from headrace.gateway.switch import KEPT, Report, Switcher, shares
from server.asgi_driver import on_loop, settle


@asynccontextmanager
async def switching(works: Works, *loaded: str, drain_s: float = 30.0) -> AsyncIterator[Switcher]:
    for name in loaded:
        await works.pool.load(name)
    switcher = Switcher(works.pool, works.clock, drain_s=drain_s)
    try:
        yield switcher
    finally:
        for backend in works.made.values():
            backend.closes.set()
        await switcher.close()
        await works.pool.close()


@pytest.mark.parametrize(
    ("before", "to", "weight", "after"),
    [
        ({"a": 1.0}, "b", 1.0, {"a": 0.0, "b": 1.0}),
        ({"a": 90.0, "b": 10.0}, "b", 1.0, {"a": 0.0, "b": 1.0}),
        ({"a": 1.0}, "b", 0.25, {"a": 0.75, "b": 0.25}),
        ({"a": 90.0, "c": 30.0}, "b", 0.2, {"a": 0.6, "c": 0.2, "b": 0.2}),
        ({"a": 1.0, "b": 1.0}, "b", 0.25, {"a": 0.75, "b": 0.25}),
        ({"a": 0.0, "b": 5.0}, "b", 0.5, {"a": 0.0, "b": 0.5}),
        ({"b": 5.0}, "b", 1.0, {"b": 1.0}),
    ],
)
def test_the_others_keep_their_proportions(
    before: dict[str, float], to: str, weight: float, after: dict[str, float]
) -> None:
    assert shares(before, to, weight) == pytest.approx(after)


@on_loop
async def test_load_warm_change_over_drain_unload() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.shut["b"] = "loads"
    async with switching(works, "a") as switcher:
        held = works.pool.lease(ask("chat"))
        report = switcher.start("chat", "b")
        assert repr(switcher) == "<Switcher [1 changing, 0 draining]>"
        await settle()
        assert (switcher.report(report.id).stage, works.state("b")) == ("loading", "loading")
        works.clock.now += 5.0
        works.made["b"].warms.clear()
        works.made["b"].loads.set()
        await settle()
        assert switcher.running == [switcher.report(report.id)]
        assert switcher.running[0].stage == "warming"
        assert works.weights("chat") == {"a": 1.0}, "nothing changes before it is warm"
        assert works.pool.lease(ask("chat")).engine == "a"
        works.clock.now += 2.0
        works.made["b"].warms.set()
        report = await switcher.settled(report.id)
        assert works.weights("chat") == {"a": 0.0, "b": 1.0}
        assert (report.stage, report.draining) == ("draining", ("a",))
        assert (report.load_s, report.warm_s, report.change_s) == (5.0, 2.0, 0.0)
        assert works.pool.lease(ask("chat")).engine == "b"
        await settle()
        assert (works.state("a"), works.made["a"].closed) == ("draining", False)
        held.close("ok")
        await settle()
        # The lease taken above by the test is still open.
        assert works.state("a") == "draining"


@on_loop
async def test_the_old_one_goes_when_its_last_answer_is_over() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a") as switcher:
        held = works.pool.lease(ask("chat"))
        report = await switcher.switch("chat", "b")
        assert report.draining == ("a",)
        held.close("ok")
        await settle()
        assert (works.state("a"), works.made["a"].closed) == ("gone", True)
        assert works.pool.members["a"].backend is None
        (done,) = switcher.last
        assert (done.id, done.stage, done.draining, switcher.running) == (report.id, "done", (), [])


@on_loop
async def test_at_the_end_of_its_time_it_is_closed_all_the_same() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a", drain_s=0.0) as switcher:
        works.pool.lease(ask("chat"))
        await switcher.switch("chat", "b")
        await asyncio.wait(switcher._drains.values())
        assert (works.state("a"), works.made["a"].closed) == ("gone", True)


@on_loop
async def test_one_that_is_ready_is_not_loaded_again_and_a_share_drains_nobody() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a", "b") as switcher:
        report = await switcher.switch("chat", "b", 0.25)
        assert (report.load_s, report.warm_s, report.stage) == (None, None, "done")
        assert works.weights("chat") == {"a": 0.75, "b": 0.25}
        assert (works.state("a"), works.state("b")) == ("ready", "ready")


@pytest.mark.parametrize("step", ["start", "warm"])
@pytest.mark.parametrize("fault", [StartupError("no model"), OSError("/secret/path")])
def test_a_candidate_that_does_not_come_up_changes_nothing(step: str, fault: Exception) -> None:
    @on_loop
    async def run() -> None:
        works = Works("a", "b", chat={"a": 1.0})
        works.faults["b"] = {step: fault}
        async with switching(works, "a") as switcher:
            with pytest.raises(LoadFailed) as caught:
                await switcher.switch("chat", "b")
            assert caught.value.status == 502
            assert caught.value.message in ("b: no model", "b: it did not start (OSError)")
            assert works.weights("chat") == {"a": 1.0}
            assert (works.state("a"), works.state("b"), works.made["b"].closed) == ("ready", "gone", True)
            assert works.pool.members["b"].reason.endswith(caught.value.message.removeprefix("b: "))
            assert works.pool.lease(ask("chat")).engine == "a"
            (failed,) = switcher.last
            assert (failed.stage, failed.error) == ("failed", caught.value)
            with pytest.raises(LoadFailed):
                await switcher.settled(failed.id)
            # It may be tried again at once.
            works.faults.clear()
            assert (await switcher.switch("chat", "b")).draining == ("a",)

    run()


@on_loop
async def test_rollback_takes_back_an_engine_that_still_drains() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a") as switcher:
        held, old = works.pool.lease(ask("chat")), works.made["a"]
        first = await switcher.switch("chat", "b")
        await settle()
        assert works.state("a") == "draining"
        back = await switcher.switch("chat", "a")
        assert back.load_s is None, "it was not loaded again"
        assert (works.state("a"), works.made["a"]) == ("ready", old)
        assert works.weights("chat") == {"a": 1.0, "b": 0.0}
        await settle()
        assert (works.state("b"), works.made["b"].closed) == ("gone", True)
        assert {report.id: report.stage for report in switcher.last} == {first.id: "done", back.id: "done"}
        held.close("ok")
        await settle()
        assert works.state("a") == "ready"


@on_loop
async def test_rollback_loads_again_what_is_gone() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a") as switcher:
        old = works.made["a"]
        await switcher.switch("chat", "b")
        await settle()
        assert works.state("a") == "gone"
        await switcher.switch("chat", "a")
        assert old.closed
        assert works.made["a"] is not old
        assert works.pool.lease(ask("chat")).engine == "a"


@on_loop
async def test_rollback_waits_for_one_that_is_just_being_closed() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a") as switcher:
        old = works.made["a"]
        old.closes.clear()
        await switcher.switch("chat", "b")
        await settle()
        assert works.state("a") == "draining"
        back = switcher.start("chat", "a")
        await settle()
        assert works.weights("chat") == {"a": 0.0, "b": 1.0}
        old.closes.set()
        await switcher.settled(back.id)
        assert works.made["a"] is not old
        assert works.weights("chat") == {"a": 1.0, "b": 0.0}


@on_loop
async def test_back_and_forth_without_a_breath_drains_the_right_one() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a", "b") as switcher:
        held = works.pool.lease(ask("chat"))
        for to in ("b", "a", "b", "a", "b"):
            await switcher.switch("chat", to)
        held.close("ok")
        await settle()
        assert (works.state("a"), works.state("b")) == ("gone", "ready")
        assert [report.stage for report in switcher.last] == ["done"] * 5


@on_loop
async def test_a_second_switch_of_the_alias_is_refused_and_another_alias_s_is_not() -> None:
    works = Works("a", "b", "c", chat={"a": 1.0}, fast={"a": 1.0})
    works.shut["b"] = "loads"
    async with switching(works, "a") as switcher:
        first = switcher.start("chat", "b")
        with pytest.raises(Conflict, match="chat is being switched to b"):
            switcher.start("chat", "c")
        await switcher.switch("fast", "c")
        await settle()
        assert works.state("a") == "ready", "chat needs it still"
        works.made["b"].loads.set()
        await switcher.settled(first.id)
        await settle()
        assert works.state("a") == "gone"


@on_loop
async def test_two_aliases_may_be_switched_to_one_engine() -> None:
    works = Works("a", "b", chat={"a": 1.0}, fast={"a": 1.0})
    works.shut["b"] = "loads"
    async with switching(works, "a") as switcher:
        first, second = switcher.start("chat", "b"), switcher.start("fast", "b")
        await settle()
        works.made["b"].loads.set()
        await switcher.settled(first.id)
        await switcher.settled(second.id)
        await settle()
        assert works.weights("chat") == works.weights("fast") == {"a": 0.0, "b": 1.0}
        assert (works.state("a"), works.state("b")) == ("gone", "ready")


@on_loop
async def test_an_engine_that_a_switch_or_a_mirror_wants_is_not_drained() -> None:
    works = Works("a", "b", "c", chat={"a": 1.0}, fast={"c": 1.0})
    works.pool.lead(AliasSpec("fast", {"c": 1.0}, MirrorSpec("a")))
    async with switching(works, "a", "c") as switcher:
        assert (await switcher.switch("chat", "b")).stage == "done"
        await settle()
        assert works.state("a") == "ready"
        works.pool.lead(AliasSpec("fast", {"c": 1.0}))
        assert switcher.retire("c") is None
        task = switcher.retire("a")
        assert task is not None
        await task
        assert works.state("a") == "gone"


@on_loop
async def test_a_candidate_that_takes_no_requests_is_refused_and_goes_again() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.faults["b"] = {"unwell": OSError()}
    async with switching(works, "a") as switcher:
        with pytest.raises(Conflict, match="engine b takes no requests now"):
            await switcher.switch("chat", "b")
        await settle()
        assert works.weights("chat") == {"a": 1.0}
        assert works.state("b") == "gone"


@on_loop
async def test_whoever_asked_may_leave() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.shut["b"] = "loads"
    async with switching(works, "a") as switcher:
        client = asyncio.create_task(switcher.switch("chat", "b"))
        await settle()
        client.cancel()
        await settle()
        works.made["b"].loads.set()
        await settle()
        assert works.weights("chat") == {"a": 0.0, "b": 1.0}


@on_loop
async def test_names_that_there_are_not() -> None:
    works = Works("a", chat={"a": 1.0})
    async with switching(works, "a") as switcher:
        with pytest.raises(InvalidRequest, match="there are: chat") as caught:
            switcher.start("x", "a")
        assert caught.value.param == "alias"
        with pytest.raises(InvalidRequest, match="there are: a") as caught:
            switcher.start("chat", "x")
        assert caught.value.param == "to"


@on_loop
async def test_one_that_somebody_else_loads_is_a_conflict() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.shut["b"] = "loads"
    async with switching(works, "a") as switcher:
        other = asyncio.create_task(works.pool.load("b"))
        await settle()
        with pytest.raises(Conflict, match="engine b is loading"):
            await switcher.switch("chat", "b")
        works.made["b"].loads.set()
        await other
        assert (await switcher.switch("chat", "b")).load_s is None


@on_loop
async def test_an_engine_that_is_away_keeps_nobody_from_switching() -> None:
    works = Works("a", "b", "c", chat={"a": 1.0, "b": 1.0})
    async with switching(works, "a") as switcher:
        assert (await switcher.switch("chat", "c", 0.5)).stage == "done"
        assert works.weights("chat") == {"a": 0.25, "b": 0.25, "c": 0.5}
        works.pool.lead(AliasSpec("chat", {"a": 1.0, "b": 0.0}))
        with pytest.raises(Conflict, match="engine b is gone"):
            works.pool.assign("chat", {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize("where", ["load", "assign"])
@on_loop
async def test_a_fault_of_ours_ends_a_switch(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a") as switcher:

        def broken(*_: object) -> None:
            raise ValueError

        monkeypatch.setattr(works.pool, where, broken)
        with pytest.raises(InternalError, match="internal error"):
            await switcher.switch("chat", "b")
        monkeypatch.undo()
        assert (switcher.running, switcher.last[0].stage) == ([], "failed")
        await settle()
        assert (works.state("b"), works.weights("chat")) == ("gone", {"a": 1.0})
        assert "ValueError" in caplog.text
        await switcher.switch("chat", "b")


@on_loop
async def test_an_engine_that_was_waited_for_is_not_looked_for_any_more() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "b") as switcher:
        works.pool.want("a")
        await switcher.switch("chat", "b", 0.5)
        assert works.pool.members["a"].wanted
        await switcher.switch("chat", "b")
        await settle()
        assert (works.pool.members["a"].wanted, works.state("a")) == (False, "gone")
        assert [report.stage for report in switcher.last] == ["done", "done"]


@on_loop
async def test_it_remembers_the_newest() -> None:
    works = Works("a", "b", chat={"a": 1.0, "b": 1.0})
    async with switching(works, "a", "b") as switcher:
        reports: list[Report] = [await switcher.switch("chat", "b", 0.5) for _ in range(KEPT + 3)]
        assert [report.id for report in switcher.last] == [report.id for report in reversed(reports[3:])]


@on_loop
async def test_closing_gives_up_what_runs() -> None:
    works = Works("a", "b", "c", chat={"a": 1.0}, fast={"c": 1.0})
    works.shut["b"] = "loads"
    async with switching(works, "a", "c") as switcher:
        works.pool.lease(ask("fast"))
        await switcher.switch("fast", "a")
        switcher.start("chat", "b")
        await settle()
        await switcher.close()
        assert works.state("b") == "gone"
        assert repr(switcher) == "<Switcher [0 changing, 0 draining]>"


@on_loop
async def test_a_server_that_ends_waits_for_an_engine_that_is_just_being_closed() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    async with switching(works, "a") as switcher:
        works.made["a"].closes.clear()
        await switcher.switch("chat", "b")
        await settle()
        ends = [asyncio.create_task(close()) for close in (works.pool.close, switcher.close)]
        await settle()
        assert (works.state("a"), works.made["a"].closed, ends[0].done()) == ("draining", False, False)
        works.made["a"].closes.set()
        await asyncio.wait(ends)
        assert [task.exception() for task in ends] == [None, None]
        assert (works.state("a"), works.made["a"].closed) == ("gone", True)


def test_the_double_is_declared() -> None:
    assert Works("a").pool.members["a"].spec == EngineSpec("a", "llama", "m", "m")
