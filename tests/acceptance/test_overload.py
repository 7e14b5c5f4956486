"""OC-56 to OC-58: full queues, numbers after a mass abort, silence during prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from acceptance.asking import COMP, Answer, envelope, on_loop
from acceptance.scene import FAIL, MODEL, Scene, scripted
from headrace.server.stream import StreamLimits
from headrace.testing import ManualClock, Script
from server.socket_client import until


def refused(series: dict[str, float]) -> dict[str, float]:
    """Refusals so far by reason, those that there were."""
    start, end = f'headrace_refused_total{{model="{MODEL}",reason="', '"}'
    return {
        name.removeprefix(start).removesuffix(end): value
        for name, value in series.items()
        if name.startswith(start) and value
    }


def check_refusal(answer: Answer) -> None:
    """503 with an envelope, and when to try again."""
    envelope(answer, 503, None, code="overloaded")
    assert not answer.stream
    assert int(answer.headers["retry-after"]) >= 1


# OC-56 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def good_or_bad(prompt: Sequence[int]) -> Script:
    return [[b"a"], [FAIL]] if bytes(prompt) == b"fail" else [[b"a"]] * 10


async def outcomes(scene: Scene) -> dict[str, float]:
    """Requests for completions so far, by outcome; nothing there is ever negative."""
    series = await scene.metrics()
    assert not [name for name, value in series.items() if value < 0]
    found = {kind: series.get(f'headrace_requests_total{{outcome="{kind}",route="{COMP}"}}', 0) for kind in KINDS}
    return {kind: count for kind, count in found.items() if count}


KINDS = ("ok", "error", "cancelled", "rejected", "invalid")


@on_loop
async def test_oc_56_aborts_in_the_numbers() -> None:
    async with scripted(good_or_bad, max_running=4, max_waiting=16, shut=True) as scene:
        wires = [await scene.connect() for _ in range(20)]
        for i, wire in enumerate(wires):
            await wire.comp(prompt=f"{i:02}", stream=True)
        await until(lambda: scene.app.running == 20)
        await until(lambda: scene.gate.standing)
        for _ in range(5):
            check_refusal(await scene.comp(prompt="00", stream=True))
        scene.gate.allow(2)  # the first step began when only some were there, the second has four
        begun = [asyncio.create_task(wire.head()) for wire in wires]
        await until(lambda: sum(task.done() for task in begun) == 4)
        series = await scene.metrics()
        assert series["headrace_open_streams"] == 20
        assert series[f'headrace_requests_running{{model="{MODEL}"}}'] == 4
        assert series[f'headrace_requests_waiting{{model="{MODEL}"}}'] == 16
        for task in begun:
            task.cancel()
        await asyncio.wait(begun)
        for wire in wires:
            wire.reset()
        await scene.idle()  # the gate is shut, so it needs no further step, and no further request
        assert await outcomes(scene) == {"cancelled": 20, "rejected": 5}
        assert scene.stats.cells_running == 0

        scene.gate.open()
        for i in range(5):
            assert (await scene.comp(prompt="fail")).status == 500
            answer = await scene.comp(prompt="good", stream=i < 3)
            assert answer.text == "a" * 10
        await scene.idle()
        assert await outcomes(scene) == {"ok": 5, "error": 5, "cancelled": 20, "rejected": 5}
        series = await scene.metrics()
        assert refused(series) == {"queue_full": 5}
        assert series["headrace_ttft_seconds_count"] == 4 + 3, "one for each stream that had text"
        assert series['headrace_stage_seconds_count{stage="prefill"}'] == 4 + 5 + 5
        engine = scene.scripted
        decoded = sum(draw.position > draw.prompt for draw in engine.draws)
        label = f'{{model="{MODEL}"}}'
        assert series["headrace_prompt_tokens_total" + label] == sum(map(sum, engine.batches)) - decoded
        # Where a script ends, the token that says so is drawn too.
        assert series["headrace_completion_tokens_total" + label] == engine.produced
        await scene.alive()


# OC-57. Requests of another priority, and prompts of other lengths, are the scheduler's tests. ────────────────────────


@on_loop
async def test_oc_57_full_queue() -> None:
    clock = ManualClock()
    limits = StreamLimits(queue_timeout_s=3.0)
    async with scripted(
        [[b"a"], [b"b"]], max_running=1, max_waiting=2, shut=True, clock=clock, stream_limits=limits
    ) as scene:
        asked = [asyncio.create_task(scene.comp(prompt=f"{i}", stream=i % 2 == 0)) for i in range(10)]
        await until(lambda: sum(task.done() for task in asked) == 7)
        for task in asked:
            if task.done():
                check_refusal(task.result())
        await until(lambda: scene.gate.standing)
        assert scene.gate.passed == 0, "they did not wait for as much as one step"
        assert scene.app.running == 3
        left = [task for task in asked if not task.done()]

        assert (await scene.get("/health")).status == 200
        series = await scene.metrics()
        assert refused(series) == {"queue_full": 7}
        assert series[f'headrace_requests_running{{model="{MODEL}"}}'] == 1

        clock.advance(2.9)
        scene.app.ticker.tick(clock())
        assert (await scene.get("/health")).status == 200
        assert not any(task.done() for task in left)
        clock.advance(0.2)
        scene.app.ticker.tick(clock())
        await until(lambda: sum(task.done() for task in left) == 2)
        for task in left:
            if task.done():
                check_refusal(task.result())
        assert refused(await scene.metrics()) == {"queue_full": 7, "queue_timeout": 2}

        scene.gate.open()
        answers = await asyncio.gather(*asked)
        assert [answer.text for answer in answers if answer.status == 200] == ["ab"]
        assert len(scene.scripted.asked) == 1, "nothing was computed for the others"
        await scene.idle()
        await scene.alive()


@on_loop
async def test_oc_57_first_come_first_served() -> None:
    async with scripted([[b"a"], [b"b"]], max_running=1, max_waiting=5, shut=True) as scene:
        asked = []
        for i in range(6):
            asked.append(asyncio.create_task(scene.comp(prompt=f"{i}", stream=i % 2 == 0)))
            await until(lambda: scene.app.running == len(asked))
        check_refusal(await scene.comp(prompt="6"))
        scene.gate.open()
        assert [answer.text for answer in await asyncio.gather(*asked)] == ["ab"] * 6
        assert [bytes(prompt) for prompt in scene.scripted.asked] == [b"0", b"1", b"2", b"3", b"4", b"5"]
        await scene.idle()


# OC-58. That clients skip comments is tested with the clients. ────────────────────────────────────────────────────────


@on_loop
async def test_oc_58_silence_during_prefill() -> None:
    clock = ManualClock()
    limits = StreamLimits(header_hold_s=1.0, heartbeat_s=3.0, queue_timeout_s=30.0)
    async with scripted([[b"a"], [b"b"]], max_running=1, shut=True, clock=clock, stream_limits=limits) as scene:
        running, queued, whole = [await scene.connect() for _ in range(3)]
        await running.chat(stream=True)
        await until(lambda: scene.gate.standing)
        await queued.chat(stream=True)
        await whole.chat()
        await until(lambda: scene.app.running == 3)
        silent = [asyncio.create_task(wire.reader.read(1)) for wire in (queued, whole)]
        for second in range(1, 13):
            clock.advance(1.0)
            scene.app.ticker.tick(clock())
            if second == 1:
                assert (await running.head())[0] == 200
            if second in (1, 4, 7, 10):
                assert await running.block() == b": hb"
            assert (await scene.get("/health")).status == 200
            assert not any(task.done() for task in silent), "a refusal must stay possible, and JSON starts with JSON"

        scene.gate.open()
        first = await running.block()
        assert first.startswith(b"data: ")
        assert [await task for task in silent] == [b"H", b"H"]
        assert (await running.rest())[-1] == "[DONE]"
        assert (await queued.head())[0] == 200
        while block := await queued.block():
            assert block.startswith(b"data: ")
        status, headers, body = await whole.answer()
        assert (status, headers["content-type"]) == (200, "application/json")
        assert body["choices"][0]["message"]["content"] == "ab"

        await scene.idle()
        series = await scene.metrics()
        assert series["headrace_ttft_seconds_count"] == 2
        assert series["headrace_ttft_seconds_sum"] == 24.0, "a comment is no token"
        await scene.alive()
