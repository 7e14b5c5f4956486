"""A model file of Llama-3.2-1B's shape with random weights: `file(folder, say)`.

    16 layers, 2,048 wide, 32 heads, 8 of KV, feed-forward 8,192, vocabulary 128,256      Q4_K and Q6_K as in a Q4_K_M

Rules: facts of the shape only, and nobody's weights; made once for a seed, and whole or not there; the text it answers
with is words without a sense, which end only where the request's limit is: control tokens and lone bytes have rows of
zeros, so they are never the likeliest.

The weights' deviations keep every layer's output near 1 whatever the depth, as training does: an answer then depends on
all of the prompt, does not repeat itself soon, and its logits are finite.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace_bench.fault import Fault
from headrace_bench.shapes.blocks import blocks, ones
from headrace_bench.shapes.container import BLOCKS, F32, Q4_K, Q6_K, Bytes, Tensor, Value, write
from headrace_bench.shapes.vocabulary import BEGIN, TEMPLATE, TURN, Vocabulary, vocabulary

RECIPE = 1
"""Counted up when the same seed makes other bytes: a file that was made before is then not taken."""
PART = 1 << 16
"""Blocks that are drawn at once: some 10 MB."""
DEVIATIONS: Mapping[str, float] = {"token_embd": 0.25, "attn_q": 2.0, "attn_k": 2.0, "attn_v": 2.0}
"""Of a matrix's weights, in units of one over the root of its inputs, where it is not 1.

Small embeddings: a token's own is no reason for the next one to be the same. Large queries, keys and values: each head
looks at a few tokens, others with each position. Otherwise greedy text soon repeats a word for ever, and a server that
looks up what was said before would seem fast.
"""
FILE_TYPE = 15
"""llama.cpp's number of Q4_K_M."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a model's shape."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    tokens: int
    control: int
    """Control tokens among `tokens`."""
    context: int = 131_072
    rope_base: float = 500_000.0
    epsilon: float = 1e-5


ONE_B = Shape("llama-1b-shape", 16, 2048, 32, 8, 64, 8192, 128_256, 256)


def file(folder: Path, say: Callable[[str], None], shape: Shape = ONE_B, seed: int = 1) -> Path:
    """The file in `folder`, made if it is not there. Raises Fault: it cannot be written."""
    place = folder / f"{shape.name}-{RECIPE}.{seed}.Q4_K_M.gguf"
    if place.is_file():
        return place
    planned = tensors(shape)
    say(f"making {place}: {sum(one.size for one in planned) / 1e6:,.0f} MB of random weights")
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    known = vocabulary(shape.tokens, shape.control, seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            write(out, keys(shape, known), planned, data(shape, planned, known, seed))
        part.replace(place)
    except OSError as error:
        raise Fault(f"{place}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return place


def keys(shape: Shape, known: Vocabulary) -> Mapping[str, Value]:
    """The file's metadata."""
    return {
        "general.architecture": "llama",
        "general.name": shape.name,
        "general.file_type": FILE_TYPE,
        "general.quantization_version": 2,
        "llama.block_count": shape.layers,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.width,
        "llama.feed_forward_length": shape.feed_forward,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_size,
        "llama.attention.value_length": shape.head_size,
        "llama.attention.layer_norm_rms_epsilon": shape.epsilon,
        "llama.rope.dimension_count": shape.head_size,
        "llama.rope.freq_base": shape.rope_base,
        "llama.vocab_size": shape.tokens,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": known.tokens,
        "tokenizer.ggml.token_type": known.types,
        "tokenizer.ggml.merges": known.merges,
        "tokenizer.ggml.bos_token_id": known.id(BEGIN),
        "tokenizer.ggml.eos_token_id": known.id(TURN),
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors(shape: Shape) -> list[Tensor]:
    """In the order of the file; the embeddings are the output too."""
    width, inner = shape.width, shape.heads * shape.head_size
    kv, forward = shape.kv_heads * shape.head_size, shape.feed_forward
    found = [Tensor("token_embd.weight", (width, shape.tokens), Q6_K), Tensor("output_norm.weight", (width,), F32)]
    for layer in range(shape.layers):
        finer = Q6_K if has_more_bits(layer, shape.layers) else Q4_K
        rows = {
            "attn_norm": ((width,), F32),
            "attn_q": ((width, inner), Q4_K),
            "attn_k": ((width, kv), Q4_K),
            "attn_v": ((width, kv), finer),
            "attn_output": ((inner, width), Q4_K),
            "ffn_norm": ((width,), F32),
            "ffn_gate": ((width, forward), Q4_K),
            "ffn_up": ((width, forward), Q4_K),
            "ffn_down": ((forward, width), finer),
        }
        found += [Tensor(f"blk.{layer}.{name}.weight", dimensions, kind) for name, (dimensions, kind) in rows.items()]
    return found


def has_more_bits(layer: int, layers: int) -> bool:
    """Does llama.cpp's Q4_K_M keep values and down projections of that layer as Q6_K? First and last eighth, and every
    third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def data(shape: Shape, planned: list[Tensor], known: Vocabulary, seed: int) -> Iterator[Bytes]:
    """Each tensor's bytes, in parts."""
    rng = np.random.Generator(np.random.PCG64(seed))
    for tensor in planned:
        if tensor.type == F32:
            yield ones(tensor.weights)
        elif tensor.name == "token_embd.weight":
            rows = np.concatenate(list(_parts(rng, tensor))).reshape(shape.tokens, -1)
            rows[known.silent] = 0  # a block of zeros is a block of weights 0
            yield rows
        else:
            yield from _parts(rng, tensor)


def _parts(rng: np.random.Generator, tensor: Tensor) -> Iterator[Bytes]:
    left = tensor.weights // BLOCKS[tensor.type][0]
    deviation = DEVIATIONS.get(tensor.name.split(".")[-2], 1.0) / math.sqrt(tensor.dimensions[0])
    while left:
        count = min(left, PART)
        yield blocks(rng, tensor.type, count, deviation)
        left -= count
