"""Which engine has computed which beginnings of prompts.

    salt ─▶ hash ─┬▶ hash ─┬▶ hash ─▶ …      a block's hash stands for the whole text up to its end
         block 1 ─┘  block 2 ─┘

Rules: this is a guess that costs microseconds, not a book: the text is the roles and contents as they came, without the
engine's template; only the first 64 Ki characters are looked at, whatever the body's size, and of tools the names and
descriptions; an engine may have dropped what we remember. A wrong guess costs some prefill and nothing else, so nothing
here refuses a request: what makes no sense has no beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.request import Ask

BLOCK = 256
"""Characters."""
TOKENS = 64
"""Token ids a block, for prompts that are given as such."""
MOST_BLOCKS = 256
MOST_TEXT = BLOCK * MOST_BLOCKS
MEMORY = 16384
"""Blocks remembered for an engine: about 2 MB."""


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Of one prompt."""

    blocks: tuple[int, ...]
    size: int
    """Blocks that all of the prompt would make, the last one begun."""


NOTHING = Beginnings((), 1)


def beginnings(ask: Ask) -> Beginnings:
    """About 10 µs for a prompt of 4 KB, and at most 0.2 ms."""
    if not ask.options.cache:
        return NOTHING
    seed = hash((ask.salt, ask.chat))
    prompt = ask.fields.get("messages" if ask.chat else "prompt")
    if not ask.chat:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return _of_tokens(seed, prompt)
        return _of_text(seed, prompt, ask.size) if isinstance(prompt, str) else NOTHING
    if not isinstance(prompt, list):
        return NOTHING
    parts: list[str] = []
    room = MOST_TEXT
    for part in _texts(prompt, ask.fields.get("tools")):
        parts.append(part[:room])
        room -= len(part)
        if room <= 0:
            break
    return _of_text(seed, "".join(parts), ask.size, cut=room <= 0)


class Affinity:
    """For each engine the blocks that went there, the latest `memory` of them."""

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._engines: dict[str, dict[int, None]] = {}

    def shared(self, engine: str, prompt: Beginnings) -> float:
        """How much of the prompt it has, 0 to 1."""
        known = self._engines.get(engine)
        if not known:
            return 0.0
        length = 0
        for block in prompt.blocks:
            if block not in known:
                break
            length += 1
        return length / prompt.size

    def remember(self, engine: str, prompt: Beginnings) -> None:
        """It is computing the prompt."""
        known = self._engines.setdefault(engine, {})
        # The first block last: what is common to many is the last to be forgotten.
        for block in reversed(prompt.blocks):
            known.pop(block, None)
            known[block] = None
        while len(known) > self._memory:
            del known[next(iter(known))]

    def forget(self, engine: str) -> None:
        """It has nothing any more."""
        self._engines.pop(engine, None)


def _of_text(seed: int, text: str, size: int, *, cut: bool = False) -> Beginnings:
    length = len(text)
    blocks = []
    for end in range(BLOCK, min(length, MOST_TEXT) + 1, BLOCK):
        seed = hash((seed, text[end - BLOCK : end]))
        blocks.append(seed)
    return Beginnings(tuple(blocks), -(-max(length, size if cut else 1) // BLOCK))


def _of_tokens(seed: int, tokens: Sequence[Any]) -> Beginnings:
    blocks = []
    try:
        for end in range(TOKENS, min(len(tokens), TOKENS * MOST_BLOCKS) + 1, TOKENS):
            seed = hash((seed, *tokens[end - TOKENS : end]))
            blocks.append(seed)
    except TypeError:  # lists in it: no prompt
        return NOTHING
    return Beginnings(tuple(blocks), -(-max(len(tokens), 1) // TOKENS))


def _texts(messages: Sequence[Any], tools: Any) -> Iterator[str]:
    """What a template would show, as far as it is text."""
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict):
            yield from _strings(function.get("name"), function.get("description"))
    for message in messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        yield from _strings(message.get("role"))
        if isinstance(content, list):
            yield from _strings(*(part.get("text") for part in content if isinstance(part, dict)))
        else:
            yield from _strings(content)


def _strings(*values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
            yield "\0"  # a boundary, so that "ab" + "c" is not "a" + "bc"
