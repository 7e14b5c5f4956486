from __future__ import annotations

import json
import os

import msgspec
import pytest

from headrace.core.file_name import original, plain, portable, shown

BYTES = [b"/m/ok.gguf", "/m/ü 🔥.gguf".encode(), b"/m/\xff.gguf", b"\xfe\xff", b"/\xc3\xa9/\xe9 \x80.gguf"]


@pytest.mark.parametrize("raw", BYTES)
def test_a_name_comes_back_through_json_and_msgpack(raw: bytes) -> None:
    name = os.fsdecode(raw)
    for back in (
        json.loads(json.dumps(portable(name))),
        msgspec.msgpack.decode(msgspec.msgpack.encode(portable(name))),
    ):
        assert os.fsencode(original(back)) == raw


@pytest.mark.parametrize("raw", BYTES)
def test_what_is_shown_and_typed_is_utf_8(raw: bytes) -> None:
    name = os.fsdecode(raw)
    shown(name).encode()
    plain(name).encode()
    if name.encode("utf-8", "replace") == raw:
        assert shown(name) == plain(name) == portable(name) == name


def test_how_it_looks() -> None:
    name = os.fsdecode(b"a-\xff\xfe.gguf")
    assert shown(name) == r"a-\xff\xfe.gguf"
    assert plain(name) == "a-_.gguf"
    assert shown("\ud800") == "?", "no byte at all"
