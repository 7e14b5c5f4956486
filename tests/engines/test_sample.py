"""Models cut to their first layers: what is kept, what is cut, what is refused, and that llama.cpp takes them."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.errors import StartupError
from headrace.core.plan import Chunk, Draw
from headrace.core.quantisation import TARGETS
from headrace.core.sampler import Logits
from headrace.engines import sample
from headrace.engines.gguf import Head, read_head
from headrace.engines.llama import LlamaEngine, LlamaSettings
from headrace.engines.quantiser import quantise
from headrace.engines.sample import cut, layer_count, periods
from headrace.engines.vocab import Vocabulary
from headrace.testing import ManualClock
from rig import GREEDY
from tiny_gguf import ARRAY, BOOL, F32, TEXT, U32, Typed, encoded, keys, tiny_gguf, weights

LAYERS = 12


def model(path: Path, layers: int = LAYERS, arch: str = "llama", **changes: Typed | None) -> Path:
    """A small model of `layers` layers; metadata below its architecture's name."""
    metadata = {
        key.replace("llama.", f"{arch}.", 1): value for key, value in keys(block_count=(U32, layers), **changes).items()
    }
    metadata["general.architecture"] = (TEXT, arch)
    path.write_bytes(encoded(metadata, weights(layers=layers)))
    return path


def bytes_of(path: Path, head: Head) -> dict[str, bytes]:
    data = path.read_bytes()
    return {tensor.name: data[tensor.offset : tensor.offset + (tensor.size or 0)] for tensor in head.tensors}


def refused(source: Path, layers: int = 3) -> str:
    target = source.with_name("cut.gguf")
    before = set(source.parent.iterdir())
    with pytest.raises(StartupError) as caught:
        cut(source, target, layers)
    assert "\n" not in caught.value.message
    assert set(source.parent.iterdir()) == before, "nothing is left"
    return caught.value.message


def check(source: Path, target: Path, layers: int) -> tuple[Head, Head]:
    """Everything that is not of a layer behind the first `layers` is as it was."""
    before, after = read_head(source), read_head(target)
    assert layer_count(target) == layers
    old, new = bytes_of(source, before), bytes_of(target, after)
    kept = [name for name in old if not (name.startswith("blk.") and int(name.split(".")[1]) >= layers)]
    assert list(new) == kept
    assert new == {name: old[name] for name in kept}
    rows = [
        [(tensor.name, tensor.shape, tensor.type) for tensor in head.tensors if tensor.name in new]
        for head in (before, after)
    ]
    assert rows[0] == rows[1]
    a, b = source.read_bytes(), target.read_bytes()
    assert list(after.pairs) == list(before.pairs)
    for key in before.pairs:
        if after.metadata[key] == before.metadata[key]:
            assert b[slice(*after.pairs[key])] == a[slice(*before.pairs[key])]
    return before, after


# --- what is written


@pytest.mark.parametrize("layers", [1, 5, LAYERS])
def test_the_first_layers_and_all_else_are_kept(tmp_path: Path, layers: int) -> None:
    source, target = model(tmp_path / "x.gguf"), tmp_path / "cut.gguf"
    cut(source, target, layers)
    before, after = check(source, target, layers)
    assert after.metadata == {**before.metadata, "llama.block_count": layers}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "x.gguf"]
    if layers == LAYERS:
        assert target.read_bytes() == source.read_bytes()


def test_arrays_with_an_item_a_layer_are_cut_and_no_others(tmp_path: Path) -> None:
    each = list(range(10, 10 + LAYERS))
    source = model(
        tmp_path / "x.gguf",
        llama__attention__head_count_kv=(ARRAY, (U32, each)),
        llama__feed_forward_length=(ARRAY, (U32, each)),
        llama__attention__sliding_window_pattern=(ARRAY, (BOOL, [i % 2 == 0 for i in each])),
        llama__swiglu_clamp_exp=(ARRAY, (F32, [0.5] * LAYERS)),
        xielu__eps=(ARRAY, (F32, [0.25] * LAYERS)),
        llama__expert_feed_forward_length=(ARRAY, (U32, each[:4])),
        llama__rope__dimension_sections=(ARRAY, (U32, each)),
        other=(ARRAY, (U32, each)),
    )
    cut(source, tmp_path / "cut.gguf", 3)
    before, after = check(source, tmp_path / "cut.gguf", 3)
    changed = {key: value for key, value in after.metadata.items() if before.metadata[key] != value}
    assert changed == {
        "llama.block_count": 3,
        "llama.attention.head_count_kv": (10, 11, 12),
        "llama.feed_forward_length": (10, 11, 12),
        "llama.attention.sliding_window_pattern": (True, False, True),
        "llama.swiglu_clamp_exp": (0.5,) * 3,
        "xielu.eps": (0.25,) * 3,
    }


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    source = model(
        tmp_path / "x.gguf",
        llama__nextn_predict_layers=(U32, 1),
        llama__leading_dense_block_count=(U32, 3),
        llama__attention__indexer__types=(ARRAY, (U32, [1] * (LAYERS - 1))),
    )
    assert layer_count(source) == LAYERS - 1
    cut(source, tmp_path / "cut.gguf", 2)
    _, after = check(source, tmp_path / "cut.gguf", 2)
    assert after.number("llama.nextn_predict_layers", 9) == 0
    assert after.number("llama.leading_dense_block_count") == 2
    assert after.metadata["llama.attention.indexer.types"] == (1, 1)
    assert "11" in refused(source, LAYERS)


