"""The C API of llama.cpp as llama-cpp-python binds it, and nothing else.

Every struct and signature comes from the pinned package: layouts change between releases and a re-declared one
corrupts memory in silence. Other modules use `C` and the few wrappers below.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C

__all__ = ["ABORT_CALLBACK", "C", "load_model", "logits_address", "model_meta", "recent_log"]

_LOG_ERROR = 4
_log: deque[str] = deque(maxlen=8)


@C.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _data: Any) -> None:
    if level == _LOG_ERROR:
        _log.append(" ".join(text.decode("utf-8", "replace").split()))  # some of its messages have several lines


# The library logs to stderr by itself; a server must not. Its errors are kept for the one line that a user sees.
C.llama_log_set(_on_log, ctypes.c_void_p(0))
C.llama_backend_init()

# The abort callback is asked after every node of the graph. A Python function there would take the GIL a thousand
# times a step, so the C library's own strlen is the flag reader: of b"\0" it is 0, "go on"; of b"\1\0" it is 1,
# "abort". bool(void *) and size_t(const char *) agree in every C ABI that llama.cpp runs on.
ABORT_CALLBACK = ctypes.cast(ctypes.CDLL(None).strlen, C.ggml_abort_callback)


# The same function as C.llama_get_logits, but with the address as a plain number instead of a pointer object to be
# made and read: 0.02 ms instead of 0.04 ms between two steps.
logits_address = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", C._lib))


def recent_log() -> str:
    """The library's last error lines, joined; "" if there were none."""
    return "; ".join(line for line in _log if line)


def load_model(path: Path, *, vocab_only: bool, extra_buffers: bool = True) -> Any:
    """A `llama_model *`, or None; `recent_log` says why. `extra_buffers`: weights may be laid out anew for this CPU."""
    params = C.llama_model_default_params()
    params.vocab_only = vocab_only
    params.use_extra_bufts = extra_buffers
    _log.clear()
    return C.llama_model_load_from_file(os.fsencode(path), params)


def model_meta(model: Any, key: str) -> str | None:
    """A metadata value of the model file as text."""
    size = C.llama_model_meta_val_str(model, key.encode(), None, 0)
    if size < 0:
        return None
    buffer = ctypes.create_string_buffer(size + 1)
    C.llama_model_meta_val_str(model, key.encode(), buffer, size + 1)
    return buffer.value.decode("utf-8", "replace")
