"""OC-32: log probabilities are finite, whatever the constraints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from acceptance.asking import Answer, envelope, on_loop
from acceptance.scene import scripted
from acceptance.tiny import Tiny
from headrace.core.events import TokenLogprob

FLOOR = -9999.0
ABC = [[b"a"], [b"b"], [b"c"]]
ASKED: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "temperature": 0.7, "top_k": 1, "seed": 7}


def usage_too(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


def check(entries: Sequence[dict[str, Any]], top: int) -> None:
    """Each entry is whole and every number in it finite."""
    for entry in entries:
        assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
        assert len(entry["top_logprobs"]) == top
        for one in (entry, *entry["top_logprobs"]):
            assert math.isfinite(one["logprob"])
            assert FLOOR <= one["logprob"] <= 0
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)


def count(answer: Answer) -> None:
    """One entry for each token but one that ended the answer and is not shown."""
    ended = answer.finish == ["stop"]
    assert len(answer.logprobs) == answer.usage["completion_tokens"] - ended
    assert b"".join(bytes(entry["bytes"]) for entry in answer.logprobs).decode() == answer.text


# A schema that leaves one legal token comes with structured output. A bias of 100 on one token leaves one as well.
@pytest.mark.real
@on_loop
async def test_oc_32_logprobs_of_a_real_model(tiny: Callable[..., Tiny]) -> None:
    server = tiny()
    async with server.calls():
        (only,) = server.vocabulary.encode(" river", special=False)
        constraints: tuple[tuple[dict[str, Any], str | None], ...] = (
            ({}, None),
            ({"logit_bias": {str(only): 100}}, " river"),
        )
        for constraint, expected in constraints:
            texts = set()
            for stream in (False, True):
                answer = await server.chat(max_tokens=6, **ASKED, **constraint, **usage_too(stream))
                assert answer.status == 200
                assert answer.logprobs
                check(answer.logprobs, 5)
                count(answer)
                for entry in answer.logprobs:
                    if expected is None:  # greedy: what was drawn is the likeliest
                        assert entry["bytes"] == entry["top_logprobs"][0]["bytes"]
                        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
                    else:
                        assert entry["token"] == expected
                texts.add(answer.text)
            assert len(texts) == 1

        # An end token that is drawn but not shown has no entry.
        eos = server.info.eos
        for stream in (False, True):
            answer = await server.chat(max_tokens=6, **ASKED, logit_bias={str(eos): 100}, **usage_too(stream))
            assert answer.finish == ["stop"]
            assert answer.usage["completion_tokens"] == 1
            assert answer.logprobs == []
        await server.alive()


@pytest.mark.real
@on_loop
async def test_oc_32_how_many_alternatives(tiny: Callable[..., Tiny]) -> None:
    server = tiny()
    async with server.calls():
        for top in (0, 20):
            answer = await server.chat(max_tokens=2, logprobs=True, top_logprobs=top)
            assert answer.status == 200
            check(answer.logprobs, top)
        for stream in (False, True):
            for wrong in (21, -1):
                answer = await server.chat(max_tokens=2, logprobs=True, top_logprobs=wrong, stream=stream)
                envelope(answer, 400, "top_logprobs")
            withouts: tuple[dict[str, Any], ...] = ({}, {"logprobs": False}, {"logprobs": None})
            for without in withouts:
                answer = await server.chat(max_tokens=2, top_logprobs=5, stream=stream, **without)
                envelope(answer, 400, "top_logprobs")
        await server.alive()


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30, math.inf, 0.5])
@on_loop
async def test_oc_32_an_engine_that_gives_what_json_has_no_word_for(value: float) -> None:
    async with scripted(ABC) as scene:

        def logprob(token: int, top: int) -> TokenLogprob:
            piece = scene.scripted.tokenizer.piece(token)
            return TokenLogprob(token, piece, value, ((token, piece, value),) * top)

        scene.scripted._logprob = logprob  # type: ignore[method-assign]
        for stream in (False, True):
            answer = await scene.chat(**ASKED, **usage_too(stream))
            assert answer.status == 200
            check(answer.logprobs, 5)
            count(answer)
            assert answer.text == "abc"
            expected = 0.0 if value > 0 else FLOOR
            assert {entry["logprob"] for entry in answer.logprobs} == {expected}
            if stream:
                assert answer.done
            # Completions write them differently.
            answer = await scene.comp(logprobs=5, **usage_too(stream))
            assert answer.status == 200
            reports = [choice["logprobs"] for choice in answer.choices() if choice["logprobs"]]
            assert [lp for report in reports for lp in report["token_logprobs"]] == [expected] * 3
        await scene.alive()
