from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.hand_pool import Hand, HandBackend
from gateway.hand_pool import ask as of_pool
from headrace.core.errors import ContextExceeded, EngineUnavailable, Overloaded
from headrace.core.events import Delta, Failed
from headrace.core.request import BATCH, Ask, Options
from headrace.gateway.backend import Work
from headrace.gateway.gate import Seen
from headrace.gateway.mirror import FIRST_RID, SALT, Mirror, Shadow
from headrace.gateway.pool import Route
from headrace.gateway.spec import AliasSpec, EngineSpec, MirrorSpec
from headrace.protocol.continuation import Flavour, outgoing
from server.asgi_driver import on_loop
from server.hand_engine import HandEngine, Hands, model
from server.hand_fleet import HandLease
from server.socket_client import until

SEEN = Seen(True, 0.1, (0.02,))


class Stand:
    """What is mirrored where: to one hand engine."""

    def __init__(self, engine: HandEngine, spec: MirrorSpec | None) -> None:
        self.engine = engine
        self.spec = spec
        self.leases: list[HandLease] = []
        self.down = False

    @property
    def routes(self) -> dict[str, Route]:
        return {"m": Route({}, self.spec)}

    def lease_of(self, name: str) -> HandLease:
        if self.down:
            raise EngineUnavailable("away")
        self.leases.append(HandLease(name, model(self.engine), "f"))
        return self.leases[-1]


class Rig:
    def __init__(self, *, most: int = 4, **spec: Any) -> None:
        self.engine = HandEngine()
        self.stand = Stand(self.engine, MirrorSpec(**{"to": "new", "share": 1.0, "requests": 2, **spec}))
        self.clock = Hands()
        self.promoted: list[tuple[str, str]] = []
        self.mirror = Mirror(self.stand, self.clock, promote=self.promote, most=most)

    async def promote(self, alias: str, engine: str) -> None:
        self.promoted.append((alias, engine))

    async def offer(self, content: str = "hi", **options: Any) -> Shadow:
        """One that runs: the candidate has it."""
        before = len(self.engine.generations)
        shadow = self.mirror.offer(ask(content, **options), "old")
        assert shadow is not None
        await until(lambda: len(self.engine.generations) > before)
        return shadow

    def answer(self, *texts: str, first: float = 0.1, gap: float = 0.02) -> None:
        self.engine.admit()
        self.clock.now += first
        for text in texts:
            self.engine.say(text)
            self.clock.now += gap
        self.engine.finish(tokens=len(texts))

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.mirror.table()["m"]
        return report

    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.report["mirrored"].items() if count}

    async def rest(self) -> None:
        await until(lambda: not self.mirror.running and not self.mirror._tasks)


def ask(content: str = "hi", *, stream: bool = True, **fields: Any) -> Ask:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream, **fields}
    return Ask(True, "m", body, 10, Options(stream=stream, resume=True), 42, salt="tenant")


@on_loop
async def test_a_copy_has_the_least_priority_and_a_salt_of_its_own() -> None:
    rig = Rig()
    await rig.offer()
    (generation,) = rig.engine.generations
    assert (generation.priority, generation.salt, generation.rid) == (BATCH, SALT + "tenant", FIRST_RID)
    assert generation.sampling.seed == 42, "it draws as the live one does"
    await rig.mirror.close()


@on_loop
async def test_shares_are_kept_without_drawing() -> None:
    rig = Rig(share=0.25, most=100)
    made = [rig.mirror.offer(ask(), "old") is not None for _ in range(20)]
    assert made == [i % 4 == 3 for i in range(20)]
    await rig.mirror.close()


@pytest.mark.parametrize("reason", ["off", "same", "full", "down"])
@on_loop
async def test_what_is_not_copied(reason: str) -> None:
    rig = Rig(most=1)
    if reason == "off":
        rig.stand.spec = None
    if reason == "down":
        rig.stand.down = True
    if reason == "full":
        await rig.offer()
    assert rig.mirror.offer(ask(), "new" if reason == "same" else "old") is None
    if reason in ("full", "down"):
        assert rig.outcomes() == {"dropped": 1}
    await rig.mirror.close()


