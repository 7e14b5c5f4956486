from __future__ import annotations

import asyncio

import pytest

from gateway import hand_pool
from gateway.hand_pool import Hand
from headrace.core.errors import StartupError, UpstreamFailed
from headrace.gateway import prober
from headrace.gateway.states import State
from server.asgi_driver import on_loop, settle


@on_loop
async def test_other_servers_are_probed_when_they_are_due() -> None:
    hand = await Hand("ab", kind="openai", probe_s=10).load()
    await hand.pool.look()
    assert "probe" not in hand["a"].did
    hand.clock.advance(10)
    await hand.pool.look()
    await hand.pool.look()
    assert (hand["a"].did.count("probe"), hand["b"].did.count("probe")) == (1, 1)
    await hand.pool.close()


@pytest.mark.parametrize(("kind", "probe_s"), [("llama", 10.0), ("openai", 0.0)])
@on_loop
async def test_who_is_not_to_be_probed_is_not(kind: str, probe_s: float) -> None:
    hand = await Hand("ab", kind=kind, probe_s=probe_s).load()
    assert hand.pool._prober._task is None
    hand.clock.advance(1000)
    await hand.pool.look()
    assert "probe" not in hand["a"].did


@on_loop
async def test_one_that_is_not_well_is_asked_only_if_nobody_else_is(caplog: pytest.LogCaptureFixture) -> None:
    hand = await Hand("ab", kind="openai").load()
    hand["a"].probe_error = UpstreamFailed("it answers 503")
    hand.clock.advance(10)
    await hand.pool.look()
    assert hand.pool.members["a"].reason == "it answers 503"
    assert hand.chosen(3) == "bbb"
    assert hand.chosen(1, without={"b"}) == "a"
    hand["b"].probe_error = ConnectionRefusedError()
    hand.clock.advance(10)
    await hand.pool.look()
    assert hand.pool.members["b"].reason == "it does not answer probes (ConnectionRefusedError)"
    assert not hand.pool.ready("chat")
    assert hand.chosen(1) in "ab", "an error would be worse"
    hand["a"].probe_error = None
    hand["a"].well = False
    hand.clock.advance(10)
    await hand.pool.look()
    assert hand.pool.members["a"].reason == "its probe failed"
    hand["a"].well = True
    hand.clock.advance(10)
    await hand.pool.look()
    assert hand.chosen(3) == "aaa"
    assert [record.getMessage() for record in caplog.records if "engine a" in record.getMessage()] == [
        "engine a: it answers 503",
        "engine a: its probe failed",
        "engine a: it is back",
    ], "once for each change"
    await hand.pool.close()


@on_loop
async def test_a_probe_without_an_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = await Hand("ab", kind="openai").load()
    monkeypatch.setattr(prober, "PROBE_TIMEOUT_S", 0.0)

    async def forever() -> bool:
        return await asyncio.Event().wait()

    monkeypatch.setattr(hand["a"], "probe", forever)
    hand.clock.advance(10)
    await hand.pool.look()
    assert hand.pool.members["a"].reason == "it does not answer probes (TimeoutError)"
    await hand.pool.close()


@on_loop
async def test_what_was_not_there_at_the_start_is_loaded_when_it_is() -> None:
    hand = await Hand("ab", kind="openai", probe_s=5).load("a")
    hand.errors["b"] = StartupError("no answer")
    with pytest.raises(StartupError):
        await hand.pool.load("b")
    hand.pool.want("b")
    for _ in range(2):
        hand.clock.advance(5)
        await hand.pool.look()
        assert hand.pool.members["b"].state is State.GONE
        assert hand.pool.members["b"].reason == "no answer"
    hand.errors["b"] = None
    await hand.pool.look()
    assert len(hand.made["b"]) == 3, "it is not due"
    hand.clock.advance(5)
    await hand.pool.look()
    assert set(hand.chosen(2)) == {"a", "b"}
    await hand.pool.drain("b", 0)
    hand.clock.advance(5)
    await hand.pool.look()
    assert hand.pool.members["b"].state is State.GONE, "who was drained is not wanted any more"
    await hand.pool.close()


@on_loop
async def test_one_that_takes_long_is_asked_once_and_keeps_no_other_waiting() -> None:
    hand = await Hand("ab", kind="openai", probe_s=5).load("a")
    hand.errors["b"] = StartupError("no answer")
    with pytest.raises(StartupError):
        await hand.pool.load("b")
    hand.pool.want("b")
    hand.errors["b"] = None
    hand.shut.add("b")
    looks = []
    for n in range(1, 4):
        hand.clock.advance(5)
        looks.append(asyncio.ensure_future(hand.pool.look()))
        await settle()
        assert hand["a"].did.count("probe") == n
    assert len(hand.made["b"]) == 2
    assert str(hand.pool.members["b"].state) == "loading"
    await hand.pool.close()
    await asyncio.wait(looks)
    assert hand.pool.members["b"].state is State.GONE
    assert hand["b"].did == ["start", "close"]
    assert not hand.pool._prober._looks


@on_loop
async def test_the_task_lives_as_long_as_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "TICK_S", 0.0)
    probed = asyncio.Event()

    async def probe(one: hand_pool.HandBackend) -> bool:
        probed.set()
        return True

    monkeypatch.setattr(hand_pool.HandBackend, "probe", probe)
    hand = await Hand("a", kind="openai").load("a")
    hand.clock.advance(10)
    await probed.wait()
    task = hand.pool._prober._task
    assert task is not None
    await hand.pool.close()
    assert task.cancelled()
    await settle()
