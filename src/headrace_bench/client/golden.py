"""Answers whose figures are known: what a client that can be trusted must find.

    Case = requests (when, by which script) + what follows from the times at which the server really wrote

Rules: expected times are differences between the server's own stamps and the schedule's, never between the client's;
both ends read the same clock of the machine; a float is a time, all else must be found exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_bench.client.script import DONE, Script, answer, delta, ending, event, refused, role, stream

STOP = delta(None, "stop")
ERROR = event({"error": {"message": "the engine has stopped", "type": "server_error", "code": None}})


@dataclass(frozen=True, slots=True)
class Times:
    """Of one request, in seconds on the load's clock."""

    scheduled: float
    asked: float
    """The server had read all of it."""
    wrote: tuple[float, ...]
    """Each piece of its script; piece 0 is the head of a stream."""

    def ttft(self, piece: int) -> float:
        """Were `piece` the first with text."""
        return self.wrote[piece] - self.scheduled

    def between(self, first: int, last: int) -> float:
        """From one piece to another."""
        return self.wrote[last] - self.wrote[first]


Wants = Callable[[Sequence[Times]], Mapping[str, Any]]
"""Times of all requests → figure → value. Seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    what: str
    asks: tuple[tuple[float, str], ...]
    """(Second at which it is due, script)."""
    wants: Wants


def _tokens(*at_ms: float) -> list[tuple[float, bytes]]:
    return [(ms / 1e3, delta(content="word ")) for ms in at_ms]


SPLIT = delta(content="é漢🔥")
CUT = SPLIT.index("漢".encode()) + 1
"""Inside a character."""

SCRIPTS: dict[str, Script] = {
    "a": stream((0.01, role()), *_tokens(100), (0.11, STOP), (0.12, ending(1))),
    "b": stream(
        (0.1, delta(1, content="one ")),
        (0.2, delta(5, content="two three four five ")),
        (0.3, delta(6, content="six") + ending(6)),
    ),
    "c": stream((0.1, delta(5, content="one two three four five") + STOP + ending(5))),
    "d": stream((0.05, delta(reasoning_content="hm ")), *_tokens(500), (0.51, STOP + ending(2))),
    "e": stream(
        (0.02, b": keep-alive\n\n"), (0.06, b":\n\n"), *_tokens(100), (0.15, b": ping\r\n\r\n"), *_tokens(200),
        (0.21, STOP + ending(2)),
    ),
    "f": stream((0.1, delta(content="two ") + delta(content="at once ")), *_tokens(200), (0.21, STOP + ending(3))),
    "g": stream((0.1, SPLIT[:9]), (0.15, SPLIT[9:CUT]), (0.2, SPLIT[CUT:]), (0.21, STOP + ending(1))),
    "h": stream(*_tokens(50, 60, 70, 80, 90), (0.1, ERROR + DONE)),
    "i": stream(*_tokens(50, 60, 70), (0.1, b""), closes=True, whole=False),
    "j": stream(*_tokens(50, 100), (0.4, STOP + ending(2))),
    "k": stream((0.0, delta(content="here") + STOP + ending(1)), stalls=1.0),
    "l": stream((0.01, role()), (0.05, STOP + ending(0))),
    "m-429": refused(429, "too many requests", 0.005),
    "m-503": refused(503, "no room", 0.005),
    "good": stream(*_tokens(*(100 * n for n in range(1, 11))), (1.0, STOP + ending(10))),
    "error": stream(*_tokens(20, 35), (0.05, ERROR + DONE)),
    "cut": stream(*_tokens(20, 35, 45), (0.05, b""), closes=True, whole=False),
    "first": stream(
        (0.005, b": hello\n\n"), (0.01, role()), *_tokens(200, 250, 300), (0.31, STOP), (0.32, ending(3)),
    ),
    "several": stream(
        (0.1, delta(1, content="a ")),
        *((0.1 * n, delta(1 + 5 * (n - 1), content="a b c d e ")) for n in range(2, 6)),
        (0.51, STOP + ending(21)),
    ),
    "one": stream((0.05, delta(content="x") + STOP + ending(1))),
    "two": stream(*_tokens(50, 80), (0.081, STOP + ending(2))),
    "json": answer(200, {"hello": "world"}),
}  # fmt: skip


def _one(script: str, what: str, wants: Callable[[Times], Mapping[str, Any]], name: str | None = None) -> Case:
    return Case(name or script, what, ((0.05, script),), lambda times: {"outcome": "ok", **wants(times[0])})


CASES: tuple[Case, ...] = (
    _one("a", "a role is no token", lambda t: {"ttft": t.ttft(2), "tokens": 1, "gaps": (), "tpot": None}),
    _one("b", "chunks of 1, 4 and 1 tokens",
         lambda t: {"tpot": t.between(1, 3) / 5, "tokens": 6, "tokens_per_chunk": (1, 4, 1)}),
    _one("c", "all tokens in one chunk", lambda t: {"ttft": t.ttft(1), "tpot": None, "tokens": 5}),
    _one("d", "reasoning, then output", lambda t: {"ttft": t.ttft(1), "ttfo": t.ttft(2)}),
    _one("e", "comments between", lambda t: {"ttft": t.ttft(3), "gaps": (t.between(3, 5),), "tokens": 2}),
    _one("f", "two events in one segment", lambda t: {"ttft": t.ttft(1), "gaps": (0, t.between(1, 2))}),
    _one("g", "an event over three reads", lambda t: {"ttft": t.ttft(3), "gaps": ()}),
    _one("h", "an error after five tokens",
         lambda t: {"outcome": "stream_error", "good": False, "partial_ttft": t.ttft(1), "e2e": None}),
    _one("i", "cut without [DONE]",
         lambda t: {"outcome": "truncated", "good": False, "partial_ttft": t.ttft(1), "tpot": None}),
    _one("j", "the usage 300 ms later", lambda t: {"e2e": t.ttft(2), "e2e_closed": t.ttft(3)}),
    Case("k", "a stall of 1 s, 20 requests due in it", tuple((0.05 * n, "k") for n in range(40)),
         lambda times: {
             "requests": 40,
             "ttfts": tuple(t.ttft(1) for t in times),
             "ttft_p99": max(t.ttft(1) for t in times),
             "late by 25 ms and more": sum(t.ttft(1) >= 0.025 for t in times),
         }),
    _one("l", "an empty answer", lambda t: {"outcome": "ok", "good": False, "ttft": None, "tokens": 0}),
    Case("m", "429 and 503", ((0.05, "m-429"), (0.06, "m-503"), (0.07, "m-503")),
         lambda times: {"completed": 0, "by_outcome": {"http": 3}, "by_status": {"429": 1, "503": 2},
                        "ttft_p50": None}),
    Case("OC-59", "failures are not fast successes",
         tuple((0.05 + 0.01 * n, script) for n, script in enumerate(
             ["good", "m-503", "error", "good", "cut", "good", "error", "m-503", "good", "good"])),
         lambda times: {
             "requests": 10, "completed": 5, "failed": 5, "attained_percent": 50, "output_tokens": 50,
             "by_outcome": {"http": 2, "stream_error": 2, "truncated": 1},
             "e2e_p50": sorted(times[n].ttft(10) for n in (0, 3, 5, 8, 9))[2],
             "counts": {"ttft": 5, "tpot": 5},
         }),
    _one("first", "the first token, not the first chunk",
         lambda t: {"ttft": t.ttft(3), "gaps": (t.between(3, 4), t.between(4, 5)), "tpot": t.between(3, 5) / 2,
                    "tokens": 3, "e2e": t.ttft(5), "e2e_closed": t.ttft(7)}, "OC-60"),
    _one("several", "several tokens in one chunk",
         lambda t: {"tokens": 21, "ttft": t.ttft(1), "tpot": t.between(1, 5) / 20, "gap_mean": t.between(1, 5) / 4,
                    "itl_mean": t.between(1, 5) / 20}, "OC-61"),
    Case("OC-62a", "all fail", tuple((0.05, "m-503") for _ in range(4)),
         lambda times: {"completed": 0, "failed": 4, "ttft_p50": None, "counts": {"ttft": 0, "tpot": 0},
                        "strict_json": True}),
    Case("OC-62b", "one token each", tuple((0.05, "one") for _ in range(4)),
         lambda times: {"completed": 4, "tpot_p50": None, "counts": {"ttft": 4, "tpot": 0}}),
    Case("OC-62c", "one request", ((0.05, "two"),),
         lambda times: {"ttft_p50": times[0].ttft(1), "ttft_p99": times[0].ttft(1)}),
    Case("OC-62d", "no token, finished", ((0.05, "l"),),
         lambda times: {"completed": 1, "failed": 0, "ttft_p50": None, "counts": {"ttft": 0, "tpot": 0}}),
    Case("OC-62e", "no request", (),
         lambda times: {"requests": 0, "completed": 0, "attained_percent": None, "strict_json": True}),
)  # fmt: skip