@on_loop
async def test_both_sides_make_a_pair() -> None:
    rig = Rig(compare=True)
    shadow = await rig.offer()
    rig.answer("ab", "cX")
    await rig.rest()
    assert rig.outcomes() == {}, "the live side is not there yet"
    shadow.close(SEEN, "abcd")
    shadow.close(SEEN, "abcd")
    assert rig.outcomes() == {"ok": 1}
    assert rig.report["live"]["requests"] == rig.report["candidate"]["requests"] == 1
    assert rig.report["candidate"]["ttft_p95_ms"] == pytest.approx(100.0, rel=0.01)
    assert rig.report["candidate"]["itl_p99_ms"] == pytest.approx(20.0, rel=0.01)
    assert rig.report["agreement_p50"] == pytest.approx(0.75, rel=0.01)
    assert rig.stand.leases[0].ends == ["ok"]
    assert rig.report["verdict"] == "waiting"


@on_loop
async def test_the_live_side_may_be_first() -> None:
    rig = Rig()
    shadow = await rig.offer()
    shadow.close(SEEN, None)
    assert rig.outcomes() == {}
    rig.answer("ab")
    await rig.rest()
    assert rig.outcomes() == {"ok": 1}
    assert rig.report["agreement_p50"] is None


@pytest.mark.parametrize("broken", ["refuses", "fails", "parse"])
@on_loop
async def test_a_candidate_that_fails_is_rejected(broken: str) -> None:
    rig = Rig(promote="auto")
    if broken == "refuses":
        rig.engine.refusal = Overloaded("full")  # what another server means by 503 nobody knows
    shadow = rig.mirror.offer(ask(temperature=9) if broken == "parse" else ask(), "old")
    assert shadow is not None
    if broken == "fails":
        await until(lambda: bool(rig.engine.generations))
        rig.engine.admit()
        rig.engine.emit(Delta(rig.engine.rid, 0, "x", 1))
        rig.engine.emit(Failed(rig.engine.rid, "engine_failed", "it broke"))
    await rig.rest()
    shadow.close(SEEN, None)
    assert rig.outcomes() == {"error": 1}
    assert rig.report["verdict"] == "reject"
    assert rig.promoted == []
    assert rig.stand.leases[0].ends == ["failed"]


@on_loop
async def test_a_candidate_whose_queue_is_full_is_not_rejected_for_it() -> None:
    rig = Rig()
    rig.engine.refusal = Overloaded("full", reason="queue_full")
    shadow = rig.mirror.offer(ask(), "old")
    assert shadow is not None
    await rig.rest()
    assert rig.outcomes() == {"dropped": 1}
    shadow.close(SEEN, None)
    shadow.cancel()
    assert rig.outcomes() == {"dropped": 1}
    assert (rig.report["verdict"], rig.report["candidate"]["requests"]) == ("waiting", 0)


@on_loop
async def test_one_that_is_cancelled_before_its_first_step_leaves_nothing() -> None:
    rig = Rig()
    for _ in range(6):
        shadow = rig.mirror.offer(ask(), "old")
        assert shadow is not None, "its place is free again"
        shadow.cancel()
        await rig.rest()
    assert rig.outcomes() == {"cancelled": 6}
    assert [lease.ends for lease in rig.stand.leases] == [["cancelled"]] * 6
    assert rig.engine.generations == []


