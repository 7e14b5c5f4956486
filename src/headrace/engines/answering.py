"""The answer of another server to one request, from its first byte to its last event.

    head ─┬─ 200 ─▶ Admitted ─▶ reads ─▶ Relay ─┬─▶ Relayed*                    its bytes go on
          │                                     └─▶ Delta*, Finished            it continues what another one began
          └─ else ─▶ what it means ─▶ Broken

Rules: one read of the socket is one event. When the stream says that it is over the answer is over; the connection has
a moment to come to its end, then it is cut. If it does not say so although all that matters is there, that is waited
for shortly. After the last event nothing is told, whatever still comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, UpstreamFailed
from headrace.core.events import Admitted, Answered, Broken, Delta, Finished, FinishReason, Marks, Relayed, Tokens
from headrace.core.firsttext import FirstText
from headrace.core.request import Call, Told
from headrace.engines.connections import Transfer
from headrace.engines.http1 import Head, WireFault
from headrace.protocol.refusal import refusal
from headrace.protocol.relay import Portion, Relay, relay_whole

CLOSE_S = 3.0
"""For the usage and the last word, once every choice has its end."""
LINGER_S = 1.0
"""For the end of a response whose stream is over."""
MAX_WHOLE = 64 * 2**20
"""Bytes of an answer that is no stream."""
MAX_ERROR = 64 * 1024
"""Bytes of an answer with an error status that are read."""

Sink = Callable[[Answered], None]


@dataclass(frozen=True, slots=True)
class Sending(Call):
    """A call as it goes out. `told` of its request set: the answer is a continuation."""

    path: str = ""
    body: bytes = b""


class Ledger:
    """What is known of one server: the answers that run, what they cost, how soon it speaks."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.answers: dict[int, Answering] = {}
        self.pending = 0
        """Bytes of requests whose first text is not there yet."""
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self._first_text = FirstText()

    def book(self, usage: Tokens) -> None:
        self.prompt_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.completion_tokens += usage.completion

    def observe(self, size: float, seconds: float) -> None:
        """The first text came after `seconds`, with `size` bytes to compute for it."""
        self._first_text.observe(size, seconds)

    def predict(self, size: float) -> float:
        """Seconds to the first text of a prompt of `size` bytes that are not cached; 0: not known."""
        return self._first_text.predict(size + self.pending)


