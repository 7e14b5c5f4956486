"""`models`: GGUF files side by side, so that one can be chosen: speed, size and quality on the same line.

    round 1   A: child process, then server     B: the same     C: the same
    round 2   B                                 C               A

Rules: models take turns, and the order turns by one a round; each server starts with an empty disk tier; each prompt is
new text; a file that cannot be read, or that memory does not hold, is one line, and the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from headrace_bench import gguf, selection
from headrace_bench.busy import rotate
from headrace_bench.fault import Fault, Misuse
from headrace_bench.lab import Lab, words
from headrace_bench.report import table as tables
from headrace_bench.report.folder import claim
from headrace_bench.report.machine import machine, versions
from headrace_bench.report.table import Table, scrubbed, shown
from headrace_bench.selection import PROMPTS, Facts, Fit, Measured, fit
from headrace_bench.server import NotReady, Server
from headrace_bench.verbs import flags
from headrace_bench.wire import Answer, Refused, chat

REPEATS = {64: 3, 512: 2, 2048: 2}
"""Prompts of each length in a round: three rounds give six of the longest, the fewest for a median's interval."""
ANSWERS, TOKENS = 3, 96
"""Answers in a round whose TPOT is taken, and their longest."""
PREFILLS = 3
CHILD_S = 1800.0


