"""Where the milliseconds of one request went, up to its first visible text.

    first byte        body        lease      token ids     scheduled   prefix in     logits        text       socket
        │─── receive ───│── route ──│─ tokenize ─│── queue ──│─ restore ─│── prefill ──│─ sample ─│─ deliver ─│

Rules: the stages are contiguous, so they add up to TTFT; a stamp is taken once, at the boundary, by whoever owns it;
stamps of the engine's process are mapped to the server's clock before they get here. Stages of a request that never
gave text are those that it passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.events import Marks

STAGES = ("receive", "route", "tokenize", "queue", "restore", "prefill", "sample", "deliver")


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

    def mark(self, marks: Marks, offset: float) -> None:
        """Take over the engine's stamps; `offset` (s) maps its clock to ours (`core.clock.offset`)."""
        self.scheduled = marks.scheduled + offset
        self.restored = marks.restored + offset
        self.prefilled = marks.prefilled + offset
        self.sampled = marks.sampled + offset

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

    def report(self) -> dict[str, float | int | None]:
        """The `headrace.timeline` object of the last chunk: milliseconds a stage, `ttft`, `cached_tokens`."""
        ttft = self.ttft()
        return {
            **{name: round(ms, 3) for name, ms in self.stages().items()},
            "ttft": None if ttft is None else round(ttft, 3),
            "cached_tokens": self.cached_tokens,
        }
