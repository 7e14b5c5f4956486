r"""Another server's event stream: what of its bytes may go on to our client, and what they mean.

    read ─▶ whole events ─▶ decoded ─┬─ nothing to change ──▶ the same bytes
            (any fragmentation)      ├─ the model's name ───▶ one replacement within them
                                     ├─ anything else ──────▶ encoded anew
                                     └─ usage nobody asked for, comments, ids, [DONE] ─▶ dropped

Rules: only whole events go on, in the one form that we write ourselves (`data: {json}\n\n`), so a stream that breaks
off never leaves half a one behind. An error is never passed on: it ends the relay. One read gives one portion. A stream
is over when it says so, or when each of its choices has its finish reason; any other end is a break. What goes wrong
after all finish reasons is no break any more: the client has the whole answer, and nothing may follow it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.core.errors import HeadraceError, UpstreamFailed
from headrace.core.events import Tokens
from headrace.protocol import sse
from headrace.protocol.chunk import (
    ROLE,
    UNREADABLE,
    Chunk,
    Delta,
    Splice,
    decode,
    given_up,
    leaves,
    read,
    tokens_of,
    without,
)

MAX_EVENT = 2**20
"""Bytes of one event."""
BOM = b"\xef\xbb\xbf"


class Portion(msgspec.Struct, frozen=True, gc=False):
    """What one read came to. The fields as in `core.events.Relayed`."""

    raw: bytes = b""
    text: str = ""
    content: str | None = ""
    tokens: int = 0
    over: bool = False
    identity: tuple[str, int] | None = None
    usage: Tokens | None = None
    reason: str | None = None
    """Choice 0's finish reason."""
    error: HeadraceError | None = None
    """The stream ended with it, after what stands in the other fields."""

    @property
    def empty(self) -> bool:
        """There is nothing to tell."""
        return not (self.raw or self.over or self.usage or self.error or self.content is None)


NOTHING = Portion()


class _Draft:
    """A portion in the making."""

    __slots__ = ("content", "error", "identity", "raw", "reason", "text", "tokens", "usage")

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.text: list[str] = []
        self.content: str | None = ""
        self.tokens = 0
        self.identity: tuple[str, int] | None = None
        self.usage: Tokens | None = None
        self.reason: str | None = None
        self.error: HeadraceError | None = None

    def portion(self, over: bool) -> Portion:
        raw, text = self.raw, self.text
        return Portion(
            raw[0] if len(raw) == 1 else b"".join(raw),
            text[0] if len(text) == 1 else "".join(text),
            self.content,
            self.tokens,
            over,
            self.identity,
            self.usage,
            self.reason,
            self.error,
        )


