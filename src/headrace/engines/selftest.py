"""Every kernel family of the engine computes the same: told after the build, before a user finds out.

    python -m headrace.engines.selftest      0 all agree, 3 one is of no use, 2 the plain one is not

    blocks.gguf  (formats that AMX takes first) ─┬─ child: plain ──────► logits ─┐
                                                 └─ child: extra buffers ► logits ┴─ the same, but for rounding?
    other.gguf   (one that AMX leaves alone)    ─┴─ …                                  likewise

llama.cpp has one switch for all the kernels that lay weights out anew (`use_extra_bufts`) and takes the first that
knows a format, so which family computed is read from what the library says of its buffers, and a file of a format that
only repacked kernels know tells these two apart on a CPU that has both.

Rules: a child process computes, because a wrong kernel may end it; 64 rows at once and then one, since these are other
kernels; on two threads, because AMX is set up thread by thread.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.engines.random_model import EMBEDDING, write_model

ROWS = 64
FILES = {"blocks": ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"), "other": ("IQ4_NL", "IQ4_NL")}
LIMIT = 0.1
"""Root mean square of the difference, in standard deviations of the logits. Seen: repacked kernels (AVX-512) are up to
0.025 away from the plain ones over six layers, since a sum in another order rounds to another eighth bit in the next
layer's input. One matrix of one layer that was read a row off made 0.05 to 1.4: of fifteen, two were below this limit.
How far AMX is from the plain kernels has not been seen."""
TIMEOUT_S = 120.0
_NAMES = {"AMX": "AMX", "CPU_REPACK": "repacked", "CPU_KLEIDIAI": "KleidiAI"}
_BUFFER = re.compile(r"(\S+) model buffer size")

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Run:
    """One child: the families whose kernels its weights were laid out for, and what it computed or how it ended."""

    families: tuple[str, ...]
    logits: Floats | None = None
    """(ROWS + 1, vocabulary)."""
    failure: str = ""


def child_words(file: Path, extra: bool) -> list[str]:
    """The command line of the child that computes."""
    return [sys.executable, "-m", "headrace.engines.selftest", str(file), "extra" if extra else "plain"]


def run(words: Sequence[str]) -> Run:
    """Have a child compute: a line of JSON with its families, then float32. What goes wrong there is in the result."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Run((), failure=f"take longer than {TIMEOUT_S:.0f} s")
    head, _, data = done.stdout.partition(b"\n")
    try:
        families = msgspec.json.decode(head, type=tuple[str, ...])
    except msgspec.DecodeError:
        families = ()
    if done.returncode < 0:
        return Run(families, failure=f"end by {_signal(-done.returncode)}{_assertion(done.stderr)}")
    if done.returncode or len(data) != (ROWS + 1) * EMBEDDING * 4:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return Run(families, failure=f"end with status {done.returncode}: {lines[-1] if lines else 'no logits'}")
    return Run(families, np.frombuffer(data, dtype=np.float32).reshape(ROWS + 1, EMBEDDING))


def _signal(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _assertion(said: bytes) -> str:
    """The library's own reason for an abort."""
    lines = said.decode("utf-8", "replace").splitlines()
    return next((f" ({line.strip()[:200]})" for line in lines if "GGML_ASSERT" in line), "")


def distance(one: Floats, other: Floats) -> float:
    """Root mean square of the difference, in standard deviations of `one`; not a number if a logit is none."""
    return float(np.sqrt(np.mean((one - other) ** 2)) / np.std(one))


def fault(plain: Run, other: Run) -> str:
    """What is wrong with `other`, `plain` being right; "" if it agrees."""
    if other.logits is None or plain.logits is None:
        return other.failure
    apart = distance(plain.logits, other.logits)
    if apart <= LIMIT:  # not so for NaN
        return ""
    return f"compute something else: {apart:.2g} of the logits' spread away from the plain ones, {LIMIT} is the limit"


def lines_of(pairs: Sequence[tuple[Run, Run]]) -> tuple[int, list[str]]:
    """(exit status, lines for people). `pairs`: for each file the plain kernels' run and the others'."""
    for plain, _ in pairs:
        if plain.logits is None or not np.isfinite(plain.logits).all():
            return 2, [f"The engine's plain kernels {plain.failure or 'give no numbers'}."]
    wrong: dict[str, str] = {}
    right: list[str] = []
    for plain, other in pairs:
        said = fault(plain, other)
        for family in other.families or (("extra",) if said else ()):
            if said:
                wrong.setdefault(family, said)
            elif family not in right:
                right.append(family)
    agree = [family for family in right if family not in wrong]
    kernels = f"{', '.join(['plain', *agree])}{' agree' if agree else ''}"
    lines = [f"==> The engine's kernels are tested: {kernels}"]
    lines += [f"The engine's {family} kernels {said}. {_remedy(said)}" for family, said in wrong.items()]
    return (3 if wrong else 0), lines


def _remedy(said: str) -> str:
    """A start that dies goes on without them by itself; numbers that are wrong would not be seen."""
    if said.startswith("compute"):
        return "Serve with --set engine.extra_buffers=false: docs/guides/installing.md."
    return "Headrace starts without them, slower: docs/guides/installing.md says what helps."


def main() -> int:
    """Test all families; the exit status."""
    with tempfile.TemporaryDirectory(prefix="headrace-selftest-") as folder:
        code, lines = lines_of(list(_pairs(Path(folder))))
    first, *others = lines
    (sys.stderr if code == 2 else sys.stdout).write(f"{first}\n")
    sys.stderr.writelines(f"{line}\n" for line in others)
    return code


def _pairs(folder: Path) -> Iterator[tuple[Run, Run]]:
    for name, formats in FILES.items():
        file = folder / f"{name}.gguf"
        write_model(file, formats)
        yield run(child_words(file, extra=False)), run(child_words(file, extra=True))


def compute(file: Path, extra: bool) -> Iterator[bytes]:
    """In the child: what `run` reads. Raises StartupError for a file or a build that cannot be loaded."""
    from headrace.core.errors import StartupError
    from headrace.engines.llama_lib import C, load_model, recent_log

    families: list[str] = []

    @C.llama_log_callback  # type: ignore[untyped-decorator]
    def on_log(_level: int, text: bytes, _data: Any) -> None:
        found = _BUFFER.findall(text.decode("utf-8", "replace"))
        families.extend(_NAMES.get(name, name) for name in found if name in _NAMES or not name.startswith("CPU"))

    C.llama_log_set(on_log, None)
    model = load_model(file, vocab_only=False, extra_buffers=extra)
    if not model:
        raise StartupError(f"cannot load {file.name}: {recent_log()}")
    yield msgspec.json.encode(families) + b"\n"
    params = C.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 2 * ROWS
    params.n_outputs_max = ROWS
    params.n_threads = params.n_threads_batch = 2
    params.offload_kqv = params.op_offload = False
    context = C.llama_init_from_model(model, params)
    if not context:
        raise StartupError(f"cannot make a context: {recent_log()}")
    batch = C.llama_batch_init(ROWS, 0, 1)
    for start, count in ((0, ROWS), (ROWS, 1)):
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i] = 7919 * (start + i) % EMBEDDING, start + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        if code := C.llama_decode(context, batch):
            raise StartupError(f"llama_decode of {count} tokens gave {code}: {recent_log()}")
        yield np.ctypeslib.as_array(C.llama_get_logits(context), shape=(count, EMBEDDING)).tobytes()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    for part in compute(Path(sys.argv[1]), sys.argv[2] == "extra"):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