def test_the_alignment_is_kept(tmp_path: Path) -> None:
    source = tmp_path / "x.gguf"
    source.write_bytes(encoded({**keys(), "general.alignment": (U32, 8)}, weights()))
    cut(source, tmp_path / "cut.gguf", 1)
    _, after = check(source, tmp_path / "cut.gguf", 1)
    assert {tensor.offset % 8 for tensor in after.tensors} == {0}


# --- after how many layers it repeats


@pytest.mark.parametrize(
    ("arch", "said", "period"),
    [
        ("llama", {}, 1),
        ("gemma3", {}, 6),
        ("gemma2", {}, 2),
        ("llama4", {}, 4),
        ("cohere2", {"attention__sliding_window_pattern": (U32, 3)}, 3),
        ("gemma4", {"attention__sliding_window_pattern": (ARRAY, (BOOL, [True, True, True, False] * 3))}, 4),
        ("jamba", {"attention__head_count_kv": (ARRAY, (U32, [0, 0, 0, 0, 2, 0] * 2))}, 6),
        ("glm4moe", {"leading_dense_block_count": (U32, 3)}, 4),
        ("glm4moe", {"leading_dense_block_count": (U32, 1)}, 2),
        ("deci", {"attention__head_count": (ARRAY, (U32, list(range(LAYERS))))}, LAYERS),
        ("plain", {"attention__sliding_window_pattern": (U32, 2**31)}, LAYERS),
    ],
)
def test_after_how_many_layers_it_repeats(tmp_path: Path, arch: str, said: dict[str, Any], period: int) -> None:
    changes: dict[str, Any] = {f"llama__{key}": value for key, value in said.items()}
    assert periods(model(tmp_path / "x.gguf", arch=arch, **changes)) == period


def test_layers_of_other_tensors_are_other_layers(tmp_path: Path) -> None:
    tensors = weights(layers=LAYERS)
    for i in range(LAYERS):
        if i % 4 == 3:
            tensors[f"blk.{i}.attn_gate.weight"] = np.ones(4, np.float32)
    source = tmp_path / "x.gguf"
    source.write_bytes(encoded(keys(block_count=(U32, LAYERS)), tensors))
    assert periods(source) == 4


# --- what is refused


@pytest.mark.parametrize("layers", [-1, 0, LAYERS + 1])
def test_layers_that_it_has_not(tmp_path: Path, layers: int) -> None:
    message = refused(model(tmp_path / "x.gguf"), layers)
    assert str(layers) in message
    assert str(LAYERS) in message


@pytest.mark.parametrize(
    ("arch", "said", "layers"),
    [
        ("t5", {}, LAYERS),
        ("gemma3n", {}, LAYERS),
        ("baichuan", {}, LAYERS),
        ("deepseek2", {}, 27),
        ("gemma4", {"llama__attention__shared_kv_layers": (U32, 2)}, LAYERS),
        ("llama", {"split__count": (U32, 2)}, LAYERS),
        ("llama", {"block_count": None}, LAYERS),
        ("llama", {"llama__nextn_predict_layers": (U32, 99)}, LAYERS),
        ("llama", {}, 513),
    ],
)
def test_models_that_cannot_be_cut(tmp_path: Path, arch: str, said: dict[str, Any], layers: int) -> None:
    metadata = {
        key.replace("llama.", f"{arch}.", 1): value
        for key, value in keys(**{"block_count": (U32, layers), **said}).items()
    }
    metadata["general.architecture"] = (TEXT, arch)
    (tmp_path / "x.gguf").write_bytes(encoded(metadata, weights()))
    assert "x.gguf" in refused(tmp_path / "x.gguf", 1)


