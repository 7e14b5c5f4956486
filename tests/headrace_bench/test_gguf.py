from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace_bench.gguf import START, STEP, TEXT, WINDOW, first_scored, surprise, windows


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
