"""`memory`, survival: the engine is killed under open streams, and each of them has to end with the right text.

    streams   ──────text──────│        pause        │──────text──────[DONE]
    engine    ──────works─────┘ kill -9    restart  └──────works──────

Rules: the right text is what the same server wrote undisturbed; that is done twice, all at once and one after
another, because a step's width changes the last bits of its numbers, and an answer where these two differ has two
right texts. The engine is killed once every stream has begun and none has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from headrace_bench.lab import Lab
from headrace_bench.memory import body
from headrace_bench.wire import Answer, Refused, chat

SUBJECTS = ("a river", "a bridge", "a market", "a lighthouse", "a mountain road", "a clock", "bread", "winter")
LONGEST = 160
BEGUN = 20
"""Chunks that every stream has to have before the engine is killed."""
LOOK_S = 0.02
LIMIT_S = 180.0


def crash(lab: Lab) -> dict[str, Any]:
    """Bar: all 8 streams finish with the right text."""
    bodies = [body(lab.model.stem, _messages(subject), LONGEST) for subject in SUBJECTS]
    with lab.headrace() as server:
        alone = [asyncio.run(chat(server.url, one, timeout_s=LIMIT_S)) for one in bodies]
        together = asyncio.run(_together(server.url, bodies))
        pid = server.biggest_child()
        killed: list[int] = []
        answers = asyncio.run(_together(server.url, bodies, lambda: killed.append(_kill(pid))))
        try:
            afterwards = asyncio.run(chat(server.url, bodies[0], timeout_s=LIMIT_S)).text
        except Refused as error:
            afterwards = str(error)
        new = [child for child in server.pids()[1:] if child != pid]
    verdict = compare([a if isinstance(a, Answer) else None for a in answers], [alone, together])
    return {
        **verdict,
        "streams": len(bodies),
        "killed": len(killed),
        "engine_is_new": bool(new),
        "works_afterwards": afterwards == alone[0].text,
        "longest_pause_ms": max((max(a.gaps) * 1e3 for a in answers if isinstance(a, Answer)), default=None),
        "errors": [str(a) for a in answers if not isinstance(a, Answer)],
    }


def compare(answers: Sequence[Answer | None], undisturbed: Sequence[Sequence[object]]) -> dict[str, int]:
    """How many finished, how many of them with a right text; and in how many all undisturbed runs agree.

    `undisturbed`: runs of the same requests in the same order.
    """
    texts = [{one.text for run in undisturbed if isinstance(one := run[i], Answer)} for i in range(len(answers))]
    return {
        "finished": sum(answer is not None for answer in answers),
        "right": sum(a is not None and a.text in right for a, right in zip(answers, texts, strict=True)),
        "undisturbed_agree": sum(len(right) == 1 for right in texts),
    }


def _messages(subject: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Write a story about {subject}."}]


def _kill(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    return pid


async def _together(
    url: str, bodies: Sequence[dict[str, Any]], when_begun: Callable[[], object] | None = None
) -> list[Answer | BaseException]:
    """All at once. `when_begun` is called once every stream has `BEGUN` chunks, unless one ended before that."""
    grown = [Answer() for _ in bodies]
    calls = [
        asyncio.ensure_future(chat(url, one, timeout_s=LIMIT_S, into=answer))
        for one, answer in zip(bodies, grown, strict=True)
    ]
    while when_begun is not None and not any(call.done() for call in calls):
        if all(len(answer.stamps) >= BEGUN for answer in grown):
            when_begun()
            break
        await asyncio.sleep(LOOK_S)
    return await asyncio.gather(*calls, return_exceptions=True)