def add(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("models", nargs="+", type=Path, metavar="GGUF")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--serve-args", default="", help="more flags for `headrace serve`, in one argument")
    parser.add_argument("--seed", type=int, default=1)
    flags.add_out(parser)


def run(asked: argparse.Namespace) -> int:
    """Prints the table, and leaves it in the folder; 1 if a model could not be measured. Raises Fault."""
    if asked.rounds < 1:
        raise Misuse(f"--rounds {asked.rounds}: at least 1")
    labels = names(asked.models)
    wall = datetime.now(UTC).isoformat(timespec="seconds")
    folder = flags.out_of(asked)
    claim(folder)
    found = {label: Measured(label) for label in labels}
    left = dict(labels)
    for turn in range(asked.rounds):
        for label in rotate(list(left), turn) if left else []:
            try:
                _turn(asked, left[label], found[label], folder, turn)
            except Fault as error:
                found[label].notes.append(scrubbed(f"round {turn + 1}: {error}" if turn else error, 300))
                _say(f"{left[label]}: {error}")
                del left[label]
        _write(asked, list(found.values()), folder, wall)
    print(tables.markdown(tables.read(folder)))
    _say(f"in {folder}")
    if not any(model.facts for model in found.values()):
        raise Fault("none of the files could be measured")
    return 1 if len(left) < len(found) else 0


def names(files: Sequence[Path]) -> dict[str, Path]:
    """A short name → each file. Raises Misuse: the same file twice."""
    found: dict[str, Path] = {}
    for file in files:
        label = file.stem if file.stem not in found else f"{file.resolve().parent.name}/{file.stem}"
        if label in found or file in found.values():
            raise Misuse(f"{file}: named twice")
        found[label] = file
    return found


def _turn(asked: argparse.Namespace, file: Path, model: Measured, folder: Path, turn: int) -> None:
    """One model's part of a round. Raises Fault."""
    if not file.is_file():
        raise Fault("no such file")
    reason = selection.fits(file.stat().st_size, free_memory())
    if reason is not None:
        raise Fault(reason)
    facts = child(file, asked.threads, asked.seed + turn, perplexity=turn == 0)
    model.prefill += facts.prefill
    if turn == 0:
        model.facts = facts
    lab = Lab(file, folder, threads=asked.threads)
    rng = random.Random(f"{asked.seed} {turn}")
    try:
        with lab.headrace(*shlex.split(asked.serve_args), name=f"headrace-{file.stem}") as server:
            _ask(server, lab, model, facts.context, rng)
    except (NotReady, Refused, OSError, ValueError, LookupError, ArithmeticError) as error:
        # The last three: an answer of an odd model, without the figures that ours are made of.
        said = " ".join(str(error).replace(str(file), file.name).split())
        raise Fault(f"headrace serve: {said[-200:] or type(error).__name__}") from None
    _say(f"round {turn + 1}: {model.name}")


def free_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def child(file: Path, threads: int, seed: int, *, perplexity: bool) -> Facts:
    """What a process of its own says of the file: whatever that process dies of, this one does not. Raises Fault."""
    how = ["--threads", str(threads), "--seed", str(seed), "--prefill", str(PREFILLS)]
    command = [sys.executable, "-m", "headrace_bench.gguf", str(file), *how, *(["--perplexity"] * perplexity)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=CHILD_S)
    except subprocess.TimeoutExpired:
        raise Fault(f"not measured within {CHILD_S:.0f} s") from None
    try:
        found: Any = json.loads(done.stdout)
        if "error" in found:
            raise Fault(found["error"])
        return msgspec.convert(found, Facts)
    except (ValueError, msgspec.ValidationError):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        end = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise Fault(f"llama.cpp died of it ({end}): {(said or ['without a word'])[-1][:160]}") from None


def _ask(server: Server, lab: Lab, model: Measured, context: int, rng: random.Random) -> None:
    """TTFT at each length and TPOT of some answers. Raises what `chat` does."""
    lengths = Lengths(server, lab.model.stem, rng)
    for asked in [n for n in PROMPTS for _ in range(REPEATS[n])]:
        if asked + 8 > context:
            note = f"no TTFT at {asked:,}: its context has {context:,} tokens"
        else:
            answer = lengths.prompt(asked)
            if answer.stamps and model.took(asked, answer.prompt_tokens, answer.stamps[0]):
                continue
            note = f"a prompt of {answer.prompt_tokens} tokens instead of {asked}, or no answer, was left out"
        if note not in model.notes:
            model.notes.append(note)
    for _ in range(ANSWERS):
        answer = lengths.answer()
        if answer.tokens is not None and answer.tokens > 1 and answer.stamps and answer.stamps[-1] > answer.stamps[0]:
            model.tpot.append(1 / answer.rate)


class Lengths:
    """Prompts of a length in tokens, made of words: two that warm the server up say how many words that takes.

    A prompt begins with a system message of its own, or the cache would give what the template puts there by itself;
    a template that takes none goes without.
    """

    def __init__(self, server: Server, model: str, rng: random.Random) -> None:
        self._server, self._model, self._rng = server, model, rng
        self._system = True
        try:
            self._chat(words(rng, 8), 2)
        except Refused:
            self._system = False
        sizes = []
        for n in (16, 144):
            tokens = self._chat(words(rng, n), 2).prompt_tokens
            if tokens is None:
                raise Refused("the server counts no tokens: usage is missing")
            sizes.append((n, tokens))
        self._fit: Fit = fit(sizes[0], sizes[1])

    def prompt(self, tokens: int) -> Answer:
        """A prompt of so many tokens, and the start of its answer."""
        return self._chat(words(self._rng, self._fit.words(tokens)), 4)

    def answer(self) -> Answer:
        """A short prompt, and a long answer."""
        return self._chat(f"Write a long story about {words(self._rng, 12)}.", TOKENS)

    def _chat(self, text: str, max_tokens: int) -> Answer:
        system = [{"role": "system", "content": words(self._rng, 6)}] if self._system else []
        body = {
            "model": self._model,
            "messages": [*system, {"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream_options": {"include_usage": True},
        }
        return asyncio.run(chat(self._server.url, body))


def _write(asked: argparse.Namespace, models: list[Measured], folder: Path, wall: str) -> None:
    """After every round, so that what was measured is kept."""
    known = versions()
    files = {**{str(file): file.name for file in asked.models}, str(folder): "DIR"}
    made = Table(
        verb="models",
        wall=wall,
        command=shown(asked.command, files),
        machine=machine(),
        versions={name: known[name] for name in ("headrace", "python") if name in known},
        columns=selection.COLUMNS,
        rows=tuple(selection.rows(models)),
        notes=tuple(selection.notes(models, gguf.WINDOW, gguf.STEP, gguf.START)),
        figures=selection.figures(models),
    )
    tables.write(folder, made)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
