from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from gateway.hand_pool import Hand, HandBackend, ask
from headrace.core.errors import (
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    StartupError,
    Unsupported,
)
from headrace.core.request import Sampling
from headrace.gateway.affinity import BLOCK
from headrace.gateway.model import ServedModel
from headrace.gateway.spec import AliasSpec, EngineSpec, MirrorSpec
from headrace.gateway.states import State
from server.asgi_driver import on_loop, settle
from server.hand_engine import HandEngine, model


def state(hand: Hand, name: str) -> State:
    return hand.pool.members[name].state


# --- loading


@on_loop
async def test_an_engine_is_loaded_and_warmed_before_it_gets_requests() -> None:
    hand = Hand("ab")
    assert state(hand, "a") is State.GONE
    assert hand.pool.members["a"].reason == "not loaded"
    hand.shut.add("a")
    loading = asyncio.ensure_future(hand.pool.load("a"))
    await settle()
    assert state(hand, "a") is State.LOADING
    assert not hand.pool.ready("chat")
    assert not hand.pool.backends
    hand.clock.advance(3)
    hand["a"].gate.set()
    await loading
    assert hand["a"].did == ["start", "warm"]
    assert state(hand, "a") is State.READY
    assert hand.pool.members["a"].since == 103.0
    assert hand.pool.members["a"].reason == ""
    assert hand.pool.backends == {"a": hand["a"]}
    assert hand.pool.ready("chat")
    await hand.pool.load("a")
    assert len(hand.made["a"]) == 1, "it is there already"


@on_loop
async def test_the_aliases_are_known_once_something_is_loaded() -> None:
    hand = Hand("ab")
    assert list(hand.pool.aliases) == []
    hand.pool.lead(AliasSpec("other", {"b": 1.0}))
    await hand.load("a")
    assert list(hand.pool.aliases) == ["chat", "other"]
    assert (hand.pool.created("chat"), hand.pool.created("other")) == (7, 0)
    assert (hand.pool.ready("chat"), hand.pool.ready("other")) == (True, False)
    with pytest.raises(EngineUnavailable, match="not ready yet"):
        hand.pool.lease(ask(model="other"))
    with pytest.raises(ModelNotFound, match="served here: chat, other"):
        hand.pool.lease(ask(model="none"))
    assert not hand.pool.others(ask(model="none"), without=())


@pytest.mark.parametrize("step", ["start_error", "warm_error"])
@on_loop
async def test_one_that_does_not_start_is_closed_and_says_why(step: str) -> None:
    hand = Hand("ab")
    build = hand.build

    def spoiled(spec: EngineSpec) -> Any:
        one = build(spec)
        setattr(one, step, StartupError("there is no such file"))
        return one

    hand.pool._build = spoiled
    with pytest.raises(StartupError, match="no such file"):
        await hand.pool.load("a")
    assert hand["a"].did[-1] == "close"
    assert state(hand, "a") is State.GONE
    assert hand.pool.members["a"].backend is None
    assert hand.pool.members["a"].reason == "there is no such file"
    hand.pool._build = build
    await hand.pool.load("a")
    assert state(hand, "a") is State.READY


@on_loop
async def test_a_fault_in_a_start_is_one_line_too() -> None:
    hand = Hand("a")
    hand.errors["a"] = ValueError("user text")  # type: ignore[assignment]
    with pytest.raises(StartupError) as caught:
        await hand.pool.load("a")
    assert caught.value.message == "engine a: it did not start (ValueError)"


@on_loop
async def test_a_load_that_is_given_up_leaves_nothing() -> None:
    hand = Hand("a")
    hand.shut.add("a")
    loading = asyncio.ensure_future(hand.pool.load("a"))
    await settle()
    with pytest.raises(Conflict, match="engine a is loading"):
        await hand.pool.load("a")
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert state(hand, "a") is State.GONE
    assert hand["a"].did == ["start", "close"]


