"""A model's first layers as a model of its own: as fast, layer by layer, as the whole, and a fraction of its size.

    ┌ head ─────────────────────┬ data ─────────────────────────────────────────────────┐
    │ keys        │ tensor table│ token_embd │ blk.0 │ … │ blk.29             │ output  │   the file
    └─────────────┴─────────────┴────────────┴───────┴───┴────────────────────┴─────────┘
      block_count   rows of the                 layers 0 … n-1                  all
      = n           kept tensors                                                           its sample

Rules: weights, vocabulary and all other keys keep their bytes; arrays with one item a layer are cut as llama.cpp wants
them. A model whose layers need one another, or that llama.cpp tells apart by their number, is refused. The library is
never loaded, and nothing is under the target's name before it is whole.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.core.errors import StartupError
from headrace.core.file_name import shown
from headrace.engines.gguf import MAGIC, Head, Tensor, read_head

PART = ".part"
"""Ends the name of a file that is being written."""
MOST_LAYERS = 512
"""LLAMA_MAX_LAYERS."""
_CHUNK = 4 << 20
_U32 = 4
_SHORTER = "the model file became shorter while its sample was made; start anew"

_PER_LAYER = (
    "feed_forward_length", "attention.head_count", "attention.head_count_kv", "expert_used_count",
    "expert_feed_forward_length", "swiglu_clamp_exp", "swiglu_clamp_shexp", "attention.sliding_window_pattern",
    "attention.rope_pattern", "attention.recurrent_layers", "attention.indexer.types", "attention.compress_ratios",
    "deepstack_mapping",
)  # fmt: skip
"""Keys below the architecture's name that llama.cpp reads one item a layer; as numbers they hold for all layers."""
_XIELU = ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps")
"""The same, without the architecture's name before them."""

_PERIODS: Mapping[str, int] = {
    "afmoe": 4, "cohere2": 4, "cohere2moe": 4, "exaone-moe": 4, "exaone4": 4, "gemma-embedding": 6, "gemma2": 2,
    "gemma3": 6, "gpt-oss": 2, "laguna": 4, "llama4": 4, "mellum": 4, "modern-bert": 3, "muse-glimmer": 4, "olmo2": 4,
    "plamo3": 8, "smallthinker": 4, "smollm3": 4,
}  # fmt: skip
"""Every how many layers one sees all, or has no rotary positions, where no key says so: `load_swa_pattern` and
`n_no_rope_layer_step` in llama.cpp. All else that repeats shows in the layers' tensors."""

_ENTANGLED: Mapping[str, str] = {
    "clip": "it is no language model",
    "wavtokenizer-dec": "it is no language model",
    "qwen3tts": "it is no language model",
    "pockettts": "it is no language model",
    "t5": "an encoder and a decoder have layers of their own",
    "t5encoder": "an encoder's layers are not named as others are",
    "gemma3n": "its layers share KV",
    "gemma4-assistant": "its layers read another model's KV",
    "eagle3": "its layers read another model's states",
    "dflash": "its layers read another model's states",
    "qwen4exp": "its layers have inputs of their own",
    "deepseek4": "its first layers are another kind than the rest",
    "nanbeige": "its layers are run more than once",
    "hrm_text": "its layers are run more than once",
    "baichuan": "llama.cpp tells its kinds apart by the number of layers",
}
_TOLD_BY_LAYERS: Mapping[str, frozenset[int]] = {
    "deepseek2": frozenset((26, 27, 47, 48)),
    "mistral4": frozenset((26, 27, 47, 48)),
    "exaone4": frozenset((64,)),
}
"""Numbers of layers by which llama.cpp tells that a model is built in another way."""

