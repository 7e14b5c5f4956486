"""A response that is written when it is complete: one JSON object of known length.

Nothing is sent before the end, so a failure at any time is an honest status.
"""

from __future__ import annotations

from headrace.core.clock import Clock
from headrace.core.events import Delta, Finished, FinishReason, TokenLogprob
from headrace.core.request import Options
from headrace.protocol.answer import Answer, Choice
from headrace.server.exchange import Exchange
from headrace.server.live import Live


async def answer_whole(exchange: Exchange, live: Live, answer: Answer, options: Options, clock: Clock) -> None:
    """Collect a response and answer with it. Raises ClientGone, and the failure if there is one."""
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, list[TokenLogprob]] = {}
    reasons: dict[int, FinishReason] = {}
    while True:
        for event in live.mailbox.take():
            index = live.book(event)
            if isinstance(event, Delta):
                texts.setdefault(index, []).append(event.text)
                logprobs.setdefault(index, []).extend(event.logprobs)
            elif isinstance(event, Finished):
                reasons[index] = event.reason
        live.mailbox.written()
        live.check()
        if live.remaining == 0:
            break
        await live.mailbox.wait()
    choices = [
        Choice(index=index, text="".join(texts.get(index, ())), reason=reason, logprobs=tuple(logprobs.get(index, ())))
        for index, reason in sorted(reasons.items())
    ]
    if any(choice.text for choice in choices):
        live.timeline.delivered = clock()
    body = answer.body(choices, live.usage(), live.timeline.report() if options.timings else None)
    await exchange.answer(200, body, headers=((b"server-timing", live.timeline.server_timing().encode()),))
