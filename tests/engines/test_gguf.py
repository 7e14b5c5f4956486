"""Heads of GGUF files: whole ones, and hostile ones, which are refused in one line and cost next to nothing."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from headrace.core.errors import StartupError
from headrace.engines.gguf import BadGguf, Passed, check_parts, read_head, read_parts
from tiny_gguf import ARRAY, F32, TEXT, TOKENS, U32, U64, encoded, keys, tiny_gguf, weights

WHOLE = encoded(keys(), weights())


def written(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "x.gguf").write_bytes(data)
    return tmp_path / "x.gguf"


def refused(path: Path) -> str:
    with pytest.raises(BadGguf) as caught:
        read_head(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_head_is_read(tmp_path: Path) -> None:
    head = read_head(
        tiny_gguf(tmp_path / "x.gguf", x__few=(ARRAY, (U32, [1, 2, 3])), x__many=(ARRAY, (F32, [0.5] * 5000)))
    )
    assert (head.version, head.text("general.architecture"), head.number("llama.block_count")) == (3, "llama", 2)
    assert head.metadata["tokenizer.ggml.tokens"] == Passed(len(TOKENS))
    assert head.metadata["x.few"] == (1, 2, 3)
    assert head.metadata["x.many"] == Passed(5000)
    assert head.metadata["llama.rope.freq_base"] == 10000.0
    assert (head.text("llama.block_count"), head.number("general.name", 7), head.number("none")) == ("", 7, 0)
    arrays = weights()
    assert [tensor.name for tensor in head.tensors] == list(arrays)
    data = (tmp_path / "x.gguf").read_bytes()
    for tensor in head.tensors:
        array = arrays[tensor.name]
        assert tensor.shape == array.shape[::-1]
        assert tensor.size == array.nbytes
        assert data[tensor.offset : tensor.offset + array.nbytes] == array.tobytes()


@pytest.mark.real
def test_the_demo_model_s(demo_model: Path) -> None:
    head = read_head(demo_model)
    assert (head.text("general.architecture"), head.number("llama.context_length")) == ("llama", 8192)
    assert head.tensors[-1].offset + (head.tensors[-1].size or 0) <= head.size
    assert head.size - head.data - sum(tensor.size or 0 for tensor in head.tensors) < 32 * len(head.tensors)


def test_cut_short_anywhere_it_is_refused(tmp_path: Path) -> None:
    for length in [*range(0, 400), *range(400, len(WHOLE) - 40, 997)]:
        message = refused(written(tmp_path, WHOLE[:length]))
        assert "x.gguf" in message


def test_whatever_a_byte_becomes_it_is_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(4)
    end = read_head(written(tmp_path, WHOLE)).data
    for _ in range(600):
        data = bytearray(WHOLE)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(end)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        with contextlib.suppress(BadGguf):
            read_head(written(tmp_path, bytes(data)))


def header(tensors: int = 0, metadata: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, metadata)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HUGE = 2**63 - 1
HOSTILE = {
    "tensors": (header(tensors=HUGE), "tensors"),
    "keys": (header(metadata=HUGE), "keys"),
    "version": (header(version=9), "version 9"),
    "key": (header(metadata=1) + struct.pack("<Q", HUGE), "key"),
    "text": (header(metadata=1) + key(b"a", TEXT, struct.pack("<Q", HUGE)), "in the middle"),
    "texts": (header(metadata=1) + key(b"a", ARRAY, struct.pack("<IQ", TEXT, HUGE)), "texts"),
    "numbers": (header(metadata=1) + key(b"a", ARRAY, struct.pack("<IQ", U64, HUGE)), "in the middle"),
    "nested": (header(metadata=1) + key(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1)), "unknown type 9"),
    "type": (header(metadata=1) + key(b"a", 99, b""), "unknown type 99"),
    "twice": (header(metadata=2) + 2 * key(b"a", U32, struct.pack("<I", 1)), "twice"),
    "alignment": (header(metadata=1) + key(b"general.alignment", U32, struct.pack("<I", 3)), "alignment"),
    "dimensions": (header(tensors=1) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 2**32 - 1), "dimensions"),
    "shape": (
        header(tensors=1) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0),
        "cut short",
    ),
    "offset": (header(tensors=1) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 4, 0, HUGE), "cut short"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "empty": (b"", "empty"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_head_is_refused_without_taking_memory(tmp_path: Path, name: str) -> None:
    data, says = HOSTILE[name]
    file = written(tmp_path, data + bytes(4096) * (name != "empty"))
    tracemalloc.start()
    try:
        assert says in refused(file)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    assert "directory" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no ordinary file" in refused(tmp_path / "pipe")
    assert "no such file" in refused(tmp_path / "nowhere")
    assert "no such file" in refused(tmp_path / os.fsdecode(b"nowhere-\xff"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop")
    assert "null" in refused(Path("a\0b"))


def test_a_model_of_several_files(tmp_path: Path) -> None:
    def part(no: int, of: int, name: str) -> Path:
        return tiny_gguf(tmp_path / name, {}, split__count=(U32, of), split__no=(U32, no))

    first = part(0, 2, "m-00001-of-00002.gguf")
    with pytest.raises(BadGguf, match="m-00002-of-00002"):
        check_parts(first)
    second = part(1, 2, "m-00002-of-00002.gguf")
    assert len(read_parts(first)) == 2
    with pytest.raises(StartupError, match="name the first one"):
        read_parts(second)
    with pytest.raises(StartupError, match="does not end with"):
        read_parts(part(0, 2, "renamed.gguf"))
    with pytest.raises(StartupError, match="one of 4000000"):
        read_parts(part(0, 4_000_000, "m-00001-of-00003.gguf"))