@on_loop
async def test_what_is_not_declared_cannot_be_used() -> None:
    hand = Hand("ab")
    for call in (hand.pool.load("x"), hand.pool.drain("x", 0)):
        with pytest.raises(InvalidRequest, match="no engine is named x; declared are a, b"):
            await call
    with pytest.raises(InvalidRequest):
        hand.pool.lead(AliasSpec("chat", {"x": 1.0}))
    with pytest.raises(InvalidRequest):
        hand.pool.lead(AliasSpec("chat", {"a": 1.0}, MirrorSpec("x")))
    with pytest.raises(EngineUnavailable):
        hand.pool.lease_of("x")


@on_loop
async def test_declarations_come_and_go() -> None:
    hand = Hand("ab")
    with pytest.raises(Conflict, match="named a already"):
        hand.pool.declare(EngineSpec("a", "llama", "m", "f"))
    with pytest.raises(Conflict, match="the alias chat leads to engine a"):
        hand.pool.forget("a")
    hand.pool.declare(EngineSpec("c", "llama", "m", "f"))
    hand.pool.lead(AliasSpec("chat", {"a": 1.0}, MirrorSpec("c")))
    with pytest.raises(Conflict, match="the alias chat"):
        hand.pool.forget("c")
    hand.pool.forget("b")
    assert list(hand.pool.members) == ["a", "c"]
    await hand.load("a")
    with pytest.raises(Conflict, match="engine a is ready"):
        hand.pool.forget("a")


@on_loop
async def test_what_an_engine_made_of_itself_gets_the_requests() -> None:
    hand = Hand("a")

    class Wrapped(HandBackend):
        @property
        def served(self) -> HandBackend:
            return inner

    inner = HandBackend(hand.pool.members["a"].spec)
    hand.pool._build = Wrapped
    await hand.pool.load("a")
    assert hand.pool.lease(ask()).backend is inner
    assert hand.pool.lease_of("a").backend is inner
    assert hand.pool.backends["a"] is inner
    outer = hand.pool.members["a"].backend
    assert isinstance(outer, Wrapped)
    await hand.pool.drain("a", 0)
    assert outer.did[-1] == "close"
    assert hand.pool.members["a"].serving is None


# --- weights


@on_loop
async def test_an_assignment_changes_all_at_once() -> None:
    hand = await Hand("ab", weights={"a": 1.0, "b": 0.0}).load()
    mirror = MirrorSpec("b")
    hand.pool.lead(AliasSpec("chat", {"a": 1.0}, mirror))
    assert hand.chosen(4) == "aaaa"
    before = hand.pool.routes["chat"]
    hand.pool.assign("chat", {"b": 1.0})
    assert hand.chosen(4) == "bbbb"
    assert before.weights == {"a": 1.0}, "what a reader holds stays as it was"
    assert hand.pool.routes["chat"].mirror == mirror


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0}, {"a": float("nan")}, {"a": float("inf")}])
@on_loop
async def test_weights_must_make_sense(weights: dict[str, float]) -> None:
    hand = await Hand("ab").load("a")
    with pytest.raises(InvalidRequest, match="weights are numbers"):
        hand.pool.assign("chat", weights)
    with pytest.raises(InvalidRequest, match="there is no alias nope"):
        hand.pool.assign("nope", {"a": 1.0})


@on_loop
async def test_only_a_ready_engine_gets_weight() -> None:
    hand = await Hand("abc", weights={"a": 1.0, "b": 0.0}).load("a")
    with pytest.raises(Conflict, match="engine b is gone, not ready: not loaded"):
        hand.pool.assign("chat", {"a": 1.0, "b": 1.0})
    with pytest.raises(InvalidRequest, match="no engine is named x"):
        hand.pool.assign("chat", {"a": 1.0, "x": 0.0})
    hand.pool.assign("chat", {"a": 1.0, "b": 0.0})
    assert hand.chosen(2) == "aa"


def apart(hand: Hand) -> None:
    """Each engine a family of its own."""
    for name, member in hand.pool._members.items():
        member.spec = EngineSpec(name, member.spec.kind, "m", name, probe_s=member.spec.probe_s)


