"""KV of a range of a slot's positions, out of llama.cpp and back in.

    save:  slot ──seq_cp [start, end)──► scratch ──get_data──► bytes
    load:  bytes ──set_data──► scratch ──seq_cp [start, end)──► slot        then the scratch id lets go of the cells

Rules: llama.cpp writes and reads whole sequences only, hence the scratch id, one after the slots', which holds nothing
between calls; what comes in is checked here first, cell by cell, since the library believes it; a load that fails
leaves the slot as it was.

Measured with the demo model (F16, flash attention), per 1,000 tokens (23 MB): 12 ms out, 2 to 3 ms in. Without flash
attention V lies transposed and is copied value by value.
"""

from __future__ import annotations

import ctypes
import mmap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from headrace.engines.base import StepFailed
from headrace.engines.llama_lib import C, recent_log
from headrace.kv import blob

_HEAD = np.dtype([("magic", "<u4"), ("seq", "<i4"), ("streams", "<u4"), ("cells", "<u4")])
"""How the state of a sequence begins, with one stream (state_seq_get_data in llama-context.cpp, state_write in
llama-kv-cache.cpp). One `_CELL` for each cell follows, then the tensors."""
_CELL = np.dtype([("pos", "<i4"), ("n", "<u4"), ("seq", "<i4")])
_BYTES = ctypes.POINTER(ctypes.c_uint8)
_PLAIN_ROPE = (-1, 0, 2)
"""llama_rope_type of none, normal and NeoX: one position a token."""


