from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_bench.gguf import START, STEP, TEXT, WINDOW, Model, first_scored, surprise, windows


@pytest.mark.parametrize("n", [301, 512, 513, 1000, 1524])
def test_every_token_is_scored_once_with_enough_before_it(n: int) -> None:
    first = 300
    scored: list[int] = []
    for begin, at, to in windows(first, n):
        assert to - begin <= WINDOW
        assert at - begin >= STEP
        scored += range(at, to)
    assert scored == list(range(first, n))


def test_a_vocabulary_of_long_tokens_scores_the_same_bytes() -> None:
    assert first_scored([5] * 400) == 300
    assert first_scored([0, *[15] * 200]) == 101
    assert first_scored([2000, 1]) == 1
    assert first_scored([1] * 10) == 10


def test_surprise_is_the_log_of_a_softmax() -> None:
    logits = np.log(np.array([[0.25, 0.75], [0.5, 0.5]])) + 1000
    assert surprise(logits, [1, 0]) == pytest.approx(-math.log(0.75) - math.log(0.5))


def test_the_text_is_long_enough_and_plain() -> None:
    text = TEXT.read_text(encoding="utf-8")
    assert len(text) > 4 * START
    assert text.isascii()


class Library:
    """A vocabulary in which a byte is a token, 2 the end of a text, and 3 a piece of 1,000 bytes."""

    def __init__(self, *, adds_eos: bool) -> None:
        self.adds_eos = adds_eos

    def llama_tokenize(self, _vocab: Any, text: bytes, n: int, into: Any, room: int, *_: Any) -> int:
        found = [*text, *([2] if self.adds_eos else [])]
        assert len(text) == n
        assert len(found) <= room
        into[: len(found)] = found
        return len(found)

    def llama_vocab_get_add_eos(self, _vocab: Any) -> bool:
        return self.adds_eos

    def llama_vocab_eos(self, _vocab: Any) -> int:
        return 2

    def llama_token_to_piece(self, _vocab: Any, token: int, _buffer: Any, room: int, *_: Any) -> int:
        size = 1000 if token == 3 else 1
        return size if size <= room else -size


def vocabulary(*, adds_eos: bool = False) -> Model:
    model = Model.__new__(Model)
    model.C, model.vocab = Library(adds_eos=adds_eos), None
    return model


def test_an_end_that_the_vocabulary_adds_is_not_scored() -> None:
    assert vocabulary(adds_eos=True).tokens(b"ab") == [97, 98]
    assert vocabulary().tokens(b"ab\x02") == [97, 98, 2], "one that stands in the text is text"


def test_a_long_piece_counts_with_all_its_bytes() -> None:
    assert [vocabulary().bytes_of(token) for token in (97, 3)] == [1, 1000]


def ask(file: Path, *flags: str) -> tuple[int, dict[str, object], str]:
    command = [sys.executable, "-m", "headrace_bench.gguf", str(file), "--threads", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    assert ask(tmp_path / "text")[:2] == (1, {"error": "not a GGUF file"})
    assert ask(tmp_path / "none")[:2] == (1, {"error": "No such file or directory"})


@pytest.mark.real
def test_a_damaged_file_is_one_line(tmp_path: Path, demo_model: Path) -> None:
    with demo_model.open("rb") as data:
        (tmp_path / "torn.gguf").write_bytes(data.read(3_000_000))
    status, found, err = ask(tmp_path / "torn.gguf")
    assert status == 1
    assert "cannot load it" in str(found["error"])
    assert "\n" not in str(found["error"])
    assert err == ""


@pytest.mark.real
def test_the_demo_model(demo_model: Path) -> None:
    status, found, err = ask(demo_model, "--perplexity", "--prefill", "1")
    assert (status, err) == (0, "")
    assert (found["quantisation"], found["parameters"], found["vocabulary"]) == ("Q4_1", 134_515_008, 49152)
    assert found["size"] == demo_model.stat().st_size
    # Another build computes other last bits: 39.50 here.
    assert found["perplexity"] == pytest.approx(39.5, rel=0.01)
    scored_bytes, scored_tokens = found["scored_bytes"], found["scored_tokens"]
    assert isinstance(scored_bytes, int)
    assert isinstance(scored_tokens, int)
    assert abs(scored_bytes - (len(TEXT.read_bytes()) - START)) < 16
    assert isinstance(found["perplexity"], float)
    bits = math.log2(found["perplexity"]) * scored_tokens / scored_bytes
    assert found["bits_per_byte"] == pytest.approx(bits)
