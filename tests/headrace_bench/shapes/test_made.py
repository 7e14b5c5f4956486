from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_bench.fault import Fault
from headrace_bench.shapes import made
from headrace_bench.shapes.container import Q4_K, Q6_K
from headrace_bench.shapes.made import ONE_B, Shape, file, has_more_bits, keys, tensors
from headrace_bench.shapes.vocabulary import vocabulary

SMALL = Shape("small", 8, 256, 4, 2, 64, 512, 4096, 8)


def test_the_shape_is_that_of_the_published_model() -> None:
    planned = tensors(ONE_B)
    assert sum(one.weights for one in planned) == 1_235_814_400
    kinds = {one.name: one.type for one in planned}
    finer = [layer for layer in range(16) if kinds[f"blk.{layer}.ffn_down.weight"] == Q6_K]
    assert finer == [0, 1, 4, 7, 10, 13, 14, 15]
    assert {kinds[f"blk.{layer}.attn_v.weight"] for layer in finer} == {Q6_K}
    assert kinds["blk.2.attn_v.weight"] == kinds["blk.0.attn_q.weight"] == Q4_K
    assert kinds["token_embd.weight"] == Q6_K
    assert "output.weight" not in kinds, "the embeddings are the output"
    assert [has_more_bits(layer, 8) for layer in range(8)] == [True, False, False, True, False, False, True, True]


def test_the_metadata_name_the_shape() -> None:
    found = keys(SMALL, vocabulary(SMALL.tokens, SMALL.control, 1))
    assert (found["llama.rope.freq_base"], found["llama.context_length"]) == (500_000.0, 131_072)
    assert (found["llama.attention.head_count"], found["llama.attention.head_count_kv"]) == (4, 2)
    assert found["tokenizer.ggml.eos_token_id"] == SMALL.tokens - SMALL.control + 4


def test_it_is_made_once_and_the_same_for_a_seed(tmp_path: Path) -> None:
    said: list[str] = []
    place = file(tmp_path / "a", said.append, SMALL)
    assert file(tmp_path / "a", said.append, SMALL) == place
    assert len(said) == 1
    assert "MB of random weights" in said[0]
    assert file(tmp_path / "b", said.append, SMALL).read_bytes() == place.read_bytes()
    assert file(tmp_path / "b", said.append, SMALL, seed=2).read_bytes() != place.read_bytes()
    assert len(list((tmp_path / "b").iterdir())) == 2


def test_what_cannot_be_written_is_a_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Fault, match=r"Not a directory|File exists"):
        file(tmp_path / "file", lambda _: None, SMALL)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made, "write", full)
    with pytest.raises(Fault, match="No space left"):
        file(tmp_path / "full", lambda _: None, SMALL)
    assert not list((tmp_path / "full").iterdir())


ASK = """
import ctypes, json, sys
import numpy as np
import llama_cpp.llama_cpp as C
log = C.llama_log_callback(lambda *_: None)
C.llama_log_set(log, ctypes.c_void_p(0))
C.llama_backend_init()
model = C.llama_model_load_from_file(sys.argv[1].encode(), C.llama_model_default_params())
params = C.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
context = C.llama_init_from_model(model, params)
vocab = C.llama_model_get_vocab(model)
text = b"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\nTell me a story about the house<|eot_id|>"
ids = (C.llama_token * 64)()
count = C.llama_tokenize(vocab, text, len(text), ids, 64, False, True)
batch, out, finite = C.llama_batch_get_one(ids, count), [], True
for _ in range(64):
    assert C.llama_decode(context, batch) == 0
    logits = np.ctypeslib.as_array(C.llama_get_logits_ith(context, -1), shape=(C.llama_vocab_n_tokens(vocab),))
    finite &= bool(np.isfinite(logits).all())
    out.append(int(logits.argmax()))
    batch = C.llama_batch_get_one((C.llama_token * 1)(out[-1]), 1)
pieces = []
for token in out:
    buffer = ctypes.create_string_buffer(64)
    size = C.llama_token_to_piece(vocab, token, buffer, 64, 0, False)
    pieces.append(buffer.raw[:size].decode())
ended = any(C.llama_vocab_is_eog(vocab, token) for token in out)
print(json.dumps({"prompt": count, "finite": finite, "pieces": pieces, "ended": ended}))
"""


@pytest.mark.real
def test_the_library_loads_it_and_it_writes_text_that_does_not_end(tmp_path: Path) -> None:
    place = file(tmp_path, lambda _: None, SMALL)
    done = subprocess.run([sys.executable, "-c", ASK, str(place)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["prompt"] == 13, "a common word is a token"
    assert found["finite"]
    assert not found["ended"]
    assert all(piece.strip().isalpha() for piece in found["pieces"])
    assert len(set(found["pieces"])) > 16, "it does not say the same word again and again"