class Answering:
    """Reads the answer to one sending."""

    def __init__(self, ledger: Ledger, sending: Sending, sink: Sink) -> None:
        self.rid = sending.rid
        self.transfer: Transfer | None = None
        self.heard = ledger.clock()
        self.paused = False
        self._ledger = ledger
        self._ask = ask = sending.ask
        self._sink = sink
        self._begun = self.heard
        self._relay: Relay | None = None
        self._whole: list[bytes] = []
        self._size = 0
        self._head: Head | None = None
        self._over = False
        self._closing: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._ended = False
        """The response is complete, or its connection is."""
        self._text = False
        self._drawn = 0
        self._reason = "stop"
        self._usage: Tokens | None = None
        self._first: float | None = None
        self._n = sending.n
        self._load = ledger.pending + ask.size
        # When a whole answer began nobody hears: it would count until its end.
        self._waiting = ask.options.stream
        if self._waiting:
            ledger.pending += ask.size

    # Reader ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def head(self, head: Head) -> None:
        self._head = head
        self.heard = self._ledger.clock()
        encoding = head.value("content-encoding")
        if head.status == 200 and encoding not in ("", "identity"):  # of an error its status says enough
            self.break_off(UpstreamFailed(f"the engine's answer is encoded ({encoding[:40]}), which nobody asked for"))
            return
        if head.status != 200:
            return
        options = self._ask.options
        # Text that announces itself as JSON is an error, or a server that cannot stream.
        if options.stream and not head.value("content-type").lower().startswith("application/json"):
            self._relay = Relay(model=self._ask.model, usage=options.include_usage, n=self._n)
        self._sink(Admitted(self.rid, 0, 0))

    def body(self, data: bytes) -> None:
        if self._over:
            return
        self.heard = self._ledger.clock()
        if self._relay is not None:
            self._tell(self._relay.feed(data))
            if self._relay.finished and self._closing is None and not self._over:
                self._closing = asyncio.get_running_loop().call_later(CLOSE_S, self._close)
            return
        assert self._head is not None
        good = self._head.status == 200
        self._size += len(data)
        if self._size <= (MAX_WHOLE if good else MAX_ERROR):
            self._whole.append(data)
        elif good:
            self.break_off(UpstreamFailed(f"the engine's answer is over {MAX_WHOLE} bytes"))
        else:
            self._refused()

    def end(self, fault: WireFault | None) -> None:
        self._ended = True
        if self._linger is not None:
            self._linger.cancel()
        if self._over:
            return
        if self._relay is not None:
            self._tell(self._relay.end())
        elif self._head is not None and self._head.status != 200:
            self._refused()
        elif fault is not None:
            self.break_off(UpstreamFailed(f"the engine failed: {fault}"))
        elif self._ask.options.stream:
            self.break_off(UpstreamFailed("the engine's answer is no event stream"))
        else:
            self._tell(relay_whole(b"".join(self._whole), model=self._ask.model))

    # ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def give_up(self) -> None:
        """Tell nothing any more, and let the other server see that."""
        self._finish()
        if self._linger is not None:
            self._linger.cancel()
        if self.transfer is not None:
            self.transfer.cancel()

    def break_off(self, error: HeadraceError) -> None:
        """It failed; but a stream that has all its finish reasons is over."""
        if self._over:
            return
        if self._relay is not None and self._relay.finished:
            self._tell(self._relay.end())
            self._cut()
        else:
            self.give_up()
            self._sink(Broken(self.rid, error))

    def _refused(self) -> None:
        assert self._head is not None
        error = refusal(self._head.status, self._head.value("retry-after"), b"".join(self._whole))
        self._last()
        self._sink(Broken(self.rid, error))

    def _tell(self, portion: Portion) -> None:
        """Events of what came."""
        marks = None
        told = self._ask.told
        if told is not None and portion.content is None:
            portion = Portion(error=UpstreamFailed("the engine continues the answer with something other than text"))
        if portion.text and not self._text:
            self._text = True
            marks = self._mark()
        self._drawn += portion.tokens
        if portion.usage is not None:
            self._usage = portion.usage
        if portion.reason is not None:
            self._reason = portion.reason
        if portion.error is not None:
            self.give_up()
        elif portion.over:
            self._last()
        if told is not None:
            self._continue(portion, marks, told)
        elif not portion.empty or portion.identity is not None:
            self._sink(
                Relayed(
                    self.rid,
                    portion.raw,
                    portion.text,
                    portion.content,
                    portion.tokens,
                    portion.over,
                    portion.identity,
                    portion.usage,
                    marks,
                )
            )
        if portion.error is not None:
            self._sink(Broken(self.rid, portion.error))

    def _continue(self, portion: Portion, marks: Marks | None, told: Told) -> None:
        """The events of an engine of ours, which an answer that was begun goes on with."""
        if portion.content:
            self._sink(Delta(self.rid, 0, portion.content, portion.tokens, marks=marks))
        if portion.over:
            drawn = self._drawn if self._usage is None else self._usage.completion
            reason: FinishReason = "length" if self._reason == "length" else "stop"
            prompt = 0 if self._usage is None else max(0, self._usage.prompt - told.tokens)
            self._sink(Finished(self.rid, 0, reason, told.tokens + drawn, prompt))

    def _mark(self) -> Marks:
        """The first text is here."""
        now = self._ledger.clock()
        sent = self.transfer.sent if self.transfer is not None else None
        sent = now if sent is None else sent
        self._first = now - self._begun
        self._settle()
        return Marks(sent, sent, sent, now, now)

    def _settle(self) -> None:
        if self._waiting:
            self._waiting = False
            self._ledger.pending -= self._ask.size

    def _last(self) -> None:
        """The next event is the last one; the connection may come to its end by itself."""
        self._finish()
        if not self._ended:
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._cut)

    def _close(self) -> None:
        """The stream's last word does not come."""
        assert self._relay is not None
        if self.paused:  # it may be there, unread
            self._closing = asyncio.get_running_loop().call_later(CLOSE_S, self._close)
            return
        self._tell(self._relay.end())
        self.give_up()

    def _cut(self) -> None:
        if self.transfer is not None:
            self.transfer.cancel()

    def _finish(self) -> None:
        if self._over:
            return
        self._over = True
        if self._closing is not None:
            self._closing.cancel()
        self._settle()
        self._ledger.answers.pop(self.rid, None)
        usage = self._usage
        if usage is not None:
            self._ledger.book(usage)
        if self._first is not None and self._ask.options.stream:
            share = usage.cached / usage.prompt if usage is not None and usage.prompt else 0.0
            load = self._load - self._ask.size * min(1.0, share)
            self._ledger.observe(load, self._first)
