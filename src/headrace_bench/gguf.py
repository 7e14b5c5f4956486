"""One GGUF file, asked directly: `python -m headrace_bench.gguf FILE …` prints one line of JSON.

    parameters, quantisation, size      what the file says of itself
    perplexity, bits per byte           of a fixed text
    prefill                             tokens per second of a bare `llama_decode`

Rules: this file alone of the laboratory imports llama_cpp, and only when it runs as a program of its own: a file that
brings the library down brings down nothing else; whatever cannot be read is `{"error": "one line"}` and exit status 1.

Perplexity: exp of the mean negative log-likelihood of a token, given those before it. A window of 512 tokens moves over
the text by 256; only its second half is scored, so every token that counts has at least 256 before it (llama.cpp's tool
scores second halves too, of windows that do not overlap). The first `START` bytes are never scored: with any vocabulary
the same bytes count, so bits per byte (the sum of -log2 p over those bytes) can be compared where perplexity, which is
a token, cannot. Greedy arithmetic in double precision on the library's logits: the same file gives the same figure.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEXT = Path(__file__).with_name("perplexity.txt")
WINDOW = 512
STEP = WINDOW // 2
START = 1500
"""Bytes: more than 256 tokens of English with the vocabularies of today."""
PREFILL = 512
MAGIC = b"GGUF"
LOG_ERROR = 4
"""The library's level; its bindings do not name it."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Unreadable(Exception):
    """One line about the file."""


def windows(first: int, n: int) -> Iterator[tuple[int, int, int]]:
    """(begin, from, to): tokens begin … to - 1 are computed, from … to - 1 are scored; each of first … n - 1 once."""
    for scored in range(first, n, STEP):
        to = min(scored + STEP, n)
        yield max(0, to - WINDOW), scored, to


def first_scored(sizes: Sequence[int], start: int = START) -> int:
    """The first token that begins at byte `start` or later, of tokens of `sizes` bytes; never the very first."""
    at = 0
    for i, size in enumerate(sizes):
        if at >= start and i > 0:
            return i
        at += size
    return len(sizes)


def surprise(logits: Floats, tokens: Sequence[int]) -> float:
    """Sum over rows of -ln p(token), p the softmax of the row. `logits`: (rows, vocabulary)."""
    rows = logits.astype(np.float64)
    top = rows.max(axis=1)
    total = np.log(np.exp(rows - top[:, None]).sum(axis=1)) + top
    return float((total - rows[np.arange(len(tokens)), np.asarray(tokens)]).sum())