class Relay:
    """For one stream. `model`: the name that our client knows; `usage`: it asked for the usage; `n`: choices."""

    def __init__(self, *, model: str, usage: bool = False, n: int = 1) -> None:
        self.over = False
        """Nothing that still comes is of interest."""
        self.finished = False
        """Each choice has its end: only the usage and the last word are still to come."""
        self._usage = usage
        self._n = n
        self._splice = Splice(model)
        self._rest = bytearray()
        """The beginning of an event."""
        self._start: bytes | None = b""
        """The stream's first bytes while they may be a byte order mark."""
        self._after_cr = False
        self._begun = False
        self._roles: set[int] = set()
        self._ends: set[int] = set()
        """Choices with a finish reason."""
        self._told_usage = False
        self._owed: dict[str, Any] | None = None
        """A usage chunk that our client asked for and that the other server hung to another chunk."""
        self._draft = _Draft()

    def feed(self, data: bytes) -> Portion:
        """The next bytes."""
        if self.over:
            return NOTHING
        if self._start is not None or self._after_cr or b"\r" in data:
            data = self._normal(data)
        rest = self._rest
        if not rest and self._begun and data.find(b"\n") == len(data) - 2 and data.endswith(b"\n"):
            plain = self._plain(data)
            if plain is not None:
                return plain
        if rest or not data.endswith(b"\n\n"):
            start = max(0, len(rest) - 1)
            rest += data
            whole = rest.rfind(b"\n\n", start) + 2
            if whole < 2:
                return self._too_long() if len(rest) > MAX_EVENT else NOTHING
            data = bytes(rest[:whole])
            del rest[:whole]
            if len(rest) > MAX_EVENT:
                return self._too_long()
        start = 0
        while start < len(data) and not self.over:
            end = data.find(b"\n\n", start)
            if end < 0:
                break  # an empty line more
            # One event a read is the common case; it is not copied.
            event = data if not start and end + 2 == len(data) else data[start : end + 2]
            self._event(event)
            start = end + 2
        return self._take()

    def end(self) -> Portion:
        """There will be no further bytes, however the connection ended."""
        if self.over:
            return NOTHING
        self._fail("the engine's answer broke off before its end")
        return self._take()

    def _plain(self, event: bytes) -> Portion | None:
        """The common case without a detour: one event, which adds text to the one choice and nothing else. None: it is
        something else. Nothing is decided here that `_data` would decide in another way."""
        if not event.startswith(b"data: {") or not event.isascii():
            return None
        try:
            chunk = read(event[6:-2])
            content = chunk.plain
            if content is None:
                return None
            return Portion(self._splice(event, chunk.model), content, content, 1 if content else 0)
        except UNREADABLE:
            return None

    # Lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _normal(self, data: bytes) -> bytes:
        """`data` with LF for every line end, without a byte order mark at the stream's beginning."""
        if self._start is not None:
            data = self._start + data
            if len(data) < len(BOM) and BOM.startswith(data):
                self._start = data
                return b""
            self._start = None
            data = data.removeprefix(BOM)
        if data and self._after_cr:
            # A CR ended its line when it came; this may be the LF of the same line end.
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _event(self, event: bytes) -> None:
        """A block that ends with an empty line."""
        if event.startswith(b"data: {") and event.find(b"\n") == len(event) - 2:
            self._data(event, event[6:-2])
            return
        lines = []
        for line in event.split(b"\n"):
            name, _, value = line.partition(b":")
            # llama-server of some years wrote an error under a name of its own.
            if name in (b"data", b"error"):
                lines.append(value.removeprefix(b" "))
        data = b"\n".join(lines)
        if not data.strip():
            return
        if data.strip() == b"[DONE]":
            self._close()
        elif len(lines) > 1:
            self._data(None, data)
        else:
            self._data(sse.event(data), data)

    # Chunks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _data(self, event: bytes | None, data: bytes) -> None:
        """A chunk: its bytes as an event, if they may go on as they are, and its JSON."""
        try:
            chunk, general = decode(data)
            if not data.isascii():
                # Strings that we do not look at are not checked by anybody else.
                data.decode()
                event = None if event is None else sse.escaped(event)
        except ValueError:
            self._fail("the engine's answer is not the JSON that it should be")
            return
        if chunk.error is not None or chunk.object == "error":
            self._fail("the engine failed in the middle of its answer")
            return
        if given_up(chunk):
            self._fail("the engine gave up its answer")
            return
        drop: tuple[str, ...] = ()
        if chunk.usage is not None:
            tokens = tokens_of(chunk.usage)
            if tokens is not None:
                self._draft.usage = tokens
            if chunk.choices:
                drop = ("usage",)
            if tokens is None:
                pass  # whatever that is, it tells nobody anything
            elif chunk.choices:
                self._owe(chunk)
            elif self._usage and not self._told_usage:
                self._told_usage = True
                self._draft.raw.append(self._splice(event or sse.event(without(data, (), ())), chunk.model))
        if not chunk.choices:
            return  # clients look at the first choice of every chunk
        if not self._begun and chunk.id:
            self._begun = True
            self._draft.identity = (chunk.id, chunk.created if type(chunk.created) is int else 0)
        complete = self.finished
        roles = self._choices(chunk)
        if general is not None:
            self._draft.text.append(leaves(general))
            self._draft.content = None
        if roles and not drop and event is not None and event.count(ROLE) == 1:
            event, roles = event.replace(ROLE, b""), []
        try:
            if event is None or drop or roles:
                event = sse.event(without(data, drop, roles))
            self._draft.raw.append(self._splice(event, chunk.model))
        except UNREADABLE:
            # In a field that we passed over. Its text is accounted for and will not be written: nobody can go on.
            self._draft.content = None
            self._fail("the engine's answer is not the JSON that it should be", complete=complete)

    def _owe(self, chunk: Chunk) -> None:
        """The usage hangs to a chunk that is something else: its own chunk is ours to write."""
        if self._usage and not self._told_usage:
            self._owed = {"id": chunk.id, "object": chunk.object, "created": chunk.created, "model": chunk.model}
            self._owed |= {"choices": [], "usage": chunk.usage}

    def _choices(self, chunk: Chunk) -> list[int]:
        """Account for what a reader sees of it; the choices that say their role once more."""
        again: list[int] = []
        for choice in chunk.choices:
            index = choice.index
            text = content = choice.text or ""
            delta = choice.delta
            if delta is not None:
                text = content = delta.content or ""
                if delta.role is not None:
                    if index in self._roles:
                        again.append(index)
                    self._roles.add(index)
                if delta.special:
                    text += delta.more()
                    self._draft.content = None
            if text:
                self._draft.tokens += 1
                self._draft.text.append(text)
            if index != 0 or choice.logprobs:
                self._draft.content = None
            elif content and self._draft.content is not None:
                self._draft.content += content
            if choice.finish_reason:
                self._ends.add(index)
                self.finished = len(self._ends) >= self._n
                if index == 0:
                    self._draft.reason = choice.finish_reason
        return again

    def _take(self) -> Portion:
        draft, self._draft = self._draft, _Draft()
        return draft.portion(self.over and draft.error is None)

    def _close(self) -> None:
        """The stream is over, and went well."""
        self.over = True
        if self._owed is not None and not self._told_usage:
            self._draft.raw.append(self._splice(sse.event(sse.json_value(self._owed)), self._owed["model"]))

    def _fail(self, message: str, *, complete: bool | None = None) -> None:
        """`complete`: our client has all finish reasons; None: those that we know of."""
        if self.finished if complete is None else complete:
            self._close()
        else:
            self.over = True
            self._draft.error = UpstreamFailed(message)

    def _too_long(self) -> Portion:
        self._fail(f"an event of the engine's answer is over {MAX_EVENT} bytes")
        return self._take()


def relay_whole(body: bytes, *, model: str) -> Portion:
    """An answer that is no stream, in the same terms."""
    try:
        body.decode()
        chunk, general = decode(body)
    except ValueError:
        return Portion(error=UpstreamFailed("the engine's answer is not the JSON that it should be"))
    if chunk.error is not None or not chunk.choices:
        return Portion(error=UpstreamFailed("the engine answered with something that is no answer"))
    if given_up(chunk):
        return Portion(error=UpstreamFailed("the engine gave up its answer"))
    first = chunk.choices[0]
    texts = [(choice.text or "") + _message(choice.message) for choice in chunk.choices]
    return Portion(
        raw=Splice(model)(body, chunk.model),
        text="".join(texts) if general is None else leaves(general),
        content=None,
        over=True,
        identity=(chunk.id or "", chunk.created if type(chunk.created) is int else 0),
        usage=tokens_of(chunk.usage),
        reason=first.finish_reason,
    )


def _message(message: Delta | None) -> str:
    return "" if message is None else (message.content or "") + message.more()
