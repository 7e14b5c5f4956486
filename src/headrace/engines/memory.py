"""The memory that an engine over llama.cpp takes, before it is taken: by the head of the model's file alone.

    weights    every tensor once; laid out anew for the CPU it is a copy, and the file's own pages can go
    KV         cells × layers × KV heads × (key + value) × bytes of a number; for recurrent layers a state a sequence
    a step     the larger of: mask, scores and activations of one layer for a whole batch; the logits it may give
    program    Python, the libraries, small buffers

Rules: reading /proc and /sys apart this module is pure; what a file says of itself is bounded before it is multiplied.
Compared with what llama.cpp reports, the sum was 0 to 8 % above for two models with and without flash attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headrace.core.errors import StartupError
from headrace.core.file_name import shown
from headrace.engines.gguf import Head, read_parts

PROGRAM = 80 << 20
GRAIN = 256
"""Cells: llama.cpp rounds up to a multiple."""

_KV_BYTES = {"f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
_LAID_OUT_ANEW = {2, 3, 8, 10, 12, 13, 14, 20, 23, 39}
"""Types of tensors of which there are kernels for such a copy, on some CPU."""
_MOST = 1 << 24
"""No number in a head that is multiplied here is believed beyond this."""


@dataclass(frozen=True, slots=True)
class Wants:
    """What is to be made of a file. Tokens, sequences."""

    cells: int
    batch: int
    slots: int
    drafts: int
    kv_type: str
    flash_attention: bool
    extra_buffers: bool


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes."""

    weights: int
    kv: int
    step: int
    per_cell: float
    """Of `kv` and `step`, what one cell more takes."""
    program: int = PROGRAM

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.step + self.program


def estimate(parts: tuple[Head, ...], wants: Wants) -> Need:
    """What a start with these settings takes."""
    head = parts[0]
    arch = head.text("general.architecture")

    def one(key: str, default: int = 0) -> int:
        return _bounded(head.number(f"{arch}.{key}", default))

    def each(key: str, default: int) -> list[int]:
        value = head.metadata.get(f"{arch}.{key}", default)
        if isinstance(value, tuple):
            return [_bounded(n) for n in value[:layers]] or [0]
        return [_bounded(value)] * layers

    layers, embedding = min(one("block_count", 1), 4096), one("embedding_length")
    heads = max(each("attention.head_count", 0), default=0)
    width = embedding // heads if heads else 0
    key, value = one("attention.key_length", width), one("attention.value_length", width)
    cells = -(-wants.cells // GRAIN) * GRAIN
    kv_cell = sum(each("attention.head_count_kv", heads)) * (key + value) * _KV_BYTES.get(wants.kv_type, 2.0)
    sequences = wants.slots + 1
    state = one("ssm.inner_size") * (one("ssm.state_size") + max(0, one("ssm.conv_kernel") - 1))
    recurrent = 4 * layers * sequences * state
    # The mask is made as 32-bit numbers, and for flash attention as 16-bit ones; sliding windows have their own.
    masks = 2 if one("attention.sliding_window") else 1
    per_cell = wants.batch * (masks * 2 if wants.flash_attention else masks * 4 + 4 * heads)
    experts = one("expert_used_count") * one("expert_feed_forward_length")
    forward = max([experts, *each("feed_forward_length", 0)])
    layer = cells * per_cell + wants.batch * 4 * (2 * forward + 4 * embedding)
    vocabulary = _vocabulary(head)
    outputs = sequences + wants.drafts
    step = max(layer, 4 * outputs * vocabulary) + 4 * outputs * vocabulary
    weights = sum(tensor.size or 0 for part in parts for tensor in part.tensors)
    if wants.extra_buffers:
        weights += _second_embedding(parts)
    return Need(weights, int(cells * kv_cell) + recurrent, step, kv_cell + per_cell)


def _bounded(value: object) -> int:
    return min(max(0, int(value)), _MOST) if isinstance(value, int | float) and value == value else 0


def _vocabulary(head: Head) -> int:
    for tensor in head.tensors:
        if tensor.name in ("output.weight", "token_embd.weight") and len(tensor.shape) == 2:
            return _bounded(tensor.shape[1])
    return 0


def _second_embedding(parts: tuple[Head, ...]) -> int:
    """A model without an output matrix of its own uses that of the embedding, of which there are two copies then."""
    tensors = {tensor.name: tensor for part in parts for tensor in part.tensors}
    embedding = tensors.get("token_embd.weight")
    if "output.weight" in tensors or embedding is None or embedding.type not in _LAID_OUT_ANEW:
        return 0
    return embedding.size or 0


def refusal(need: Need, available: int, wants: Wants) -> str:
    """Why this is not to be started, and what would do; "" if it fits."""
    if need.total <= available:
        return ""
    fixed = need.total - need.per_cell * (-(-wants.cells // GRAIN) * GRAIN)
    cells = int(max(0.0, available - fixed) / need.per_cell) // GRAIN * GRAIN if need.per_cell else 0
    if cells >= GRAIN:
        remedy = f"engine.cells={cells} would fit"
        if wants.kv_type == "f16" and wants.flash_attention:
            remedy += ", and more with engine.kv_type=q8_0"
    else:
        remedy = "it does not fit with any number of engine.cells: choose a smaller file, or one of fewer bits"
    return (
        f"needs {_gb(need.total)} of memory (weights {_gb(need.weights)}, {wants.cells} KV cells {_gb(need.kv)}, "
        f"a step {_gb(need.step)}) and {_gb(available)} are free: {remedy}; or free memory, or start it all the same "
        "with --anyway (engine.check_memory=false)"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def check_memory(path: Path, wants: Wants) -> None:
    """Raises StartupError with the numbers if there is not enough; nothing where that cannot be told."""
    available = free_memory()
    if available is not None and (why := refusal(estimate(read_parts(path), wants), available, wants)):
        raise StartupError(f"{shown(path.name)} {why}")


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be had without swapping, by the machine and by the control groups that this process is in; None
    where that cannot be told."""
    limits = [*_of_machine(proc), *_of_groups(proc, cgroups)]
    return min(limits) if limits else None


def _of_machine(proc: Path) -> Iterator[int]:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root = cgroups if not controllers else cgroups / "memory"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        inside = PurePosixPath(name.lstrip("/"))
        for group in (inside, *inside.parents):
            yield from _of_group(root / group, *names)


def _of_group(folder: Path, limit: str, used: str) -> Iterator[int]:
    most, taken = _text(folder / limit).strip(), _text(folder / used).strip()
    if most.isdecimal() and taken.isdecimal() and int(most) < 1 << 60:
        stats = dict(row.split(maxsplit=1) for row in _text(folder / "memory.stat").splitlines() if " " in row)
        # Cached files count as used and go when memory is wanted.
        yield max(0, int(most) - int(taken) + int(stats.get("inactive_file", 0)) + int(stats.get("active_file", 0)))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
