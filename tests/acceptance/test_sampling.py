"""Acceptance, section 4: sampling parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from acceptance.asking import CHAT, COMP, Answer, Asking, chat_fields, comp_fields, dumps, envelope, on_loop
from acceptance.scene import Scene, scripted
from acceptance.tiny import Tiny
from server.socket_client import until

TinyStart = Callable[..., Tiny]
ABC = [[b"a"], [b"b"], [b"c"]]


def alone(tiny: TinyStart) -> Tiny:
    """One place and no prefix cache: the same request meets the same batches."""
    return tiny(engine_max_running=1, engine_prefix_cache=False)


async def post_literal(server: Asking, path: str, field: str, literal: str) -> Answer:
    """A request with one more field, whose value is this very text, JSON or not."""
    body = dumps((chat_fields if path == CHAT else comp_fields)(server.model, {}))
    return await server.post(path, body.removesuffix(b"}") + f', "{field}": {literal}}}'.encode())


# OC-12 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@on_loop
async def test_oc_12_nan_and_infinity() -> None:
    async with scripted(ABC) as scene:
        for path in (CHAT, COMP):
            for field in NUMBERS:
                for literal in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
                    envelope(await post_literal(scene, path, field, literal), 400, field, None)
            for literal in ('{"5": NaN}', '{"5": Infinity}', '{"5": -Infinity}', '{"5": 1e999}'):
                envelope(await post_literal(scene, path, "logit_bias", literal), 400, "logit_bias", None)
            assert (await post_literal(scene, path, "temperature", "0.5")).text == "abc", "a number does arrive so"
        assert len(scene.scripted.prompts) == 2, "the engine saw those two only"
        await scene.alive()


# OC-13 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

REJECTED: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, 2.01, 999999)),
    *(("top_p", value) for value in (-1, 1.01)),
    *(("min_p", value) for value in (-0.1, 1.1)),
    *(("repetition_penalty", value) for value in (0, -1)),
    *((field, value) for field in ("presence_penalty", "frequency_penalty") for value in (2.01, -2.01)),
    ("top_k", -2),
]
ACCEPTED: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (0, 2)),
    *(("top_p", value) for value in (1, 1e-9, 0)),
    *(("min_p", value) for value in (0, 1)),
    *(("top_k", value) for value in (0, -1, 1)),
    *((field, value) for field in ("presence_penalty", "frequency_penalty") for value in (-2, 2, 0)),
    *(("repetition_penalty", value) for value in (1, 0.01)),
]


@on_loop
async def test_oc_13_range_edges_reach_the_engine_unchanged() -> None:
    async with scripted(ABC) as scene:
        for ask in (scene.chat, scene.comp):
            for field, value in REJECTED:
                envelope(await ask(**{field: value}), 400, field)
        assert scene.scripted.steps == 0
        for ask in (scene.chat, scene.comp):
            for field, value in ACCEPTED:
                answer = await ask(**{field: value})
                assert answer.status == 200, (field, value)
                assert answer.text == "abc"
                got = getattr(scene.scripted.draws[-1].sampling, field)
                assert got == (0 if (field, value) == ("top_k", -1) else value), "-1 and 0 both mean off"
        await scene.alive()


@on_loop
async def test_oc_13_range_edges_on_a_model(tiny: TinyStart) -> None:
    server = alone(tiny)
    async with server.calls():
        await server.alive()
        for field, value in ACCEPTED:
            answer = await server.comp(max_tokens=2, **{field: value})
            assert answer.status == 200, (field, value)
            assert answer.finish in (["length"], ["stop"])
        greedy = (await server.comp(max_tokens=12, temperature=0)).text
        assert greedy
        only_the_likeliest: list[dict[str, Any]] = [{"top_p": 0}, {"top_k": 1}, {"min_p": 1}]
        for likeliest in only_the_likeliest:
            for temperature in (1, 2):
                answer = await server.comp(max_tokens=12, temperature=temperature, seed=7, **likeliest)
                assert answer.text == greedy, likeliest
        await server.alive()


# OC-14 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def wrong_biases(n_vocab: int) -> list[Any]:
    return [
        {str(n_vocab): 5}, {"-1": 5}, {"99999999999999999999": 1}, {"abc": 1}, {"5": 101}, {"5": "x"}, [],
    ]  # fmt: skip


VALID_BIASES: list[Any] = [{"5": -100}, {}, None]


@on_loop
async def test_oc_14_logit_bias_reaches_the_engine_or_not() -> None:
    async with scripted(ABC) as scene:
        for ask in (scene.chat, scene.comp):
            for bias in wrong_biases(scene.scripted.info.n_vocab):
                envelope(await ask(logit_bias=bias), 400, "logit_bias")
        assert scene.scripted.steps == 0
        for bias in VALID_BIASES:
            assert (await scene.chat(logit_bias=bias)).text == "abc"
            assert scene.scripted.draws[-1].sampling.logit_bias == (((5, -100.0),) if bias else ())
        last = str(scene.scripted.info.n_vocab - 1)
        assert (await scene.chat(logit_bias={last: 5})).status == 200
        await scene.alive()


@on_loop
async def test_oc_14_logit_bias_on_a_model(tiny: TinyStart) -> None:
    server = alone(tiny)
    vocabulary = server.vocabulary
    async with server.calls():
        await server.alive()
        for bias in wrong_biases(vocabulary.size):
            envelope(await server.chat(logit_bias=bias, max_tokens=2), 400, "logit_bias")
        for bias in VALID_BIASES:
            assert (await server.chat(logit_bias=bias, max_tokens=2)).status == 200

        async def greedy(count: int, bias: dict[int, int]) -> list[bytes]:
            answer = await server.chat(
                logit_bias={str(token): value for token, value in bias.items()},
                temperature=0, max_tokens=count, logprobs=True,
            )  # fmt: skip
            assert answer.status == 200
            return [bytes(entry["bytes"]) for entry in answer.logprobs]

        for word in (" granite", "Zebra"):
            token = vocabulary.encode(word, special=False)[0]
            assert (await greedy(1, {token: 100})) == [vocabulary.piece(token)]
        plain = await greedy(32, {})
        assert len(set(plain)) > 1
        for piece in plain[:2]:
            # Told apart here by their bytes only, so all tokens of the same bytes go.
            same = [token for token in range(vocabulary.size) if vocabulary.answer_piece(token) == piece]
            banned = await greedy(32, dict.fromkeys(same, -100))
            assert banned
            assert piece not in banned
        await server.alive()


# OC-15 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_15_seeds_on_a_model(tiny: TinyStart) -> None:
    server = alone(tiny)
    async with server.calls():

        async def texts(times: int, **fields: Any) -> set[str]:
            answers = [await server.chat(max_tokens=64, **fields) for _ in range(times)]
            assert all(answer.status == 200 for answer in answers)
            return {answer.text for answer in answers}

        assert len(await texts(5, temperature=0, seed=1) | await texts(5, temperature=0, seed=2)) == 1
        assert len(await texts(3, temperature=1, seed=123)) == 1
        seeded = [await texts(1, temperature=1, seed=seed) for seed in range(124, 129)]
        assert len(set().union(*seeded)) >= 2
        assert len(await texts(5, temperature=1)) >= 2


@on_loop
async def test_oc_15_each_request_keeps_its_seed() -> None:
    """Four neighbours in the same steps, one of them without a seed."""
    async with scripted([[b"%d " % i] for i in range(12)], max_running=4, shut=True) as scene:
        seeds = {"first": 1, "second": 2**40, "third": 0}
        tasks = [asyncio.create_task(scene.comp(prompt=prompt, seed=seed)) for prompt, seed in seeds.items()]
        tasks.append(asyncio.create_task(scene.comp(prompt="fourth")))
        await _all_in_one_step(scene, 4)
        scene.gate.open()
        assert {(await task).text for task in tasks} == {"".join(f"{i} " for i in range(12))}
        drawn: dict[str, set[int]] = {}
        for draw in scene.scripted.draws:
            prompt = bytes(draw.history[: draw.prompt]).decode()
            drawn.setdefault(prompt, set()).add(draw.seed)
            assert draw.seed == draw.sampling.seed
        assert {prompt: drawn[prompt] for prompt in seeds} == {prompt: {seed} for prompt, seed in seeds.items()}
        assert len(drawn["fourth"]) == 1
        assert drawn["fourth"].isdisjoint(seeds.values())


async def _all_in_one_step(scene: Scene, count: int) -> None:
    """Go on step by step until that many sequences are computed together."""
    await until(lambda: scene.app.running == count)
    while len(scene.scripted.current) < count:
        passed = scene.gate.passed
        scene.gate.allow()
        await until(partial(_standing_after, scene, passed))


def _standing_after(scene: Scene, passed: int) -> bool:
    return scene.gate.passed > passed and scene.gate.standing


# OC-16 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

OPTIONAL = [
    "temperature", "top_p", "n", "stop", "max_tokens", "seed", "stream", "stream_options", "logit_bias", "logprobs",
    "top_logprobs", "tools", "tool_choice", "response_format", "user", "presence_penalty",
]  # fmt: skip
ALSO_OPTIONAL = [
    "max_completion_tokens", "top_k", "min_p", "frequency_penalty", "repetition_penalty", "functions", "function_call",
    "headrace", "metadata", "best_of", "echo", "suffix", "parse_special",
]  # fmt: skip


@on_loop
async def test_oc_16_null_is_absence() -> None:
    async with scripted(ABC, seed=lambda: 42) as scene:
        for ask in (scene.chat, scene.comp):
            plain = await ask()
            assert (plain.status, plain.text) == (200, "abc")
            drawn = scene.scripted.draws[-1].sampling
            nulls = [[field] for field in OPTIONAL + ALSO_OPTIONAL] + [OPTIONAL, OPTIONAL + ALSO_OPTIONAL]
            for fields in nulls:
                answer = await ask(**dict.fromkeys(fields))
                assert answer.status == 200, (fields, answer)
                assert answer.choices() == plain.choices()
                assert answer.usage["completion_tokens"] == plain.usage["completion_tokens"]
                assert scene.scripted.draws[-1].sampling == drawn
            envelope(await ask(model=None), 400, "model")
        envelope(await scene.chat(messages=None), 400, "messages")
        envelope(await scene.comp(prompt=None), 400, "prompt")
        await scene.alive()


# OC-17 ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

CONTEXT = 512
WRONG_COUNTS = ["0", "-1", "1.5", '"10"', "2147483648", "1e18", str(10**30)]
ENDLESS = [[b"x"] for _ in range(2 * CONTEXT)]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@on_loop
async def test_oc_17_max_tokens_of_a_chat(field: str) -> None:
    async with scripted(ENDLESS, n_ctx=CONTEXT) as scene:
        for literal in WRONG_COUNTS:
            envelope(await post_literal(scene, CHAT, field, literal), 400, field)
            await scene.alive()
        prompt = 0
        for literal in ("1", "1.0"):
            answer = await post_literal(scene, CHAT, field, literal)
            assert (answer.status, answer.text, answer.finish) == (200, "x", ["length"])
            assert answer.usage["completion_tokens"] == 1
            prompt = answer.usage["prompt_tokens"]
            await scene.alive()
        assert prompt == len(scene.scripted.asked[-1])
        answer = await post_literal(scene, CHAT, field, str(CONTEXT - prompt))
        assert (answer.status, answer.finish) == (200, ["length"])
        assert answer.usage["completion_tokens"] == CONTEXT - prompt
        await scene.alive()
        for literal in ("100000", "2147483647"):
            answer = await post_literal(scene, CHAT, field, literal)
            assert (answer.status, answer.finish) == (200, ["length"])
            assert answer.usage["total_tokens"] == prompt + answer.usage["completion_tokens"] == CONTEXT
            assert answer.text == "x" * (CONTEXT - prompt)
            await scene.alive()


@on_loop
async def test_oc_17_max_tokens_of_a_completion() -> None:
    async with scripted(ENDLESS, n_ctx=CONTEXT) as scene:
        for literal in WRONG_COUNTS:
            envelope(await post_literal(scene, COMP, "max_tokens", literal), 400, "max_tokens")
            await scene.alive()
        steps = scene.scripted.steps
        for stream in (False, True):
            options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
            answer = await scene.comp(prompt="Once upon", max_tokens=0, echo=True, stream=stream, **options)
            assert (answer.status, answer.text, answer.finish) == (200, "Once upon", ["length"])
            assert answer.usage["completion_tokens"] == 0
            assert answer.usage["prompt_tokens"] == answer.usage["total_tokens"] == len("Once upon")
        assert scene.scripted.steps == steps
        answer = await scene.comp(prompt="Once upon", max_tokens=2, echo=True)
        assert (answer.text, answer.usage["completion_tokens"]) == ("Once uponxx", 2)
        await scene.alive()


@on_loop
async def test_oc_17_both_names_of_max_tokens() -> None:
    async with scripted(ENDLESS, n_ctx=CONTEXT) as scene:
        envelope(await scene.chat(max_tokens=5, max_completion_tokens=6), 400, "max_tokens")
        assert scene.scripted.steps == 0
        assert (await scene.chat(max_tokens=5, max_completion_tokens=5)).text == "xxxxx"
        await scene.alive()


@on_loop
async def test_oc_17_a_model_stops_at_the_end_of_its_context(tiny: TinyStart) -> None:
    """The pool of cells is no larger than the context, so that one token too many has no place."""
    server = tiny(engine_cells=256, engine_context=256)
    async with server.calls():
        await server.alive()
        bans = {str(token): -100 for token in server.eog}
        answer = await server.comp(prompt=[server.vocabulary.encode("a", special=False)[0]] * 200,
                                   max_tokens=2**31 - 1, logit_bias=bans)  # fmt: skip
        assert (answer.status, answer.finish) == (200, ["length"])
        assert answer.usage["completion_tokens"] == 256 - 200
        await server.alive()
