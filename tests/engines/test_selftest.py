"""The kernels' self-test: with the real library, and with doubles of kernels that are wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.engines import selftest
from headrace.engines.random_model import EMBEDDING, write_model
from headrace.engines.selftest import FILES, LIMIT, ROWS, Run, child_words, distance, fault, lines_of, run

SHAPE = (ROWS + 1, EMBEDDING)


def logits(seed: int = 1) -> selftest.Floats:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def child(code: str) -> Run:
    """A double of the child: a program that says what it is told to."""
    return run([sys.executable, "-c", f"import os, signal, sys\n{code}"])


@pytest.mark.parametrize("name", FILES)
def test_the_families_of_this_machine_agree(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, FILES[name])
    plain, other = (run(child_words(file, extra)) for extra in (False, True))
    assert plain.families == ()
    assert plain.logits is not None
    assert plain.logits.shape == SHAPE
    assert 0.5 < np.std(plain.logits) < 2.0
    assert fault(plain, other) == ""


def test_a_family_that_is_wrong_in_one_format_is_found(tmp_path: Path) -> None:
    """The same model but for one layer of six."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    write_model(right, FILES["blocks"])
    write_model(wrong, tuple("Q5_K" if form == "Q6_K" else form for form in FILES["blocks"]))
    plain, other = (run(child_words(file, extra=False)) for file in (right, wrong))
    assert plain.logits is not None
    assert other.logits is not None
    assert distance(plain.logits, other.logits) > 3 * LIMIT
    assert fault(plain, other).startswith("compute something else")


def test_whoever_runs_it_reads_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert selftest.main() == 0
    said = capfd.readouterr()
    assert said.out.startswith("==> The engine's kernels are tested: plain")
    assert said.out.count("\n") == 1
    assert said.err == ""


@pytest.mark.parametrize("number", ["SIGSEGV", "SIGILL", "SIGABRT"])
def test_a_child_that_dies_is_told_by_family_and_signal(number: str) -> None:
    dead = child(f"print('[\"AMX\"]', flush=True)\nos.kill(os.getpid(), signal.{number})")
    assert dead.families == ("AMX",)
    code, lines = lines_of([(Run((), logits()), dead), (Run((), logits()), Run(("repacked",), logits()))])
    assert code == 3
    assert lines[0] == "==> The engine's kernels are tested: plain, repacked agree"
    assert lines[1].startswith(f"The engine's AMX kernels end by {number}. Headrace starts without them")
    assert len(lines) == 2


def test_an_assertion_s_words_are_told() -> None:
    dead = child("sys.stderr.write('x\\nggml.c:1: GGML_ASSERT(a == b) failed\\n')\nsys.stderr.flush()\nos.abort()")
    assert dead.failure == "end by SIGABRT (ggml.c:1: GGML_ASSERT(a == b) failed)"


def test_a_child_that_cannot_load_says_why() -> None:
    assert child("print('[]')\nsys.exit('no memory')").failure == "end with status 1: no memory"
    assert child("").failure == "end with status 0: no logits"


def test_numbers_that_are_none_are_a_fault() -> None:
    bad = logits()
    bad[3, 4] = np.nan
    assert "compute something else" in fault(Run((), logits()), Run(("AMX",), bad))
    assert lines_of([(Run((), bad), Run((), bad))]) == (2, ["The engine's plain kernels give no numbers."])


def test_wrong_numbers_ask_for_a_setting_since_a_start_would_not_see_them() -> None:
    code, (_, line) = lines_of([(Run((), logits(1)), Run(("AMX",), logits(2)))])
    assert code == 3
    assert "engine.extra_buffers=false" in line


def test_a_family_that_fails_with_one_file_does_not_count_as_tested() -> None:
    pairs = [(Run((), logits(1)), Run(("repacked",), logits(seed))) for seed in (1, 2)]
    code, lines = lines_of(pairs)
    assert code == 3
    assert lines[0] == "==> The engine's kernels are tested: plain"


def test_without_the_plain_kernels_nothing_is_of_use() -> None:
    code, lines = lines_of([(child("os.kill(os.getpid(), signal.SIGILL)"), Run((), logits()))])
    assert (code, lines) == (2, ["The engine's plain kernels end by SIGILL."])
