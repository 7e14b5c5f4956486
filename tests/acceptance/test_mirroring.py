"""Copies of requests: nobody notices them."""

from __future__ import annotations

from typing import Any

import pytest

from acceptance.asking import on_loop
from acceptance.scene import MODEL, Candidate, scripted
from headrace.core.errors import UpstreamFailed
from headrace.core.events import Failed
from headrace.gateway.spec import MirrorSpec
from server.hand_engine import HandEngine, model
from server.socket_client import until

STEPS = [[b"one "], [b"two "], [b"three"]]
SPEC = MirrorSpec(to="new", share=1.0, compare=True, requests=1000)


def bare(answer: Any) -> list[Any]:
    """Its chunks without what differs from answer to answer."""
    return [{k: v for k, v in chunk.items() if k not in ("id", "created", "headrace")} for chunk in answer.chunks]


def candidate(engine: HandEngine) -> Candidate:
    return Candidate(model(engine), SPEC)


@on_loop
async def test_oc_52_a_candidate_that_raises_hangs_refuses_or_says_something_else() -> None:
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    async with scripted(STEPS) as scene:
        plain = bare(await scene.chat(**asked))
    for behaviour in ("raises", "hangs", "refuses", "differs"):
        engine = HandEngine()
        if behaviour == "refuses":
            engine.refusal = UpstreamFailed("nobody listens there")
        mirrored = candidate(engine)
        async with scripted(STEPS, candidate=mirrored) as scene:
            answer = await scene.chat(**asked)
            assert bare(answer) == plain, behaviour
            if behaviour != "refuses":
                await until(lambda: bool(engine.generations))  # noqa: B023
                if behaviour == "raises":
                    engine.emit(Failed(engine.rid, "engine_failed", "broken"))
                elif behaviour == "differs":
                    engine.admit()
                    engine.say("something else")
                    engine.finish()
            # A copy that hangs runs on; the live side is as it is without one.
            series = await scene.metrics()
            assert series['headrace_requests_total{outcome="ok",route="/v1/chat/completions"}'] == 1
            assert series['headrace_completion_tokens_total{model="scripted"}'] == len(STEPS) + 1
            (line,) = [line for line in scene.access if line["path"] == "/v1/chat/completions"]
            assert line["completion_tokens"] == len(STEPS) + 1, "only the live tokens are booked"
            await scene.alive()
            if behaviour != "hangs":
                await until(lambda: bool(mirrored.ends))  # noqa: B023
                assert mirrored.ends[0] == ("ok" if behaviour == "differs" else "failed")


@on_loop
async def test_oc_52_a_live_answer_does_not_wait_for_its_copy() -> None:
    engine = HandEngine()
    async with scripted(STEPS, candidate=candidate(engine), shut=True) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        scene.gate.allow(1)
        await wire.head()
        first = await wire.event()
        assert first["choices"][0]["delta"]["content"] == "one "
        await until(lambda: bool(engine.generations))
        assert engine.live, "the copy has not said a word"
        scene.gate.open()


@on_loop
async def test_oc_52_work_is_bounded_and_what_is_too_much_is_counted() -> None:
    engine = HandEngine()
    async with scripted(STEPS, candidate=candidate(engine)) as scene:
        for _ in range(7):
            assert (await scene.chat(stream=True)).status == 200
        await until(lambda: len(engine.live) == 4)
        series = await scene.metrics()
        assert series[f'headrace_mirrored_total{{model="{MODEL}",outcome="dropped"}}'] == 3
        assert len(engine.generations) == 4


@on_loop
async def test_oc_52_who_leaves_ends_both() -> None:
    engine = HandEngine()
    mirrored = candidate(engine)
    async with scripted(STEPS, candidate=mirrored, shut=True) as scene:
        wire = await scene.connect()
        await wire.chat(stream=True)
        scene.gate.allow(1)
        await wire.head()
        await wire.event()
        await until(lambda: bool(engine.live))
        wire.reset()
        await until(lambda: not engine.live)
        await until(lambda: not scene.app.running)
        assert mirrored.ends == ["cancelled"]
        scene.gate.open()
        await scene.idle()


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"headrace": {"cache": True}}])
@on_loop
async def test_oc_52_a_copy_shares_no_cache_with_its_user(fields: dict[str, Any]) -> None:
    engine = HandEngine()
    async with scripted(STEPS, candidate=candidate(engine)) as scene:
        await scene.chat(stream=True, **fields)
        await until(lambda: bool(engine.generations))
        assert engine.generations[0].salt.startswith("mirror")