@on_loop
async def test_a_fault_of_ours_is_logged_and_settled(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()

    def broken(*_: object) -> None:
        raise ValueError("user's words")

    rig.engine.submit = broken  # type: ignore[assignment,method-assign]
    shadow = rig.mirror.offer(ask(), "old")
    assert shadow is not None
    await rig.rest()
    shadow.close(SEEN, None)
    assert rig.outcomes() == {"error": 1}
    assert "ValueError" in caplog.text
    assert "words" not in caplog.text


@pytest.mark.parametrize(
    ("flavour", "sent"),
    [("headrace", {"priority": "batch", "cache": False}), ("vllm", None), ("openai", None)],
)
@on_loop
async def test_another_headrace_is_told_that_it_is_a_copy(flavour: Flavour, sent: Any) -> None:
    bodies: list[Any] = []

    class Parsing(HandBackend):
        def parse(self, ask: Ask) -> Any:
            bodies.append(json.loads(outgoing(ask, "there", flavour)))
            raise ContextExceeded("enough is known")

    rig = Rig()
    backend = Parsing(EngineSpec("new", "openai", "there", "f"))
    rig.stand.lease_of = lambda name: HandLease(name, backend, "f")  # type: ignore[method-assign]
    original = ask(headrace={"timings": True, "priority": "interactive"})
    rig.mirror.offer(original, "old")
    await rig.rest()
    assert bodies[0].get("headrace") == sent
    assert original.fields["headrace"] == {"timings": True, "priority": "interactive"}


@on_loop
async def test_errors_of_copies_never_take_a_live_engine_away() -> None:
    hand = await Hand("ab", kind="openai").load()
    hand.pool.lead(AliasSpec("big", {"b": 1.0}))
    hand.pool.lead(AliasSpec("chat", {"a": 1.0}, MirrorSpec("b", share=1.0)))
    mirror = Mirror(hand.pool, hand.clock)

    async def prepare(*_: object) -> Work:
        raise ContextExceeded("too long")

    hand["b"].prepare = prepare  # type: ignore[assignment,method-assign]
    for _ in range(8):
        shadow = mirror.offer(of_pool(), "a")
        assert shadow is not None
        shadow.close(SEEN, None)
        await until(lambda: not mirror.running)
    assert mirror.counts == {("chat", "error"): 8}
    assert hand.pool.lease(of_pool(model="big")).engine == "b"
    await hand.pool.close()


@on_loop
async def test_what_failed_live_says_nothing() -> None:
    rig = Rig()
    shadow = await rig.offer()
    shadow.close(Seen(False, None), None)
    rig.engine.fail()
    await rig.rest()
    assert rig.outcomes() == {"unpaired": 1}
    assert rig.report["verdict"] == "waiting"


@on_loop
async def test_a_client_that_leaves_ends_its_copy() -> None:
    rig = Rig()
    shadow = await rig.offer()
    shadow.cancel()
    await rig.rest()
    assert rig.engine.cancelled == [FIRST_RID]
    assert rig.outcomes() == {"cancelled": 1}
    assert rig.stand.leases[0].ends == ["cancelled"]
    done = await rig.offer()
    rig.answer("x")
    await rig.rest()
    done.cancel()
    done.cancel()
    assert rig.outcomes() == {"cancelled": 2}


@on_loop
async def test_a_good_window_promotes_once() -> None:
    rig = Rig(promote="auto", requests=2)
    for _ in range(2):
        shadow = await rig.offer()
        rig.answer("a", "b")
        shadow.close(SEEN, None)
        await rig.rest()
    assert rig.promoted == [("m", "new")]
    assert rig.report["verdict"] == "promote"
    assert rig.report["live"]["requests"] == 0, "the next window began"


@on_loop
async def test_without_auto_nothing_is_promoted() -> None:
    rig = Rig(requests=1)
    shadow = await rig.offer()
    rig.answer("a", "b")
    shadow.close(SEEN, None)
    await rig.rest()
    assert rig.report["verdict"] == "promote"
    assert rig.promoted == []


@on_loop
async def test_a_slower_candidate_is_rejected_and_judged_again() -> None:
    rig = Rig(promote="auto", requests=1)
    shadow = await rig.offer()
    rig.answer("a", "b", first=0.5)
    shadow.close(SEEN, None)
    await rig.rest()
    assert rig.report["verdict"] == "reject"
    shadow = await rig.offer()
    rig.answer("a", "b", first=0.05)
    shadow.close(SEEN, None)
    await rig.rest()
    assert rig.promoted == [("m", "new")]


@on_loop
async def test_another_candidate_begins_anew() -> None:
    rig = Rig(requests=1)
    shadow = await rig.offer()
    rig.answer("a")
    shadow.close(SEEN, None)
    await rig.rest()
    rig.stand.spec = MirrorSpec(to="newer", share=1.0)
    await rig.offer()
    assert rig.outcomes() == {}
    assert rig.report["to"] == "newer"
    await rig.mirror.close()


@on_loop
async def test_closing_ends_all_copies() -> None:
    rig = Rig()
    await rig.offer()
    await rig.offer()
    await rig.mirror.close()
    assert (rig.mirror.running, rig.engine.live) == (0, {})