@on_loop
async def test_shares_are_exact() -> None:
    hand = Hand("abc", weights={"a": 90.0, "b": 9.0, "c": 1.0})
    apart(hand)
    await hand.load("abc")
    assert Counter(hand.chosen(300)) == {"a": 270, "b": 27, "c": 3}


@on_loop
async def test_equal_engines_of_a_family_take_turns_by_load() -> None:
    hand = await Hand("abc").load("abc")
    leases = [hand.pool.lease(ask()) for _ in range(9)]
    assert Counter(lease.engine for lease in leases) == {"a": 3, "b": 3, "c": 3}
    for lease in leases:
        if lease.engine != "b":
            lease.close("ok")
    assert "b" not in hand.chosen(6)


# --- prefixes


@on_loop
async def test_a_conversation_stays_with_its_engine() -> None:
    hand = await Hand("abc").load("abc")
    where: dict[str, str] = {}
    for turn in range(1, 5):
        for who in "xyz":
            lease = hand.pool.lease(ask(who * BLOCK * turn))
            assert where.setdefault(who, lease.engine) == lease.engine
            lease.close("ok")
    assert sorted(where.values()) == ["a", "b", "c"]
    assert any(shared > 0.5 for _, shared in hand[where["x"]].asked), "the prediction knows"


@on_loop
async def test_another_tenant_s_conversation_is_not_the_same() -> None:
    hand = await Hand("ab").load()
    first = hand.pool.lease(ask("x" * BLOCK * 4)).engine
    assert hand.pool.lease(ask("x" * BLOCK * 4)).engine == first, "although it is the busier one"
    assert hand.pool.lease(ask("x" * BLOCK * 4, salt="t")).engine != first


@on_loop
async def test_not_if_it_would_wait_too_long_there() -> None:
    hand = await Hand("ab").load()
    first = hand.pool.lease(ask("x" * BLOCK * 8)).engine
    other = "b" if first == "a" else "a"
    hand[first].predicted, hand[other].predicted = 2.0, 0.5
    assert hand.pool.lease(ask("x" * BLOCK * 8)).engine == other