class Model:
    """A loaded file and one context of `WINDOW` tokens. Raises Unreadable."""

    def __init__(self, file: Path, threads: int) -> None:
        self.C: Any = importlib.import_module("llama_cpp.llama_cpp")
        self._errors: list[str] = []
        self._log = self.C.llama_log_callback(self._on_log)
        self.C.llama_log_set(self._log, ctypes.c_void_p(0))
        self.C.llama_backend_init()
        self.file = file
        self.model = self.C.llama_model_load_from_file(str(file).encode(), self.C.llama_model_default_params())
        if not self.model:
            raise Unreadable(f"llama.cpp cannot load it: {self._said()}")
        params = self.C.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = WINDOW
        params.n_outputs_max = WINDOW
        params.n_threads = params.n_threads_batch = threads
        self.context = self.C.llama_init_from_model(self.model, params)
        if not self.context:
            raise Unreadable(f"no context of {WINDOW} tokens: {self._said()}")
        self.vocab = self.C.llama_model_get_vocab(self.model)
        self.n_vocab = int(self.C.llama_vocab_n_tokens(self.vocab))
        self._batch = self.C.llama_batch_init(WINDOW, 0, 1)

    def _on_log(self, level: int, text: bytes, _data: Any) -> None:
        if level == LOG_ERROR:
            self._errors.append(" ".join(text.decode("utf-8", "replace").split()))

    def _said(self) -> str:
        return next((line for line in self._errors if line), "it does not say why")[:200]

    def facts(self) -> dict[str, Any]:
        """What the file says of itself. Sizes in bytes."""
        return {
            "architecture": self._meta("general.architecture"),
            "quantisation": self._quantisation(),
            "parameters": int(self.C.llama_model_n_params(self.model)),
            "size": self.file.stat().st_size,
            "context": int(self.C.llama_model_n_ctx_train(self.model)),
            "vocabulary": self.n_vocab,
        }

    def _quantisation(self) -> str:
        """The last word of llama.cpp's description: `llama 135M Q4_1`."""
        buffer = ctypes.create_string_buffer(256)
        self.C.llama_model_desc(self.model, buffer, len(buffer))
        words = buffer.value.decode("utf-8", "replace").split()
        named = [word for word in words if word[:1] in "QIFBT" and any(c.isdigit() for c in word)]
        return " ".join(words[words.index(named[0]) :]) if named else " ".join(words)

    def _meta(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(256)
        size = self.C.llama_model_meta_val_str(self.model, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if size >= 0 else None

    def tokens(self, text: bytes) -> list[int]:
        """The text's tokens, with what the vocabulary puts before a text, without what it puts behind.

        An end is no part of the text: scored, it would make one vocabulary's figure worse than another's.
        """
        found = (ctypes.c_int32 * (len(text) + 8))()
        n = self.C.llama_tokenize(self.vocab, text, len(text), found, len(found), True, False)
        if n < 0:
            raise Unreadable("its vocabulary does not tokenise the text")
        tokens = list(found[:n])
        if tokens and self.C.llama_vocab_get_add_eos(self.vocab) and tokens[-1] == self.C.llama_vocab_eos(self.vocab):
            del tokens[-1]
        return tokens

    def bytes_of(self, token: int) -> int:
        """How many bytes of text a token stands for."""
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            found = int(self.C.llama_token_to_piece(self.vocab, token, buffer, size, 0, False))
            if found >= -size:  # as many as it needs, negative, if they are more than there is room for
                return max(0, found)
            size = -found

    def decode(self, tokens: Sequence[int], outputs: int) -> None:
        """Computes `tokens` as a text of their own, keeping the logits of the last `outputs`. Raises Unreadable."""
        self.C.llama_memory_clear(self.C.llama_get_memory(self.context), True)
        batch, n = self._batch, len(tokens)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, i, 1, 0
            batch.logits[i] = i >= n - outputs
        if self.C.llama_decode(self.context, batch):
            raise Unreadable(f"llama.cpp cannot compute it: {self._said()}")
        self.C.llama_synchronize(self.context)

    def perplexity(self, text: bytes) -> dict[str, Any]:
        """See the top of the file. `text` is UTF-8."""
        tokens = self.tokens(text)
        sizes = [self.bytes_of(token) for token in tokens]
        first = first_scored(sizes)
        if first >= len(tokens):
            raise Unreadable(f"the text has {len(text)} bytes: nothing is left to score behind the first {START}")
        bos = tokens[0] if self.C.llama_vocab_get_add_bos(self.vocab) else None
        nats = 0.0
        for begin, scored, to in windows(first, len(tokens)):
            window = tokens[begin:to]
            if bos is not None:
                window[0] = bos
            # The logits of a token are those computed at the token before it.
            rows = to - scored
            self.decode(window, rows + 1)
            logits = np.ctypeslib.as_array(self.C.llama_get_logits(self.context), shape=(rows + 1, self.n_vocab))
            nats += surprise(logits[:rows], tokens[scored:to])
        n, size = len(tokens) - first, sum(sizes[first:])
        return {
            "perplexity": math.exp(nats / n),
            "bits_per_byte": nats / math.log(2) / size,
            "scored_tokens": n,
            "scored_bytes": size,
        }

    def prefill(self, seed: int, times: int) -> list[float]:
        """Tokens per second of `PREFILL` tokens that nobody computed before, `times` times; a first one warms up."""
        rng = random.Random(seed)
        rates = []
        for _ in range(times + 1):
            tokens = [rng.randrange(self.n_vocab // 2) for _ in range(PREFILL)]
            began = time.perf_counter()
            self.decode(tokens, 1)
            rates.append(PREFILL / (time.perf_counter() - began))
        return rates[1:]


def read(asked: argparse.Namespace) -> dict[str, Any]:
    """All that was asked for of one file. Raises Unreadable."""
    try:
        with asked.file.open("rb") as data:
            magic = data.read(4)
    except OSError as error:
        raise Unreadable(error.strerror or type(error).__name__) from None
    if magic != MAGIC:
        raise Unreadable("not a GGUF file")
    model = Model(asked.file, asked.threads)
    found = model.facts()
    if asked.perplexity:
        found |= model.perplexity(TEXT.read_bytes())
    if asked.prefill:
        found["prefill"] = model.prefill(asked.seed, asked.prefill)
    return found


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m headrace_bench.gguf")
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--perplexity", action="store_true")
    parser.add_argument("--prefill", type=int, default=0, metavar="TIMES")
    parser.add_argument("--seed", type=int, default=1)
    try:
        found = read(parser.parse_args())
    except Unreadable as error:
        found = {"error": str(error)}
    print(json.dumps(found))
    return "error" in found


if __name__ == "__main__":
    sys.exit(main())