@pytest.mark.parametrize("name", ["per_layer_token_embd.weight", "enc.blk.0.attn_q.weight", "dec.output_norm.weight"])
def test_tensors_of_all_layers(tmp_path: Path, name: str) -> None:
    tensors = {**weights(), name: np.ones(32, np.float32)}
    assert name in refused(tiny_gguf(tmp_path / "x.gguf", tensors), 1)


def test_a_missing_file_a_folder_and_its_own_place(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder")
    source = model(tmp_path / "x.gguf")
    before = source.read_bytes()
    with pytest.raises(StartupError):
        cut(source, source, 2)
    assert source.read_bytes() == before
    with pytest.raises(StartupError, match="no such file"):
        cut(source, tmp_path / "nowhere" / "x.gguf", 2)


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_nothing_is_left_of_one_that_was_given_up(
    tmp_path: Path, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "x.gguf")
    calls = []
    copy = sample._copy

    def full(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 40:
            raise fault
        copy(*arguments)

    monkeypatch.setattr(sample, "_copy", full)
    if isinstance(fault, OSError):
        assert "no space left" in refused(source)
    else:
        with pytest.raises(KeyboardInterrupt):
            cut(source, tmp_path / "cut.gguf", 3)
    assert len(calls) == 40
    assert list(tmp_path.iterdir()) == [source]


def test_one_that_is_cut_short_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(tmp_path / "x.gguf")

    def shortened(path: Path) -> Head:
        head = read_head(path)
        os.truncate(path, head.size // 3)
        return head

    monkeypatch.setattr(sample, "read_head", shortened)
    assert "shorter" in refused(source, 8)


def test_whatever_its_head_says_it_is_cut_or_refused(tmp_path: Path) -> None:
    source, target = model(tmp_path / "x.gguf"), tmp_path / "cut.gguf"
    whole, end = source.read_bytes(), read_head(source).data
    done = 0
    rng = random.Random(7)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(end)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        source.write_bytes(data)
        with contextlib.suppress(StartupError):
            assert periods(source) >= 1
        with contextlib.suppress(StartupError):
            cut(source, target, rng.randrange(1, LAYERS))
            done += 1
            assert target.stat().st_size <= len(whole)
            target.unlink()
        assert list(tmp_path.iterdir()) == [source]
    assert 0 < done < 300


# --- with the library


def logits(path: Path, ids: Sequence[int]) -> Logits:
    """After `ids`."""
    engine = LlamaEngine(LlamaSettings(path, "cut", cells=256, slots=1, batch=64), ManualClock())
    seen: list[Logits] = []
    outputs = engine._outputs

    def look(n: int) -> Logits:
        rows = outputs(n)
        seen.append(rows.copy())
        return rows

    engine._outputs = look  # type: ignore[method-assign]
    try:
        engine.step([Chunk(0, 0, ids, Draw(GREEDY, 0, len(ids), ids, len(ids)))])
    finally:
        del engine._outputs
        engine.close()
    return seen[-1]


def cut_of(tmp_path: Path) -> Callable[[Path, int], Path]:
    def made(source: Path, layers: int) -> Path:
        target = tmp_path / f"{layers}.gguf"
        cut(source, target, layers)
        return target

    return made


@pytest.mark.real
def test_the_demo_model_s_first_layers_are_a_model(demo_model: Path, tmp_path: Path) -> None:
    assert (layer_count(demo_model), periods(demo_model)) == (30, 1)
    made = cut_of(tmp_path)
    six = made(demo_model, 6)
    check(demo_model, six, 6)
    before, after = (Vocabulary.open(path) for path in (demo_model, six))
    assert after.info("m", 0, 0) == before.info("m", 0, 0)
    ids = before.encode("1, 2, 3, 4, 5, 6, 7,", special=False)
    assert after.encode("1, 2, 3, 4, 5, 6, 7,", special=False) == ids
    few = logits(six, ids)
    assert np.isfinite(few).all()
    assert np.array_equal(logits(made(demo_model, 30), ids), logits(demo_model, ids))
    assert not np.array_equal(few, logits(demo_model, ids))
    quantise(six, tmp_path / "q.gguf", TARGETS["q4_0"].number, 1)
    assert layer_count(tmp_path / "q.gguf") == 6
    assert np.isfinite(logits(tmp_path / "q.gguf", ids)).all()


@pytest.mark.real
def test_a_model_with_windows(window_model: Path, tmp_path: Path) -> None:
    assert (layer_count(window_model), periods(window_model)) == (18, 6)
    six = cut_of(tmp_path)(window_model, 6)
    check(window_model, six, 6)
    assert periods(six) == 6
    assert np.isfinite(logits(six, [2, 10, 20, 30, 40])).all()