_LAYER = re.compile(r"blk\.(\d{1,9})\.(.*)", re.DOTALL)
_APART = re.compile(r"(enc\.|dec\.|per_layer_|altup_|nextn\.)")
"""Tensors that belong to layers, and are not named as theirs."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """All that is written."""

    version: int
    pairs: tuple[bytes | tuple[int, int], ...]
    """Of each key with its value: the bytes, or where they stand in the source."""
    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    alignment: int


def layer_count(path: Path) -> int:
    """Layers of the model in the file, those that only guess ahead (MTP) left out. Raises StartupError."""
    return _layers(path, read_head(path))


def periods(path: Path) -> int:
    """Fewest first layers that hold each kind of layer in the proportion in which they repeat: 1 for a plain model, 6
    for one with a layer that sees all behind five with a window, the dense ones and one more for one that begins with
    dense layers; all layers where nothing repeats. Raises StartupError."""
    head = read_head(path)
    n = _layers(path, head)
    arch = head.text("general.architecture")
    kinds: list[list[Hashable]] = [[] for _ in range(n)]
    lead = head.number(f"{arch}.leading_dense_block_count")
    pattern = head.number(f"{arch}.attention.sliding_window_pattern") or _PERIODS.get(arch, 1)
    for name in _array_names(arch):
        items = head.metadata.get(name)
        if isinstance(items, tuple) and len(items) >= n:
            _add(kinds, items)
            if name.endswith("sliding_window_pattern"):
                pattern = 1  # said layer by layer
    shapes: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in range(n)]
    for tensor in head.tensors:
        found = _LAYER.match(tensor.name)
        if found and int(found[1]) < n:
            shapes[int(found[1])].add((found[2], tensor.shape))
    _add(kinds, [frozenset(shape) for shape in shapes])
    _add(kinds, [(i < lead, i % max(pattern, 1)) for i in range(n)])
    numbers: dict[Hashable, int] = {}
    return _repeats([numbers.setdefault(tuple(kind), len(numbers)) for kind in kinds])


def cut(source: Path, target: Path, layers: int) -> None:
    """Write the first `layers` layers of the model `source` to `target`, whole or not at all. Raises StartupError: for
    what is no model or cannot be cut, for more layers than it has, and where the disk gives out."""
    sample = _planned(source, read_head(source), layers)
    part = target.with_name(f".{target.name}.{os.getpid()}{PART}")
    try:
        if target.exists() and target.samefile(source):
            raise StartupError(f"{shown(source)} cannot be cut: its sample would take its place")
        with source.open("rb", buffering=0) as file, part.open("wb") as out:
            _write(sample, file, out)
            out.flush()
            os.fsync(out.fileno())
        part.replace(target)
    except OSError as error:
        raise StartupError(f"cannot write {shown(target)}: {(error.strerror or str(error)).lower()}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _layers(path: Path, head: Head) -> int:
    arch = head.text("general.architecture")
    if not arch:
        raise StartupError(f"{shown(path)} does not say its general.architecture: it is no model")
    every = head.number(f"{arch}.block_count")
    ahead = head.number(f"{arch}.nextn_predict_layers")
    if not 1 <= every <= MOST_LAYERS or not 0 <= ahead < every:
        raise StartupError(
            f"{shown(path)} says that it has {every} layers, {ahead} of them to guess ahead; 1 to {MOST_LAYERS} can be"
        )
    return every - ahead


def _array_names(arch: str) -> tuple[str, ...]:
    return (*(f"{arch}.{name}" for name in _PER_LAYER), *_XIELU)


def _add(kinds: Sequence[list[Hashable]], items: Sequence[Hashable]) -> None:
    for kind, item in zip(kinds, items, strict=False):
        kind.append(item)


def _repeats(kinds: Sequence[int]) -> int:
    """Fewest items from the first on after which those behind them only repeat: what comes once, and one period."""
    n = len(kinds)
    best = n
    for period in range(1, n):
        once = next((i + 1 for i in reversed(range(n - period)) if kinds[i] != kinds[i + period]), 0)
        best = min(best, once + period)
    return best


def _planned(source: Path, head: Head, layers: int) -> _Sample:
    n = _layers(source, head)
    if not 1 <= layers <= n:
        raise StartupError(f"{shown(source)} cannot be cut to {layers} layers: it has {n}")
    if why := _entangled(head, layers):
        raise StartupError(f"{shown(source)} cannot be cut: {why}")
    tensors, sizes = [], []
    for tensor in head.tensors:
        found = _LAYER.match(tensor.name)
        if found and int(found[1]) >= layers:
            continue
        if tensor.size is None:
            raise StartupError(
                f"{shown(source)} cannot be cut: tensor {tensor.name[:60]!r} has the unknown type {tensor.type}"
            )
        tensors.append(tensor)
        sizes.append(tensor.size)
    if sum(sizes) > head.size:
        raise StartupError(f"{shown(source)} cannot be cut: its tensors lie over one another")
    alignment = int(head.number("general.alignment", 32))
    try:
        pairs = _pairs(source, head, layers)
    except OSError as error:
        raise StartupError(f"cannot read {shown(source)}: {(error.strerror or str(error)).lower()}") from None
    return _Sample(head.version, pairs, tuple(tensors), tuple(sizes), alignment)


def _entangled(head: Head, layers: int) -> str:
    """Why its layers cannot do without those behind them; "" if they can."""
    arch = head.text("general.architecture")
    if head.number("split.count", 1) > 1:
        return f"it is one of {head.number('split.count')} files; join them with llama-gguf-split --merge"
    if arch in _ENTANGLED:
        return f"{arch}: {_ENTANGLED[arch]}"
    if shared := head.number(f"{arch}.attention.shared_kv_layers"):
        return f"{shared} of its layers share KV"
    told = _TOLD_BY_LAYERS.get(arch, frozenset())
    every = head.number(f"{arch}.block_count")
    if layers != every and told & {layers, every, every - head.number(f"{arch}.nextn_predict_layers")}:
        return f"llama.cpp tells kinds of {arch} apart by their number of layers, {every} and {layers}"
    apart = next((tensor.name for tensor in head.tensors if _APART.match(tensor.name)), "")
    return f"tensor {apart[:60]!r} belongs to all of its layers" if apart else ""


def _pairs(source: Path, head: Head, layers: int) -> tuple[bytes | tuple[int, int], ...]:
    arch = head.text("general.architecture")
    every, lead = head.number(f"{arch}.block_count"), head.number(f"{arch}.leading_dense_block_count")
    lengths = (every, every - head.number(f"{arch}.nextn_predict_layers"))
    numbers = {f"{arch}.block_count": layers, f"{arch}.nextn_predict_layers": 0}
    if lead > layers:
        numbers[f"{arch}.leading_dense_block_count"] = layers
    names = frozenset(_array_names(arch))
    pairs: list[bytes | tuple[int, int]] = []
    with source.open("rb") as file:
        for key, span in head.pairs.items():
            value = head.metadata[key]
            if key in numbers:
                name = key.encode()
                pairs.append(struct.pack("<Q", len(name)) + name + struct.pack("<II", _U32, numbers[key]))
            elif key in names and isinstance(value, tuple) and len(value) in lengths:
                file.seek(span[0])
                pairs.append(_shortened(file.read(span[1] - span[0]), len(value), layers))
            else:
                pairs.append(span)
    return tuple(pairs)


def _shortened(pair: bytes, length: int, layers: int) -> bytes:
    """A key and its array of `length` numbers, cut to the first `layers`."""
    if len(pair) < 24:
        raise StartupError(_SHORTER)
    begin = 8 + int.from_bytes(pair[:8], "little") + 4 + 4  # the key's length, the key, ARRAY, the items' type
    width = (len(pair) - begin - 8) // length
    return pair[:begin] + struct.pack("<Q", layers) + pair[begin + 8 : begin + 8 + layers * width]


def _write(sample: _Sample, file: IO[bytes], out: IO[bytes]) -> None:
    out.write(MAGIC + struct.pack("<IQQ", sample.version, len(sample.tensors), len(sample.pairs)))
    for pair in sample.pairs:
        if isinstance(pair, bytes):
            out.write(pair)
        else:
            _copy(file, out, pair[0], pair[1] - pair[0])
    offset = 0
    for tensor, size in zip(sample.tensors, sample.sizes, strict=True):
        name, n = tensor.name.encode(), len(tensor.shape)
        row = struct.pack("<Q", len(name)) + name + struct.pack(f"<I{n}Q", n, *tensor.shape)
        out.write(row + struct.pack("<IQ", tensor.type, offset))
        offset += size + -size % sample.alignment
    _pad(out, sample.alignment)
    for tensor, size in zip(sample.tensors, sample.sizes, strict=True):
        _copy(file, out, tensor.offset, size)
        _pad(out, sample.alignment)


def _copy(file: IO[bytes], out: IO[bytes], start: int, size: int) -> None:
    file.seek(start)
    while size:
        data = file.read(min(size, _CHUNK))
        if not data:
            raise StartupError(_SHORTER)
        out.write(data)
        size -= len(data)


def _pad(out: IO[bytes], alignment: int) -> None:
    out.write(bytes(-out.tell() % alignment))