@on_loop
async def test_an_alias_of_one_engine_costs_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = await Hand("a").load("a")

    def never(_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("headrace.gateway.pool.beginnings", never)
    assert hand.chosen(3) == "aaa"
    assert hand["a"].asked == []
    both = Hand("ab")
    apart(both)
    await both.load()
    assert both.chosen(2) == "ab", "nor do two that are no family"


@on_loop
async def test_what_was_measured_serves_where_nothing_is_predicted() -> None:
    hand = await Hand("ab").load()
    for name, seconds in (("a", 2.0), ("b", 0.1)):
        lease = hand.lease(name)
        lease.first_text(seconds)
        lease.close("ok")
    assert hand.chosen(5) == "bbbbb"
    hand.clock.advance(100)
    assert set(hand.chosen(5)) == {"a", "b"}, "that was long ago"


# --- health


@on_loop
async def test_a_dead_engine_gets_nothing_but_trials() -> None:
    hand = await Hand("ab", kind="openai", probe_s=0).load()
    hand.fail("a")
    assert hand.pool.members["a"].reason == "its requests failed"
    assert hand.chosen(20) == "b" * 20
    got = Counter[str]()
    for _ in range(1000):
        hand.clock.advance(0.1)
        lease = hand.pool.lease(ask())
        got[lease.engine] += 1
        lease.close("failed" if lease.engine == "a" else "ok")
    # After 1, 2, 4, 8, 16 and then every 30 s: seven trials in 100 s at the most.
    assert 5 <= got["a"] <= 8
    hand.clock.advance(31)
    assert "a" in hand.chosen(2), "the trial went well"
    assert Counter(hand.chosen(10)) == {"a": 5, "b": 5}


@on_loop
async def test_random_trouble_never_reaches_an_engine_that_is_left_alone() -> None:
    dice = random.Random(11)
    hand = await Hand("abcd", kind="openai", probe_s=0).load("abcd")
    for _ in range(3000):
        hand.clock.advance(dice.random() * 0.2)
        now = hand.clock()
        left_alone = {name for name, m in hand.pool.members.items() if not m.health.ready(now)}
        try:
            lease = hand.pool.lease(ask())
        except EngineUnavailable:
            assert left_alone == set("abcd")
            continue
        assert lease.engine not in left_alone
        end = "failed" if dice.random() < {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.3}[lease.engine] else "ok"
        lease.close(end)  # type: ignore[arg-type]
    assert all(member.leases == 0 == member.health.in_flight for member in hand.pool.members.values())


@on_loop
async def test_when_all_are_left_alone_the_client_learns_for_how_long() -> None:
    hand = await Hand("ab", kind="openai", probe_s=0).load()
    hand.fail("a")
    hand.fail("b")
    with pytest.raises(EngineUnavailable, match="failed lately") as caught:
        hand.pool.lease(ask())
    assert caught.value.retry_after == 1
    assert not hand.pool.ready("chat")
    assert not hand.pool.others(ask(), without=())
    hand.clock.advance(1)
    assert hand.pool.ready("chat")
    assert hand.pool.lease(ask()).engine == "a"


@on_loop
async def test_an_engine_of_ours_that_failed_is_still_tried_if_there_is_no_other() -> None:
    hand = await Hand("ab").load()
    hand.fail("a")
    assert hand.chosen(3) == "bbb"
    assert hand.chosen(2, without={"b"}) == "aa"
    hand.fail("b")
    assert hand.pool.ready("chat")
    assert hand.chosen(1) in "ab"


@on_loop
async def test_weight_nothing_is_for_when_all_others_fail() -> None:
    hand = await Hand("abc", weights={"a": 1.0, "b": 1.0, "c": 0.0}, kind="openai", probe_s=0).load("abc")
    assert "c" not in hand.chosen(20)
    hand.fail("a")
    assert hand.chosen(3) == "bbb"
    hand.fail("b")
    assert hand.chosen(3) == "ccc"
    assert hand.pool.lease(ask(), without={"a", "b"}).engine == "c"


@on_loop
async def test_one_that_is_being_started_again_is_not_asked_while_another_is_there() -> None:
    hand = await Hand("ab").load()
    hand["a"].restarting = True
    assert hand.chosen(3) == "bbb"
    assert hand.pool.members["a"].reason == "it is being started again"
    hand["b"].ready = False
    assert hand.chosen(3) == "aaa", "it will be back, and takes what waits"
    assert hand.pool.ready("chat")
    hand["a"].ready = False
    with pytest.raises(EngineUnavailable, match="not ready"):
        hand.pool.lease(ask())
    assert not hand.pool.ready("chat")


@on_loop
async def test_an_engine_has_no_more_than_it_may() -> None:
    hand = await Hand("ab", kind="openai", probe_s=0, max_concurrency=2).load()
    leases = [hand.pool.lease(ask()) for _ in range(4)]
    with pytest.raises(Overloaded) as caught:
        hand.pool.lease(ask())
    assert caught.value.reason == "queue_full"
    leases[0].close("ok")
    leases[0].close("ok")
    hand.pool.lease(ask())
    with pytest.raises(Overloaded):
        hand.pool.lease(ask())
    assert hand.pool.ready("chat"), "it answers, only not more"


@on_loop
async def test_who_was_tried_is_not_tried_again() -> None:
    hand = Hand("abc")
    hand.pool._members["c"].spec = EngineSpec("c", "llama", "m", "other")
    await hand.load("abc")
    assert set(hand.chosen(4, without={"a"})) == {"b", "c"}
    assert hand.chosen(3, without={"a"}, family="f") == "bbb"
    assert hand.pool.others(ask(), without={"a", "b"})
    assert not hand.pool.others(ask(), without={"a", "b", "c"})
    for kwargs in ({"without": {"a", "b", "c"}}, {"family": "none"}, {"without": {"c"}, "family": "other"}):
        with pytest.raises(EngineUnavailable, match="no other engine"):
            hand.pool.lease(ask(), **kwargs)


@on_loop
async def test_failovers_and_continuations_are_counted() -> None:
    hand = await Hand("ab").load()
    hand.pool.lease(ask()).close("failed")
    hand.pool.lease(ask(), without={"a"}).close("ok")
    assert hand.pool.counts == {"failovers": 1}
    lease = hand.pool.lease(ask(), without={"a"}, family="f")
    assert hand.pool.counts["continued"] == 0
    lease.first_text(0.1)
    lease.first_text(0.2)
    assert hand.pool.counts == {"failovers": 1, "continued": 1}
    ends = {one.engine: one.ends for one in hand.pool.standings()}
    assert (ends["a"]["failed"], ends["b"]["ok"], ends["a"]["slow"]) == (1, 1, 0)
    assert {one.engine: one.in_flight for one in hand.pool.standings()} == {"a": 0, "b": 1}


# --- copies


@on_loop
async def test_what_becomes_of_copies_harms_nobody() -> None:
    hand = await Hand("ab", kind="openai", probe_s=0).load()
    for _ in range(20):
        hand.pool.lease_of("b").close("failed")
    assert not hand.pool.members["b"].health.open
    assert hand.pool.members["b"].ends == {}
    assert Counter(hand.chosen(10)) == {"a": 5, "b": 5}


@on_loop
async def test_copies_take_no_place_and_no_turn() -> None:
    hand = await Hand("ab", kind="openai", probe_s=0, max_concurrency=2).load()
    copies = [hand.pool.lease_of("b") for _ in range(2)]
    with pytest.raises(EngineUnavailable, match="takes no copies"):
        hand.pool.lease_of("b")
    assert {one.engine: one.in_flight for one in hand.pool.standings()} == {"a": 0, "b": 0}
    leases = [hand.pool.lease(ask()) for _ in range(4)]
    assert Counter(lease.engine for lease in leases) == {"a": 2, "b": 2}, "there is room as if there were no copies"
    copies[0].close("ok")
    with pytest.raises(EngineUnavailable):
        hand.pool.lease_of("b")
    for lease in leases:
        lease.close("ok")
    hand.pool.lease_of("b")


@on_loop
async def test_a_copy_is_never_the_trial() -> None:
    hand = await Hand("ab", kind="openai", probe_s=0).load()
    hand.fail("b")
    for _ in range(3):
        with pytest.raises(EngineUnavailable):
            hand.pool.lease_of("b")
        hand.clock.advance(2)
    assert hand.chosen(1, without={"a"}) == "b", "a request is"
    hand.pool.lease_of("b")


@on_loop
async def test_a_drain_waits_for_copies_too() -> None:
    hand = await Hand("ab").load()
    copy, lease = hand.pool.lease_of("a"), hand.lease("a")
    draining = asyncio.ensure_future(hand.pool.drain("a", 60))
    await settle()
    lease.close("ok")
    await settle()
    assert state(hand, "a") is State.DRAINING
    for _ in range(2):
        copy.close("ok")
    await draining
    assert (state(hand, "a"), hand.pool.members["a"].copies) == (State.GONE, 0)


# --- tokens


@on_loop
async def test_an_engine_of_ours_is_found_without_a_turn() -> None:
    hand = Hand("ab", weights={"a": 9.0, "b": 1.0})
    hand.pool.declare(EngineSpec("c", "openai", "m", "f", probe_s=0))
    hand.pool.lead(AliasSpec("other", {"c": 1.0}))
    inner = model(HandEngine())

    class Wrapped(HandBackend):
        @property
        def served(self) -> ServedModel:
            return inner

    plain = hand.pool._build
    hand.pool._build = lambda spec: Wrapped(spec) if spec.name == "b" else plain(spec)
    await hand.load("ac")
    with pytest.raises(EngineUnavailable):
        hand.pool.own("chat")
    await hand.load("b")
    assert hand.pool.own("chat") is inner
    with pytest.raises(Unsupported, match="do not tell tokens"):
        hand.pool.own("other")
    assert (hand.pool.members["b"].ends, hand.pool.members["b"].chosen) == ({}, 0)
    await hand.pool.drain("b", 0)
    with pytest.raises(EngineUnavailable):
        hand.pool.own("chat")


# --- draining


@on_loop
async def test_a_drain_waits_for_its_leases() -> None:
    hand = await Hand("ab").load()
    lease = hand.lease("a")
    draining = asyncio.ensure_future(hand.pool.drain("a", 60))
    await settle()
    assert state(hand, "a") is State.DRAINING
    assert hand.chosen(3) == "bbb"
    assert "a" in hand.pool.backends, "it answers what it has"
    with pytest.raises(EngineUnavailable):
        hand.pool.lease_of("a")
    with pytest.raises(Conflict, match="is draining"):
        await hand.pool.drain("a", 60)
    lease.close("ok")
    await draining
    assert state(hand, "a") is State.GONE
    assert hand["a"].did[-1] == "close"
    assert set(hand.pool.backends) == {"b"}
    assert hand.pool.members["a"].reason == "drained"
    await hand.pool.drain("a", 60)
    await hand.pool.load("a")
    assert len(hand.made["a"]) == 2, "made anew"


@on_loop
async def test_at_the_timeout_what_runs_is_ended() -> None:
    hand = await Hand("ab").load()
    lease = hand.lease("a")
    await hand.pool.drain("a", 0.0)
    assert state(hand, "a") is State.GONE
    assert hand["a"].did[-1] == "close"
    lease.close("failed")
    assert hand.pool.members["a"].leases == 0


@on_loop
async def test_a_drain_can_be_taken_back() -> None:
    hand = await Hand("ab").load()
    lease = hand.lease("a")
    draining = asyncio.ensure_future(hand.pool.drain("a", 60))
    await settle()
    await hand.pool.load("a")
    await draining
    assert state(hand, "a") is State.READY
    assert hand["a"].did == ["start", "warm"], "nothing was loaded again"
    lease.close("ok")
    assert set(hand.chosen(2)) == {"a", "b"}


@on_loop
async def test_one_whose_end_has_begun_is_not_taken_back() -> None:
    hand = await Hand("a").load("a")
    lease = hand.lease("a")
    draining = asyncio.ensure_future(hand.pool.drain("a", 60))
    await settle()
    lease.close("ok")
    for _ in range(10):
        if hand.pool.members["a"].ending is None:
            await asyncio.sleep(0)
    with pytest.raises(Conflict, match="engine a is draining"):
        await hand.pool.load("a")
    await draining
    assert (state(hand, "a"), hand.pool.members["a"].backend) == (State.GONE, None)
    await hand.pool.load("a")
    hand.pool.lease(ask())


@on_loop
async def test_one_that_is_being_closed_is_not_taken_back() -> None:
    hand = await Hand("ab").load()
    hand["a"].close_gate.clear()
    draining = asyncio.ensure_future(hand.pool.drain("a", 60))
    await settle()
    with pytest.raises(Conflict, match="engine a is draining"):
        await hand.pool.load("a")
    hand["a"].close_gate.set()
    await draining
    assert state(hand, "a") is State.GONE


@on_loop
async def test_the_end_closes_everything() -> None:
    hand = await Hand("abcd").load("ab")
    hand.shut.add("c")
    loading = asyncio.ensure_future(hand.pool.load("c"))
    hand.lease("b")
    draining = asyncio.ensure_future(hand.pool.drain("b", 60))
    await settle()
    await hand.pool.close()
    hand["c"].gate.set()
    await draining
    with pytest.raises(StartupError, match="shutting down"):
        await loading
    assert all(member.state is State.GONE for member in hand.pool.members.values())
    assert all(hand[name].did.count("close") >= 1 for name in "abc")
    with pytest.raises(StartupError):
        await hand.pool.load("d")
    await hand.pool.close()


@on_loop
async def test_only_engines_of_ours_say_how_they_sample() -> None:
    hand = Hand("ab")
    await hand.load("a")
    assert hand.pool.sampling("chat") is None
    hand.pool._loaded["b"] = model(HandEngine(), sampling=Sampling(temperature=0.2))
    hand.pool.assign("chat", {"a": 1.0, "b": 0.0})
    assert hand.pool.sampling("chat") == Sampling(temperature=0.2), "the first of ours, whatever stands before it"
