"""Acceptance, section 2: characters that span tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from acceptance.asking import Answer, Asking, on_loop
from acceptance.scene import scripted

REPLACEMENT = "\ufffd"
TEXT = "ok \U0001f525\u010fx!"
"""ASCII as it comes, then a character of four bytes, one of two, and ASCII again."""

BYTES_APART = [b"ok ", *(bytes([byte]) for byte in "\U0001f525\u010f".encode()), b"x!"]
IN_TWO = [b"ok ", b"\xf0\x9f", b"\x94\xa5", b"\xc4", b"\x8f", b"x!"]
ACROSS = [b"ok \xf0", b"\x9f\x94", b"\xa5\xc4", b"\x8fx!"]
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


async def every_way(server: Asking, **fields: object) -> list[Answer]:
    """The same request as chat and as completion, streamed and not."""
    usage = {"stream_options": {"include_usage": True}}
    return [
        await ask(stream=stream, **(usage if stream else {}), **fields)
        for ask, stream in itertools.product((server.chat, server.comp), (True, False))
    ]


@pytest.mark.parametrize("tokens", [BYTES_APART, IN_TWO, ACROSS], ids=["bytes apart", "in two", "across"])
@on_loop
async def test_oc_06_emoji_over_several_tokens(tokens: Sequence[bytes]) -> None:
    async with scripted([[token] for token in tokens]) as scene:
        for answer in await every_way(scene):
            assert answer.status == 200
            assert answer.text == TEXT
            assert answer.finish == ["stop"]
            assert REPLACEMENT not in answer.body.decode()  # parsing refuses lone surrogates, escaped ones too
            assert "\\ufffd" not in answer.body.decode().lower()
        await scene.alive()


@pytest.mark.parametrize(
    "tokens", [[b"ok ", b"\xf0", b"\x9f", b"\x94", b" x"], [b"ok ", b"\xf0\x9f\x94", b" x"]], ids=["apart", "together"]
)
@on_loop
async def test_oc_06_a_broken_character_is_one_replacement(tokens: Sequence[bytes]) -> None:
    async with scripted([[token] for token in tokens]) as scene:
        for answer in await every_way(scene):
            assert answer.status == 200
            assert answer.text == f"ok {REPLACEMENT} x"
            assert answer.finish == ["stop"]
        await scene.alive()


def whole_characters(data: bytes) -> str:
    """The longest beginning of `data` that is whole characters."""
    return next(text for n in range(len(data), -1, -1) if (text := _decoded(data[:n])) is not None)


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


@on_loop
async def test_oc_07_a_cut_in_the_middle_of_a_character() -> None:
    data = FAMILY.encode()
    assert len(data) == 18
    async with scripted([[bytes([byte])] for byte in data]) as scene:
        for most in range(1, len(data) + 1):
            for answer in await every_way(scene, max_tokens=most):
                assert answer.status == 200
                assert answer.text == whole_characters(data[:most])
                assert REPLACEMENT not in answer.body.decode()
                assert "\\ufffd" not in answer.body.decode().lower()
                assert answer.usage["completion_tokens"] == most
                assert answer.finish == ["length"]
        for answer in await every_way(scene, max_tokens=len(data) + 1):
            assert answer.text == FAMILY
            assert answer.finish == ["stop"]
        await scene.alive()
