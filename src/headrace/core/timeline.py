"""Where the milliseconds of one request went, up to its first visible text.

    first byte        body        lease      token ids     scheduled   prefix in     logits        text       socket
        │─── receive ───│── route ──│─ tokenize ─│── queue ──│─ restore ─│── prefill ──│─ sample ─│─ deliver ─│

Rules: the stages are contiguous, so they add up to TTFT; a stamp is taken once, at the boundary, by whoever owns it;
stamps of the engine's process are mapped to the server's clock before they get here. Stages of a request that never
gave text are those that it passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.core.events import Marks

STAGES = ("receive", "route", "tokenize", "queue", "restore", "prefill", "sample", "deliver")


@dataclass(slots=True)
class Attempt:
    """One engine's time with a request. Stamps in seconds on the server's clock."""

    engine: str
    begun: float
    ended: float | None = None
    end: str = "running"
    """As `gateway.backend.End` says it."""
    continued: bool = False
    """It went on with what another one began."""


@dataclass(slots=True)
class Timeline:
    """Owned by one response. All stamps in seconds on the server's clock; None: not reached."""

    first_byte: float
    body: float | None = None
    routed: float | None = None
    tokenized: float | None = None
    scheduled: float | None = None
    restored: float | None = None
    prefilled: float | None = None
    sampled: float | None = None
    delivered: float | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    """The engines that were tried, the one that answers last."""
    pace: tuple[float, float] | None = None
    """Seconds by which pacing held the pieces of text back: their mean and the longest. It lies behind the first text,
    which is never held, so it is no part of TTFT."""

    def mark(self, marks: Marks, offset: float) -> None:
        """Take over the engine's stamps; `offset` (s) maps its clock to ours (`core.clock.offset`). After something was
        delivered they are of no use: they would lie behind the last stage."""
        if self.delivered is not None:
            return
        self.scheduled = marks.scheduled + offset
        self.restored = marks.restored + offset
        self.prefilled = marks.prefilled + offset
        self.sampled = marks.sampled + offset

    def unmark(self) -> None:
        """What an engine said that was given up does not count."""
        self.scheduled = self.restored = self.prefilled = self.sampled = None

    def stages(self) -> dict[str, float]:
        """Stage → milliseconds, in order, as far as the request came."""
        stamps = (
            self.first_byte, self.body, self.routed, self.tokenized, self.scheduled,
            self.restored, self.prefilled, self.sampled, self.delivered,
        )  # fmt: skip
        out: dict[str, float] = {}
        for name, start, end in zip(STAGES, stamps[:-1], stamps[1:], strict=True):
            if start is None or end is None:
                break
            out[name] = (end - start) * 1e3
        return out

    def ttft(self) -> float | None:
        """First byte of the request to the first text handed to the socket, in ms; None before that."""
        return None if self.delivered is None else (self.delivered - self.first_byte) * 1e3

    def server_timing(self) -> str:
        """The `Server-Timing` header's value: `receive;dur=0.12, …, ttft;dur=…`."""
        parts = [f"{name};dur={ms:.2f}" for name, ms in self.stages().items()]
        ttft = self.ttft()
        if ttft is not None:
            parts.append(f"ttft;dur={ttft:.2f}")
        return ", ".join(parts)

    def report(self) -> dict[str, Any]:
        """The `headrace.timeline` object of the last chunk: milliseconds a stage, `ttft`, `cached_tokens`; if more
        than one engine was tried, `attempts`; of a paced stream `pace`."""
        ttft = self.ttft()
        out: dict[str, Any] = {
            **{name: round(ms, 3) for name, ms in self.stages().items()},
            "ttft": None if ttft is None else round(ttft, 3),
            "cached_tokens": self.cached_tokens,
        }
        if len(self.attempts) > 1:
            out["attempts"] = [self._tried(attempt) for attempt in self.attempts]
        if self.pace is not None:
            mean, longest = self.pace
            out["pace"] = {"mean_ms": round(mean * 1e3, 3), "max_ms": round(longest * 1e3, 3)}
        return out

    def _tried(self, attempt: Attempt) -> dict[str, Any]:
        ended = attempt.ended
        return {
            "engine": attempt.engine,
            "at": round((attempt.begun - self.first_byte) * 1e3, 3),
            "ms": None if ended is None else round((ended - attempt.begun) * 1e3, 3),
            "end": attempt.end,
            "continued": attempt.continued,
        }
