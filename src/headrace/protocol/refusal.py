"""What another server's answer with an error status means for whoever asked us.

400 413 422, 404 for a field   the request is wrong: its words go to the client, no other engine is tried; but another
                               one may have room for a prompt that is too long for this one
408 429 503 529                it has no room: another engine is tried, `Retry-After` is handed on
the rest                       it failed: a wrong key of ours, a model it has not got, a fault of its own
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import ContextExceeded, HeadraceError, Overloaded, UpstreamFailed, UpstreamRefused

MAX_MESSAGE = 500
"""Characters of its message that are handed on."""
LONGEST_WAIT_S = 3600
BUSY = frozenset((408, 429, 503, 529))
REFUSED = frozenset((400, 404, 413, 422))


def refusal(status: int, retry_after: str, body: bytes) -> HeadraceError:
    """`status` is not 200; `retry_after`: the header's value, "" if there is none."""
    message, param, code = _words(body)
    if status in BUSY:
        return Overloaded(f"the engine has no room now (it answered {status})", retry_after=_seconds(retry_after))
    if status in (401, 403):
        return UpstreamFailed(f"the engine does not accept our key (it answered {status})")
    if status in REFUSED and code == ContextExceeded.code:
        return ContextExceeded(message or "the prompt is too long for the engine", param=param)
    ours = code == "model_not_found" or param == "model" or (status == 404 and param is None)
    if status in REFUSED and not ours:
        return UpstreamRefused(message or f"the engine answered {status}", status=status, param=param, code=code)
    return UpstreamFailed(f"the engine answered {status}")


def _words(body: bytes) -> tuple[str, str | None, str | None]:
    """Message, param and code, as far as the body has them."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", None, None
    if isinstance(value, dict) and isinstance(value.get("error"), dict | str):
        value = value["error"]
    if isinstance(value, str):
        return _line(value), None, None
    if not isinstance(value, dict):
        return "", None, None
    message = value.get("message", value.get("detail"))
    param, code = value.get("param"), value.get("code")
    return (
        _line(message) if isinstance(message, str) else "",
        _line(param)[:100] if isinstance(param, str) and param else None,
        _line(code)[:100] if isinstance(code, str) and code else None,
    )


def _line(text: str) -> str:
    """On one line, and not too long."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


def _seconds(header: str) -> int | None:
    """A date instead of seconds would need a clock: the usual wait does."""
    header = header.strip()
    if not header.isascii() or not header.isdigit() or len(header) > 9:
        return None
    return min(LONGEST_WAIT_S, max(1, int(header)))
