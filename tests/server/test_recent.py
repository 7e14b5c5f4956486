from __future__ import annotations

from collections.abc import Sequence

from headrace.core.timeline import Timeline
from headrace.gateway.guard import Caller, OpenGuard
from headrace.observe.record import Record
from headrace.server.recent import Recent
from server.asgi_driver import Client, on_loop
from server.hand_engine import HandEngine, server


def record(request_id: str) -> Record:
    return Record(request_id, "POST", "/v1/chat/completions", Timeline(0.0))


def test_the_latest_are_kept() -> None:
    recent = Recent(2)
    for request_id in ("a", "b", "a", "c"):
        recent.add("", record(request_id))
    assert len(recent) == 2
    assert recent.find("", "b") is None
    assert recent.find("", "a") is not None
    assert recent.find("", "c") is not None


def test_a_caller_finds_its_own() -> None:
    recent = Recent()
    recent.add("one", record("a"))
    assert recent.find("one", "a") is not None
    assert recent.find("two", "a") is None


def test_the_longest_gap_is_named() -> None:
    recent, one = Recent(), record("a")
    one.gaps = [0.1, 0.25, 0.2]
    recent.add("", one)
    found = recent.find("", "a")
    assert found is not None
    assert found["longest_gap_ms"] == 250.0


@on_loop
async def test_it_is_asked_for_by_the_request_s_id() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app, headers=((b"x-request-id", b"mine"),)).chat(stream=True) as call:
        engine.admit(3)
        engine.say("x")
        engine.finish()
        await call.task
    async with Client(app).get("/v1/requests/mine/timeline") as call:
        assert call.status == 200
        found = call.json()
        assert (found["model"], found["engine"], found["status"], found["outcome"]) == ("m", "m", 200, "ok")
        assert found["timeline"]["cached_tokens"] == 3
    for path in ("/v1/requests/other/timeline", "/v1/requests/mine", "/v1/requests/mine/"):
        async with Client(app).get(path) as call:
            assert call.status == 404


class Named(OpenGuard):
    """A key of one name, given anew."""

    owner = "the first"

    async def identify(self, authorization: Sequence[bytes]) -> Caller:
        return Caller("ann", owner=self.owner)


@on_loop
async def test_who_has_the_name_of_a_former_key_does_not_see_its_requests() -> None:
    engine, guard = HandEngine(), Named()
    app = server(engine, guard=guard)
    async with Client(app).chat(headers=[(b"x-request-id", b"mine")]) as call:
        engine.admit()
        engine.finish()
        await call.task
    for owner, status in (("the first", 200), ("the second", 404)):
        guard.owner = owner
        async with Client(app).get("/v1/requests/mine/timeline") as call:
            assert call.status == status
