"""Acceptance, section 8: structured output fails closed.

It does not exist yet, so every request for it is refused. Once some schemas are enforced, those that are must be
checked here with a validator that is not ours.
"""

from __future__ import annotations

from typing import Any

import pytest

from acceptance.asking import envelope, on_loop
from acceptance.scene import scripted


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": value}}


def pattern(text: str) -> dict[str, Any]:
    return schema({"type": "object", "properties": {"a": {"type": "string", "pattern": text}}, "required": ["a"]})


RECURSIVE = {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"}
FORMATS: list[dict[str, Any]] = [
    *(pattern(text) for text in ("^+[a-z]$", "^{2}x$", "(?<=a)b+", "^" + "(" * 300 + "a" + ")" * 300 + "$")),
    schema({"$ref": "#/$defs/nowhere"}),
    schema(RECURSIVE),
    schema({"type": "frob"}),
    schema({}),
    schema("not an object"),
    schema(None),
    {"type": "json_schema"},
    {"type": "json_object"},
    {"type": "xml"},
]


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_oc_30_what_cannot_be_enforced_is_refused(stream: bool) -> None:
    async with scripted([[b"not json"]]) as scene:
        for response_format in FORMATS:
            for ask in (scene.chat, scene.comp):
                envelope(await ask(stream=stream, response_format=response_format), 400, "response_format")
        assert scene.scripted.steps == 0, "before any token"
        plain = await scene.chat(stream=stream, response_format={"type": "text"})
        assert (plain.status, plain.text) == (200, "not json")
        await scene.alive()
