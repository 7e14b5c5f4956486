"""Paced streams over the whole application, in virtual time: what is written when, to the millisecond."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.core.errors import EngineFailed
from headrace.core.events import Broken, Delta, Relayed, TokenLogprob
from headrace.gateway.fixed import FixedLease
from headrace.observe.metrics import Metrics
from headrace.server.app import App
from headrace.server.exchange import CHANNEL
from headrace.server.stream import StreamLimits
from server.asgi_driver import Call, Client, settle
from server.hand_engine import HandEngine, clean, model, server
from server.test_stream_direct import HandChannel
from virtual_time import run

ADAPTIVE = {"pace": "adaptive"}


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))  # type: ignore[arg-type]

    return wrapper


class Stage:
    """A server in virtual time, one stream, and when it was written to."""

    def __init__(self, *, limits: StreamLimits | None = None, extensions: dict[str, Any] | None = None) -> None:
        self.engine = HandEngine()
        self.loop = asyncio.get_running_loop()
        self.app: App = server(self.engine, clock=self.loop.time, limits=limits)  # type: ignore[arg-type]
        self.client = Client(self.app, extensions=extensions)
        self.log: list[tuple[float, str]] = []
        """(ms since the first write, the text of the write)"""

    async def stream(self, **fields: Any) -> Call:
        call = self.client.chat(stream=True, **fields)
        sent, self.call = call.sent, call

        class Sent(list[Any]):
            def append(_, message: Any) -> None:
                sent_at = self.loop.time()
                list.append(_, message)
                if message.get("body"):
                    self.log.append((sent_at, _text(message["body"])))

        call.sent = Sent(sent)
        await settle()
        return call

    async def at(self, ms: float) -> None:
        """Until so much later than the first write."""
        await asyncio.sleep(self.log[0][0] + ms / 1e3 - self.loop.time() if self.log else ms / 1e3)

    @property
    def writes(self) -> list[tuple[float, str]]:
        return [(round((at - self.log[0][0]) * 1e3, 3), text) for at, text in self.log]


def _text(body: bytes) -> str:
    reading = Call.__new__(Call)
    reading.sent = [{}, {"body": body}]
    return reading.content()


async def ended(stage: Stage) -> None:
    await stage.call.task
    clean(stage.app, stage.engine)


@in_virtual_time
async def test_a_burst_flows_evenly() -> None:
    stage = Stage()
    await stage.stream(headrace=ADAPTIVE)
    for ms in (0, 80, 160):
        await stage.at(ms)
        for word in "abcd" if ms else "a":
            stage.engine.say(word)
    await stage.at(300)
    stage.engine.finish()
    await ended(stage)
    pace = 20 / 1.1
    expected = [(0.0, "a"), *((ms + i * pace, word) for ms in (80, 160) for i, word in enumerate("abcd")), (300, "")]
    assert [ms for ms, _ in stage.writes] == pytest.approx([ms for ms, _ in expected], abs=0.002)
    assert [text for _, text in stage.writes] == [text for _, text in expected]


@in_virtual_time
async def test_several_tokens_in_one_event_become_several_pieces() -> None:
    stage = Stage()
    call = await stage.stream(headrace=ADAPTIVE)
    rid = stage.engine.rid
    stage.engine.emit(Delta(rid, 0, "The first one", 3, ids=(1, 2, 3)))
    await settle()
    await stage.at(90)
    stage.engine.emit(Delta(rid, 0, " one two three", 3, ids=(4, 5, 6)))
    await stage.at(180)
    stage.engine.finish("stop", 7)
    await ended(stage)
    assert [text for _, text in stage.writes] == ["The first one", " one", " two", " three", ""]
    assert stage.writes[2][0] - stage.writes[1][0] == pytest.approx(30 / 1.1, abs=0.002)
    assert call.events()[-1] == "[DONE]"


@in_virtual_time
async def test_logprobs_stay_with_their_text() -> None:
    stage = Stage()
    call = await stage.stream(headrace=ADAPTIVE, logprobs=True)
    rid = stage.engine.rid
    stage.engine.say("a")
    await stage.at(50)
    two = (TokenLogprob(1, b" b", -0.5), TokenLogprob(2, b" c", -0.5))
    stage.engine.emit(Delta(rid, 0, " b c", 2, logprobs=two))
    stage.engine.finish("stop", 3)
    await ended(stage)
    chunk = next(event for event in call.events() if " b" in str(event))
    assert chunk["choices"][0]["delta"]["content"] == " b c"
    assert len(chunk["choices"][0]["logprobs"]["content"]) == 2


@in_virtual_time
async def test_a_window_is_one_write() -> None:
    stage = Stage()
    await stage.stream(headrace={"pace": "window:3"})
    for i, word in enumerate("abcdefgh"):
        await stage.at(20 * i)
        stage.engine.say(word)
        await settle()
    stage.engine.finish()
    await ended(stage)
    assert stage.writes == [(0, "a"), (60, "bcd"), (120, "efg"), (140, "h")]


@in_virtual_time
async def test_a_window_that_stays_open_is_written_in_time() -> None:
    stage = Stage()
    await stage.stream(headrace={"pace": "window:3", "pace_max_delay_ms": 50})
    stage.engine.say("a")
    await settle()
    await stage.at(20)
    stage.engine.say("b")
    await stage.at(500)
    assert stage.writes == [(0, "a"), (70, "b")]
    stage.engine.finish()
    await ended(stage)


@pytest.mark.parametrize("way", ["finish", "fail", "server", "fault"])
@in_virtual_time
async def test_nothing_is_kept_back_at_the_end(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    call = await stage.stream(headrace={"pace": "window:9"})
    stage.engine.say("a")
    await settle()
    await stage.at(20)
    for word in "bcd":
        stage.engine.say(word)
    await settle()
    await stage.at(40)
    if way == "finish":
        stage.engine.finish()
    elif way == "fail":
        stage.engine.fail()
    elif way == "server":
        stage.app.fail_all(EngineFailed("it is over"))
    else:

        def broken(*_: Any) -> bytes:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr("headrace.protocol.answer.Answer.delta", broken)
        stage.engine.say("e")
    await ended(stage)
    assert stage.writes == [(0, "a"), (40, "bcd")]
    assert (call.events()[-1] == "[DONE]") == (way == "finish")
    assert ("error" in call.events()[-1]) == (way != "finish")


@in_virtual_time
async def test_a_client_that_leaves_ends_it() -> None:
    stage = Stage()
    call = await stage.stream(headrace=ADAPTIVE)
    stage.engine.say("a")
    await settle()
    await stage.at(100)
    for word in "bcd":
        stage.engine.say(word)
    await settle()
    call.hang_up()
    await ended(stage)
    assert len(stage.engine.cancelled) == 1
    async with stage.client.get(f"/v1/requests/{call.headers['x-request-id']}/timeline") as asked:
        await asked.task
        assert asked.json()["timeline"]["pace"]["max_ms"] == 0.0, "of what had left"


@in_virtual_time
async def test_the_timeline_says_what_it_cost() -> None:
    stage = Stage()
    call = await stage.stream(headrace={"pace": "window:2", "timings": True})
    for i, word in enumerate("abc"):
        await stage.at(30 * i)
        stage.engine.say(word)
        await settle()
    stage.engine.finish()
    await ended(stage)
    timeline = call.events()[-2]["headrace"]["timeline"]
    assert timeline["pace"] == {"mean_ms": 10.0, "max_ms": 30.0}
    assert list(timeline)[-1] == "pace"
    text = stage.app.metrics.render().decode()
    assert "headrace_pace_delay_seconds_count 3.0" in text
    assert 'headrace_pace_delay_seconds_bucket{le="0.025"} 2.0' in text


@in_virtual_time
async def test_a_stream_that_is_not_paced_has_none_of_it() -> None:
    channel = HandChannel()
    stage = Stage(extensions={CHANNEL: channel})
    call = await stage.stream(headrace={"timings": True, "pace": "off"})
    channel.call = call
    stage.engine.say("a")
    await settle()
    stage.engine.say("b")
    assert len(channel.written) == 1, "the short way is open"
    stage.engine.finish()
    await ended(stage)
    assert "pace" not in call.events()[-2]["headrace"]["timeline"]
    assert "headrace_pace_delay_seconds_count 0.0" in stage.app.metrics.render().decode()


@in_virtual_time
async def test_a_paced_stream_takes_no_short_way() -> None:
    channel = HandChannel()
    stage = Stage(extensions={CHANNEL: channel})
    call = await stage.stream(headrace={"pace": "window:2"})
    channel.call = call
    for word in "abc":
        stage.engine.say(word)
        await settle()
    assert channel.written == []
    stage.engine.finish()
    await ended(stage)
    assert call.content() == "abc"


@in_virtual_time
async def test_what_the_pacer_holds_counts_as_held() -> None:
    stage = Stage(limits=StreamLimits(max_pending_events=8))
    await stage.stream(headrace={"pace": "window:100", "pace_max_delay_ms": 1000})
    rid = stage.engine.rid
    stage.engine.say("a")
    await settle()
    for _ in range(8):
        stage.engine.say("b")
        await settle()
    assert stage.engine.paused == set()
    stage.engine.say("c")
    await settle()
    assert stage.engine.paused == {rid}
    await stage.at(1001)
    assert stage.engine.paused == set(), "the window was written in time, and the engine goes on"
    stage.engine.finish()
    await ended(stage)


@in_virtual_time
async def test_bytes_of_another_server_flow_evenly_too() -> None:
    stage = Stage()
    call = await stage.stream(headrace=ADAPTIVE)
    rid, sink = stage.engine.rid, stage.engine.live[stage.engine.rid]

    def raw(*words: str) -> bytes:
        return b"".join(b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % w.encode() for w in words)

    sink(Relayed(rid, raw("a"), "a", "a", 1))  # type: ignore[arg-type]
    await settle()
    for ms in (90, 180):
        await stage.at(ms)
        sink(Relayed(rid, raw("b", "c", "d"), "bcd", "bcd", 3))  # type: ignore[arg-type]
    await stage.at(300)
    del stage.engine.live[rid]
    sink(Relayed(rid, raw("") + b": the end\r\n\r\n", over=True))  # type: ignore[arg-type]
    await ended(stage)
    assert [text for _, text in stage.writes] == ["a", "b", "c", "d", "b", "c", "d", ""]
    assert stage.writes[2][0] - stage.writes[1][0] == pytest.approx(30 / 1.1, abs=0.002)
    assert call.body == raw(*"abcdbcd", "") + b": the end\r\n\r\ndata: [DONE]\n\n"


@in_virtual_time
async def test_the_first_text_of_a_second_attempt_waits_for_nothing() -> None:
    """Both texts came in one turn, the first with its failure: nothing of it was written."""
    first, second = HandEngine(), HandEngine()
    stage = Stage()
    stage.app.fleet = _Pair(first, second)  # type: ignore[assignment]
    stage.app.metrics = Metrics({})
    call = await stage.stream(headrace={"pace": "window:5"})
    first.say("void")
    first.live[first.rid](Broken(first.rid, EngineFailed("gone")))  # type: ignore[arg-type]
    await settle()
    second.say("a")
    await settle()
    assert call.content() == "a"
    second.say("b")
    second.finish()
    await call.task
    assert call.content() == "ab"


class _Pair:
    """Two engines behind the alias `m`."""

    def __init__(self, *engines: HandEngine) -> None:
        self._models = {name: model(engine) for name, engine in zip("xy", engines, strict=True)}
        self.aliases = ["m"]
        self.backends = self._models

    def lease(self, ask: Any, *, without: Any = (), family: Any = None) -> Any:
        name = next(name for name in self._models if name not in without)
        return FixedLease(name, self._models[name])

    def others(self, ask: Any, *, without: Any) -> bool:
        return any(name not in without for name in self._models)
