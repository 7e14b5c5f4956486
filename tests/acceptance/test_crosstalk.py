"""OC-40: nothing of one conversation appears in another. Tiers other than the engine's own cells come later."""

from __future__ import annotations

import asyncio
import random
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from acceptance.asking import on_loop
from acceptance.recorded import Recorded, recorded
from headrace.core.sequence import common_prefix

CONVERSATIONS = 24
ROUNDS = 3
AT_ONCE = 8
ABORTED = 0.2
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
QUESTIONS = ("Repeat the marker.", "Again, please.", "Once more.")


@dataclass
class Conversation:
    """What one user has said and heard, and the prompts that make it up."""

    marker: str
    messages: list[dict[str, str]]
    heard: list[str] = field(default_factory=list)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    """Its prompts so far, as the engine saw them."""

    def ask(self, question: str) -> str:
        """Add a question; the prompt as our own reading of ChatML has it."""
        self.messages.append({"role": "user", "content": question})
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in self.messages]
        return "".join(turns) + "<|im_start|>assistant\n"

    def hear(self, text: str) -> None:
        self.heard.append(text)
        self.messages.append({"role": "assistant", "content": text})


def conversations(dice: random.Random) -> list[Conversation]:
    """Each with a marker of its own at the very beginning; all markers differ from the first letter on."""
    found = []
    for first in dice.sample(string.ascii_uppercase, CONVERSATIONS):
        marker = first + "".join(dice.choices(string.ascii_uppercase, k=7))
        found.append(Conversation(marker, [{"role": "system", "content": f"{marker} is the marker: {marker}."}]))
    return found


class Talk:
    """All conversations with one server."""

    def __init__(self, server: Recorded, dice: random.Random) -> None:
        self._server = server
        self._dice = dice
        self._recorder = server.recorders[server.model]
        self.conversations = conversations(dice)
        self.expected: set[str] = set()
        """Every prompt that may reach the engine."""
        self._places = asyncio.Semaphore(AT_ONCE)
        # The template's words before any marker: they are the same for all, so their tokens are nobody's secret.
        self._head = len(server.vocabulary.encode("<|im_start|>system\n", special=True))

    async def round(self, question: str) -> None:
        order = self._dice.sample(self.conversations, CONVERSATIONS)
        aborted = set(self._dice.sample(range(CONVERSATIONS), round(CONVERSATIONS * ABORTED)))
        async with asyncio.TaskGroup() as tasks:
            for i, conversation in enumerate(order):
                tasks.create_task(self._one(conversation, question, abort=i in aborted, stream=i % 2 == 0))

    async def _one(self, conversation: Conversation, question: str, *, abort: bool, stream: bool) -> None:
        async with self._places:
            prompt = conversation.ask(question)
            self.expected.add(prompt)
            if abort:
                await self._abort(conversation)
                conversation.asked.append(self._ids(prompt))
            else:
                await self._finish(conversation, prompt, stream=stream)

    async def _abort(self, conversation: Conversation) -> None:
        """Leave in the middle of the answer."""
        wire = await self._server.connect()
        await wire.chat(messages=conversation.messages, stream=True, **ASKED)
        assert (await wire.head())[0] == 200
        said = ""
        for _ in range(2):
            event = await wire.event()
            said += event["choices"][0]["delta"].get("content", "") if event != "[DONE]" else ""
        wire.reset()
        conversation.hear(said)

    async def _finish(self, conversation: Conversation, prompt: str, *, stream: bool) -> None:
        mode: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await self._server.chat(messages=conversation.messages, **mode, **ASKED)
        assert answer.status == 200, answer
        conversation.hear(answer.text)
        ids = self._ids(prompt)
        assert answer.usage["prompt_tokens"] == len(ids)
        own = [self._recorder.sequences[asked] for asked in conversation.asked]
        reach = max((common_prefix(list(ids), sequence) for sequence in own), default=0)
        cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        assert cached <= max(reach, self._head)
        conversation.asked.append(ids)

    def _ids(self, prompt: str) -> tuple[int, ...]:
        """The engine's prompt that reads so: exactly one."""
        found = {tuple(ids) for ids in self._recorder.prompts if self._server.text(ids) == prompt}
        assert len(found) == 1
        return found.pop()

    def check(self) -> None:
        recorded_texts = {self._server.text(prompt) for prompt in self._recorder.prompts}
        assert recorded_texts <= self.expected, "a prompt nobody asked"
        for conversation in self.conversations:
            others = [other.marker for other in self.conversations if other is not conversation]
            for text in conversation.heard:
                assert not any(marker in text for marker in others)


@pytest.mark.real
@on_loop
async def test_oc_40_no_cross_talk(demo_model: Path) -> None:
    engine = {"max_running": 4, "slots": 64, "cells": 8192}
    async with recorded(demo_model, {"tiny": engine}) as server:
        talk = Talk(server, random.Random(40))
        for question in QUESTIONS[:ROUNDS]:
            await talk.round(question)
        talk.check()
        await server.idle()
        # The test is worth something only if the model does say markers and the cache is used.
        heard = sum(c.marker in text for c in talk.conversations for text in c.heard)
        assert heard > CONVERSATIONS
        stats = server.models[server.model].engine.stats
        assert stats.cached_tokens > stats.prompt_tokens / 4
        assert server.app.running == 0