class Snapshots:
    """`save` and `load` for one context, on the engine thread. Nobody else uses the sequence id `scratch`.

    `sample` is a slot that holds two tokens or more now, to learn sizes from.
    """

    def __init__(self, model: Any, context: Any, *, scratch: int, sample: int) -> None:
        self._context = context
        self._memory = C.llama_get_memory(context)
        self._scratch = scratch
        self._buffer = ctypes.create_string_buffer(0)
        self._fixed = 0
        self._magic = 0
        self._finite: list[tuple[int, bytes]] = []
        """(tokens, a payload) of what the engine computed first: to write over what must not be read."""
        self.bytes_per_token = 0
        """Bytes of a payload per token, about; 0: this model's KV cannot be saved by ranges (recurrent layers, sliding
        windows, positions of several dimensions), and neither method may be called."""
        if not (
            C.llama_model_is_recurrent(model)
            or C.llama_model_is_hybrid(model)
            or C.llama_model_n_swa(model)
            or C.llama_model_rope_type(model) not in _PLAIN_ROPE
        ):
            one, two = (len(self._copy_out(sample, 0, n)) for n in (1, 2))
            self.bytes_per_token = two - one
            self._fixed = one - self.bytes_per_token
            self._magic = int(np.frombuffer(self._copy_out(sample, 0, 1), _HEAD, 1)["magic"][0])
            most = int(C.llama_memory_seq_pos_max(self._memory, sample)) + 1
            self._finite = [(n, self._copy_out(sample, 0, n)) for n in sorted({most, 1}, reverse=True)]

    def scrub(self, slot: int) -> None:
        """Write over all free cells, with what is known to be finite: attention reads them too. `slot` is empty."""
        at = 0
        for n, payload in self._finite:
            order = np.frombuffer(payload, _CELL, n, offset=_HEAD.itemsize)["pos"]
            while True:
                cells = np.frombuffer(payload, _CELL, n, offset=_HEAD.itemsize).copy()
                cells["pos"] = order + at
                moved = payload[: _HEAD.itemsize] + cells.tobytes() + payload[_HEAD.itemsize + cells.nbytes :]
                if not self.load(slot, at, at + n, moved):
                    break
                at += n
        C.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def save(self, slot: int, start: int, end: int) -> bytes:
        """The KV of positions [start, end), which the slot must hold. Raises StepFailed if it does not."""
        if not (self.bytes_per_token and 0 <= slot < self._scratch and self._holds(slot, start, end)):
            raise StepFailed(f"slot {slot} has no KV of [{start}, {end}) to save")
        payload = self._copy_out(slot, start, end)
        if len(payload) != self._size(end - start):
            raise StepFailed(f"KV of [{start}, {end}) is {len(payload)} bytes, not {self._size(end - start)}")
        return payload

    def load(self, slot: int, start: int, end: int, payload: bytes) -> list[int]:
        """Append positions [start, end) to a slot that holds [0, start).

        Returns the positions in the order in which they took cells, which is that of the cells they were saved from.
        Empty, with the slot as it was: the payload is not the KV of these positions, the slot does not end at `start`,
        or there are not enough free cells.
        """
        if not (self.bytes_per_token and 0 <= slot < self._scratch and 0 <= start < end):
            return []
        order = self._order(start, end, payload)
        if not order or int(C.llama_memory_seq_pos_max(self._memory, slot)) + 1 != start:
            return []
        source = ctypes.cast(ctypes.c_char_p(payload), _BYTES)
        read = C.llama_state_seq_set_data(self._context, source, len(payload), self._scratch)
        whole = read == len(payload) and self._holds(self._scratch, start, end)
        if whole:
            C.llama_memory_seq_cp(self._memory, self._scratch, slot, start, end)
        C.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)
        return order if whole else []

    def deepen(self, slot: int, length: int) -> int:
        """Append what a slot holds to itself until it has `length` positions more, or no room; how many it holds then.

        They are copies under other positions: what is computed after them takes as long as after others, and means
        nothing.
        """
        end = held = int(C.llama_memory_seq_pos_max(self._memory, slot)) + 1
        if not self.bytes_per_token or not held:
            return end
        payload = bytearray(self.save(slot, 0, held))
        cells = np.frombuffer(payload, _CELL, held, offset=_HEAD.itemsize)
        while end < held + length:
            cells["pos"] += held
            if not self.load(slot, end, end + held, bytes(payload)):
                break
            end += held
        return end

    def _copy_out(self, slot: int, start: int, end: int) -> bytes:
        C.llama_memory_seq_cp(self._memory, slot, self._scratch, start, end)
        try:
            size = int(C.llama_state_seq_get_size(self._context, self._scratch))
            if size > len(self._buffer):
                # One buffer for all: fresh memory costs a page fault every 4 KiB, in here and again in `string_at`.
                self._buffer = ctypes.create_string_buffer(size)
            target = ctypes.cast(self._buffer, _BYTES)
            written = int(C.llama_state_seq_get_data(self._context, target, size, self._scratch))
            if written != size:
                raise StepFailed(f"the KV of [{start}, {end}) could not be read: {recent_log()}")
            return ctypes.string_at(self._buffer, size)
        finally:
            C.llama_memory_seq_rm(self._memory, self._scratch, -1, -1)

    def _size(self, tokens: int) -> int:
        return self._fixed + tokens * self.bytes_per_token

    def _holds(self, slot: int, start: int, end: int) -> bool:
        low = int(C.llama_memory_seq_pos_min(self._memory, slot))
        high = int(C.llama_memory_seq_pos_max(self._memory, slot))
        return 0 <= low <= start < end <= high + 1

    def _order(self, start: int, end: int, payload: bytes) -> list[int]:
        """The positions in the payload; empty unless it is the state of exactly these, each once, in one sequence."""
        n = end - start
        if len(payload) != self._size(n):
            return []
        head = np.frombuffer(payload, _HEAD, 1)[0]
        if (head["magic"], head["streams"], head["cells"]) != (self._magic, 1, n):
            return []
        cells = np.frombuffer(payload, _CELL, n, offset=_HEAD.itemsize)
        if (cells["n"] != 1).any() or (np.sort(cells["pos"]) != np.arange(start, end)).any():
            return []
        positions: list[int] = cells["pos"].tolist()
        return positions


def fingerprint(model: Any, context: Any, path: Path, params: Any) -> bytes:
    """A name for everything that shapes the KV: weights, library, types, attention, rope, context size.

    `params`: the llama_context_params that `context` was made with. Reads the whole model file (60 ms per 100 MB when
    it is in the page cache): an in-place change of a few weights would otherwise give fluent nonsense.
    """
    return blob.fingerprint(
        file_digest(path),
        version("llama-cpp-python"),
        C.LLAMA_SESSION_VERSION,
        C.LLAMA_STATE_SEQ_VERSION,
        *(getattr(params, name) for name in _SHAPING),
        C.llama_n_ctx(context),
        C.llama_model_n_layer(model),
        C.llama_model_n_embd(model),
        C.llama_model_n_head_kv(model),
        C.llama_model_rope_type(model),
    )


_SHAPING = (
    "type_k",
    "type_v",
    "flash_attn_type",
    "kv_unified",
    "swa_full",
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
)


def file_digest(path: Path) -> str:
    """xxh3_128 of a file's bytes: not against forgery, but at the speed of memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return xxhash.xxh3_128_hexdigest(data)
