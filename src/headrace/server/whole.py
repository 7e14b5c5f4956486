"""A response that is written when it is complete: one JSON object of known length.

Nothing is sent before the end, so a failure at any time is an honest status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.clock import Clock
from headrace.core.events import Delta, Finished, FinishReason, Relayed, TokenLogprob
from headrace.protocol.answer import Answer, Choice, Usage
from headrace.protocol.sse import json_value
from headrace.server.attempts import Attempts
from headrace.server.exchange import Exchange
from headrace.server.live import Live


async def answer_whole(exchange: Exchange, live: Live, attempts: Attempts, clock: Clock) -> None:
    """Collect a response and answer with it. Raises ClientGone, and the failure if there is one."""
    while True:
        parts = _Parts()
        while live.remaining and live.failure is None and not live.gone:
            parts.take(live)
            if live.remaining and live.failure is None and not live.gone:
                await live.mailbox.wait()
        parts.take(live)
        live.check_gone()
        if live.failure is None:
            break
        # Nothing was sent: whoever takes over begins anew.
        if not await attempts.recover():
            live.check()
    if parts.text:
        live.timeline.delivered = clock()
    report = live.timeline.report() if attempts.ask.options.timings else None
    assert isinstance(attempts.answer, Answer)
    body = parts.body(attempts.answer, live.usage(), report)
    await exchange.answer(200, body, headers=((b"server-timing", live.timeline.server_timing().encode()),))


class _Parts:
    """What an engine has given so far."""

    def __init__(self) -> None:
        self.text = False
        """There is some."""
        self._relayed: list[bytes] | None = None
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._reasons: dict[int, FinishReason] = {}

    def take(self, live: Live) -> None:
        """All events that are there."""
        for event in live.mailbox.take():
            index = live.book(event)
            if index < 0:
                continue
            if isinstance(event, Relayed):
                self._relayed = [*(self._relayed or ()), event.raw]
                self.text = self.text or bool(event.text)
            elif isinstance(event, Delta):
                self._texts.setdefault(index, []).append(event.text)
                self._logprobs.setdefault(index, []).extend(event.logprobs)
                self.text = self.text or bool(event.text)
            elif isinstance(event, Finished):
                self._reasons[index] = event.reason
        live.mailbox.written()

    def body(self, answer: Answer, usage: Usage, report: Mapping[str, Any] | None) -> bytes:
        """The JSON of the whole answer: another server's as it is, but for what was asked of us."""
        if self._relayed is not None:
            raw = b"".join(self._relayed)
            if report is None:
                return raw
            return raw.rstrip()[:-1] + b',"headrace":' + json_value({"timeline": report}) + b"}"
        choices = [
            Choice(
                index=index,
                text="".join(self._texts.get(index, ())),
                reason=reason,
                logprobs=tuple(self._logprobs.get(index, ())),
            )
            for index, reason in sorted(self._reasons.items())
        ]
        return answer.body(choices, usage, report)
