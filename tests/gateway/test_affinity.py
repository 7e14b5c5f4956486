from __future__ import annotations

from typing import Any

import pytest

from headrace.core.request import Ask, Options
from headrace.gateway.affinity import BLOCK, MOST_BLOCKS, NOTHING, TOKENS, Affinity, Beginnings, beginnings


def of(fields: dict[str, Any], *, chat: bool = True, salt: str = "", cache: bool = True, size: int = 0) -> Beginnings:
    return beginnings(Ask(chat, "m", fields, size or len(repr(fields)), Options(cache=cache), 1, salt))


def chat(*contents: Any, **more: Any) -> Beginnings:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return of({"messages": messages, **more})


def common(one: Beginnings, other: Beginnings) -> int:
    """Blocks; a beginning's blocks are equal up to where they differ for good."""
    return len(set(one.blocks) & set(other.blocks))


SYSTEM = "You are a helpful assistant. " * 100


def test_what_begins_alike_has_the_same_blocks() -> None:
    one, other = chat(SYSTEM, "What is red?"), chat(SYSTEM, "And what is blue?")
    assert common(one, other) == len(SYSTEM) // BLOCK
    longer = chat(SYSTEM, "What is red?", "A colour. " * 50, "Thanks.")
    assert longer.blocks[: len(one.blocks)] == one.blocks


def test_a_block_stands_for_everything_before_it() -> None:
    a, b = "a" * BLOCK, "b" * BLOCK
    assert common(of({"prompt": a + b + b}, chat=False), of({"prompt": b + b + b}, chat=False)) == 0


def test_the_salt_comes_first() -> None:
    fields = {"prompt": SYSTEM}
    assert common(of(fields, chat=False), of(fields, chat=False, salt="t")) == 0
    assert of(fields, chat=False, salt="t") == of(fields, chat=False, salt="t")


def test_roles_and_tools_are_part_of_it() -> None:
    other = of({"messages": [{"role": "developer", "content": SYSTEM}]})
    assert common(chat(SYSTEM), other) == 0
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]
    assert common(chat(SYSTEM), chat(SYSTEM, tools=tools)) == 0
    assert chat(SYSTEM, tools=tools) == chat(SYSTEM, tools=[{**tools[0], "x": 1}])


def test_parts_of_a_content_are_read() -> None:
    whole, half = SYSTEM * 2, [{"type": "text", "text": SYSTEM}, {"type": "text", "text": SYSTEM}]
    assert len(chat(half).blocks) == len(chat(whole).blocks)
    assert common(chat(half), chat(half, "more")) > 0


def test_prompts_of_tokens_have_beginnings_too() -> None:
    one, other = list(range(300)), [*range(200), *range(100)]
    assert common(of({"prompt": one}, chat=False), of({"prompt": other}, chat=False)) == 200 // TOKENS
    assert of({"prompt": [one, other]}, chat=False) == of({"prompt": one}, chat=False), "the first of several"
    assert of({"prompt": [SYSTEM, "x"]}, chat=False) == of({"prompt": SYSTEM}, chat=False)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"messages": None}, {"messages": "x"}, {"messages": [1, None, {"role": 1, "content": {"a": 1}}]},
        {"messages": [{"content": [1, {"text": 2}]}], "tools": 3}, {"messages": [], "tools": [{"function": 1}]},
    ],
)  # fmt: skip
def test_nonsense_has_no_beginning_and_is_no_error(fields: dict[str, Any]) -> None:
    assert of(fields).blocks == ()


@pytest.mark.parametrize("prompt", [None, 3, {}, [], [[]], [[[1] * 99] * 99], [["a"] * 10], [None] * 5])
def test_prompts_that_are_none_have_no_beginning_either(prompt: Any) -> None:
    assert of({"prompt": prompt}, chat=False).blocks == ()


def test_who_leaves_nothing_finds_nothing() -> None:
    assert of({"prompt": SYSTEM}, chat=False, cache=False) == NOTHING


@pytest.mark.parametrize("chats", [True, False])
def test_of_a_large_body_only_the_beginning_is_looked_at(chats: bool) -> None:
    text = "x" * 3_000_000
    fields = {"messages": [{"role": "user", "content": text}]} if chats else {"prompt": text}
    got = of(fields, chat=chats, size=3_000_100)
    assert len(got.blocks) == MOST_BLOCKS
    assert got.size == pytest.approx(3_000_000 / BLOCK, rel=0.01), "its share is of all of it"


def test_shares() -> None:
    affinity, one = Affinity(), of({"prompt": "a" * BLOCK * 10}, chat=False)
    assert affinity.shared("e", one) == 0.0
    affinity.remember("e", one)
    assert affinity.shared("e", one) == 1.0
    assert affinity.shared("other", one) == 0.0
    assert affinity.shared("e", of({"prompt": "a" * BLOCK * 5 + "b" * BLOCK * 5}, chat=False)) == 0.5
    assert affinity.shared("e", NOTHING) == 0.0
    affinity.forget("e")
    assert affinity.shared("e", one) == 0.0


def test_the_memory_is_bounded_and_what_is_common_goes_last() -> None:
    affinity = Affinity(memory=12)
    for n in range(5):
        affinity.remember("e", of({"prompt": "s" * BLOCK * 8 + str(n) * BLOCK * 4}, chat=False))
        assert len(affinity._engines["e"]) <= 12
    assert affinity.shared("e", of({"prompt": "s" * BLOCK * 8}, chat=False)) == 1.0
    assert affinity.shared("e", of({"prompt": "s" * BLOCK * 8 + "0" * BLOCK * 4}, chat=False)) == pytest.approx(8 / 12)


def test_a_prompt_longer_than_the_memory_leaves_its_beginning() -> None:
    affinity, long = Affinity(memory=4), of({"prompt": "a" * BLOCK * 10}, chat=False)
    affinity.remember("e", long)
    assert affinity.shared("e", long) == pytest.approx(0.4)
