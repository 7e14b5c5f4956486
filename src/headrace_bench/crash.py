"""`memory`, survival: the engine is killed under open streams, and each of them has to end with the right text.

    streams   ──────text──────│        pause        │──────text──────[DONE]
    engine    ──────works─────┘ kill -9    restart  └──────works──────

Rules: the streams repeat texts that stand in their prompts, for there the model is sure of every token; in a story
the last bits of a step's numbers, which change with its width, soon choose another word, and nothing could be said of
the text after a restart. Right is what the same server wrote undisturbed, all at once or one after another. The engine
is killed once every stream has begun, or before the first of them is near its end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from headrace_bench.lab import Lab
from headrace_bench.lookup import copying, people
from headrace_bench.memory import body
from headrace_bench.wire import Answer, Refused, chat

STREAMS = 8
LONGEST = 250
BEGUN = 40
"""Characters that every stream has to have before the engine is killed."""
ENOUGH = 250
"""Characters of the first stream, of some 430, at which it is killed in any case."""
LOOK_S = 0.02
LIMIT_S = 300.0


def crash(lab: Lab) -> dict[str, Any]:
    """Bar: all 8 streams finish with the right text."""
    bodies = [body(lab.model.stem, copying(people(seed)), LONGEST) for seed in range(STREAMS)]
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
        "right": verdict["right"] if killed else None,  # nothing was survived
        "streams": len(bodies),
        "engine_is_new": bool(new),
        "works_afterwards": afterwards == alone[0].text,
        "longest_pause_ms": max((max(a.gaps) * 1e3 for a in answers if isinstance(a, Answer)), default=None),
        "errors": sorted({str(a) for a in answers if not isinstance(a, Answer)}),
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


def begun(lengths: Sequence[int]) -> bool:
    """It is time, with that many characters in each stream."""
    return min(lengths) >= BEGUN or max(lengths) >= ENOUGH


def _kill(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    return pid


async def _together(
    url: str, bodies: Sequence[dict[str, Any]], when_begun: Callable[[], object] | None = None
) -> list[Answer | BaseException]:
    """All at once. `when_begun` is called once they have, unless one ended before that."""
    grown = [Answer() for _ in bodies]
    calls = [
        asyncio.ensure_future(chat(url, one, timeout_s=LIMIT_S, into=answer))
        for one, answer in zip(bodies, grown, strict=True)
    ]
    while when_begun is not None and not any(call.done() for call in calls):
        if begun([len(answer.text) for answer in grown]):
            when_begun()
            break
        await asyncio.sleep(LOOK_S)
    return await asyncio.gather(*calls, return_exceptions=True)
