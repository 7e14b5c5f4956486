"""For each switch of a Headrace a short load that shows what it is for, and the figure that tells.

    switch ──► Exhibit ── schedule(seed) ──► the same requests for the server with it and the server without
                       ── primary        ──► the figure that decides, named before anything is measured

Rules: a load is as small as shows the case, for it is repeated often; all text is new in every run; each exhibit says
what else it sets, on both sides alike. A switch without an exhibit gets `EVERYDAY`, a plain mixture of chats. Text is
words, each about a token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace_bench.lab import words
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.lookup import copying, people

HELPER = "You are a helper."
WARMUP_S = 0.5
"""From the warm-up request to the first that counts."""
LONGEST_S = 300.0
"""A load of users is over when its requests are, and in any case by then."""

Statistic = Literal["p50", "p95", "max", "mean", "share"]


@dataclass(frozen=True, slots=True)
class Primary:
    """The deciding figure: a statistic over the requests with a tag.

    `figure`: ttft, gap, tpot (seconds); or in_time, the share of all scheduled that ended well and, with a deadline,
    had their first token before it.
    """

    figure: Literal["ttft", "gap", "tpot", "in_time"]
    statistic: Statistic
    tag: str = ""

    @property
    def more_is_better(self) -> bool:
        """Otherwise less is."""
        return self.figure == "in_time"

    def __str__(self) -> str:
        who = f" of {self.tag}" if self.tag else ""
        return f"share in time{who}" if self.figure == "in_time" else f"{self.figure} {self.statistic}{who}"


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A switch and the load that shows it."""

    switch: str
    """A setting that is true or false."""
    load: str
    """What happens, in a line."""
    make: Callable[[random.Random], Iterable[Planned]]
    """Requests with any index; a load of `users` has no times."""
    primary: Primary
    users: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """More of the server's settings, on both sides."""
    drain_s: float = 30.0
    turns: int = 2
    """Pairs in a round, between a start and a stop of the servers. 1 where a server is not the same afterwards."""
    kill_after_s: float | None = None
    """The engine's process is killed so long after the start of the load."""

    def schedule(self, seed: int) -> Schedule:
        """The requests of one run."""
        rng = random.Random(f"{self.switch} {seed}")
        warm = _ask(rng, at=None if self.users else 0.0, new=24, tokens=4, tag="warmup", phase="warmup")
        parts = [warm, *self.make(rng)]
        shift = 0.0 if self.users else WARMUP_S
        requests = [
            msgspec.structs.replace(
                one, index=i, at=one.at if one.at is None or one.phase == "warmup" else one.at + shift
            )
            for i, one in enumerate(sorted(parts, key=lambda one: one.at or 0.0))
        ]
        last = max((one.at or 0.0) for one in requests)
        return Schedule(
            seed=seed,
            kind=f"exhibit {self.switch}",
            users=self.users,
            duration=LONGEST_S if self.users else max(last - WARMUP_S, 0.1),
            finite=self.users is not None,
            warmup=WARMUP_S,
            requests=tuple(requests),
            notes=(self.load,),
        )


def _ask(
    rng: random.Random,
    *,
    at: float | None,
    new: int,
    tokens: int,
    tag: str,
    system: str = HELPER,
    before: tuple[dict[str, str], ...] = (),
    phase: Literal["warmup", "measure"] = "measure",
    think: float = 0.0,
    extra: Mapping[str, Any] | None = None,
) -> Planned:
    """A chat whose last message is `new` words that nobody sent before; greedy."""
    question = {"role": "user", "content": f"Tell me about {words(rng, new)}"}
    messages = ({"role": "system", "content": system}, *before, question)
    return Planned(
        index=0,
        at=at,
        messages=messages,
        max_tokens=tokens,
        prompt_tokens=sum(len(message["content"].split()) for message in messages),
        phase=phase,
        tag=tag,
        think=think,
        extra={"temperature": 0, **(extra or {})},
    )


def _beside_readers(rng: random.Random) -> Iterable[Planned]:
    for i in range(3):
        yield _ask(rng, at=0.02 * i, new=8, tokens=70, tag="reader")
    yield _ask(rng, at=0.6, new=700, tokens=4, tag="long")


def _among_long_texts(rng: random.Random) -> Iterable[Planned]:
    for i in range(6):
        yield _ask(rng, at=0.02 * i, new=350, tokens=150, tag="reader")
    for i in range(3):
        yield _ask(rng, at=5.0 + 0.01 * i, new=60, tokens=4, tag="newcomer")


def _behind(rng: random.Random) -> Iterable[Planned]:
    yield _ask(rng, at=0.0, new=900, tokens=4, tag="long")
    for i in range(5):
        yield _ask(rng, at=0.3 + 0.15 * i, new=10, tokens=8, tag="short")


def _full_batch(rng: random.Random) -> Iterable[Planned]:
    for i in range(8):
        yield _ask(rng, at=0.01 * i, new=8, tokens=90, tag="reader")
    for i in range(4):
        yield _ask(rng, at=2.0 + 0.02 * i, new=30, tokens=8, tag="newcomer")


def _one_beginning(rng: random.Random) -> Iterable[Planned]:
    system = words(rng, 120)
    for i in range(8):
        yield _ask(rng, at=0.01 * i, new=10, tokens=4, tag="user", system=system)


def _overload(rng: random.Random) -> Iterable[Planned]:
    at = 0.0
    while at < 5.0:
        yield _ask(rng, at=at, new=110, tokens=4, tag="user", extra={"headrace": {"ttft_deadline_ms": 1500}})
        at += rng.expovariate(8.0)


def _flood(rng: random.Random) -> Iterable[Planned]:
    system = words(rng, 300)
    for _ in range(5):
        yield _ask(rng, at=None, new=10, tokens=2, tag="product", system=system)
    for i in range(4):
        # Prefixes are looked for while there is nothing else to do.
        yield _ask(rng, at=None, new=380, tokens=2, tag="others", think=0.0 if i else 1.0)
    yield _ask(rng, at=None, new=10, tokens=2, tag="again", system=system)


def _in_turn(rng: random.Random) -> Iterable[Planned]:
    talks = [words(rng, 300) for _ in range(4)]
    for visit in ("first", "second"):
        for system in talks:
            yield _ask(rng, at=None, new=8, tokens=4, tag=visit, system=system)


def _next_turn(rng: random.Random) -> Iterable[Planned]:
    for _ in range(3):
        system = words(rng, 250)
        yield _ask(rng, at=None, new=8, tokens=8, tag="first", system=system)
        yield _ask(rng, at=None, new=8, tokens=8, tag="next", system=system)


def _readers(rng: random.Random) -> Iterable[Planned]:
    for i in range(4):
        yield _ask(rng, at=0.02 * i, new=8, tokens=70, tag="reader")


def _copy(rng: random.Random) -> Iterable[Planned]:
    for _ in range(2):
        messages = tuple(copying(people(rng.randrange(10**6))))
        yield Planned(
            index=0,
            at=None,
            messages=messages,
            max_tokens=220,
            prompt_tokens=sum(len(message["content"].split()) for message in messages),
            tag="copy",
            extra={"temperature": 0},
        )


def _alone(rng: random.Random) -> Iterable[Planned]:
    yield _ask(rng, at=None, new=12, tokens=120, tag="reader")


def _wide(rng: random.Random) -> Iterable[Planned]:
    for _ in range(3):
        yield _ask(rng, at=None, new=8, tokens=2, tag="before", system=words(rng, 400))
    for _ in range(6):
        yield _ask(rng, at=None, new=60, tokens=8, tag="chat")


def _deep(rng: random.Random) -> Iterable[Planned]:
    for i in range(3):
        yield _ask(rng, at=0.02 * i, new=8, tokens=120, tag="reader")
    yield _ask(rng, at=0.6, new=1500, tokens=4, tag="long")


def _few_rows_deep(rng: random.Random) -> Iterable[Planned]:
    system = words(rng, 1500)
    yield _ask(rng, at=None, new=8, tokens=2, tag="before", system=system)
    for _ in range(6):
        yield _ask(rng, at=None, new=20, tokens=2, tag="question", system=system)


def _prompts(rng: random.Random) -> Iterable[Planned]:
    for _ in range(4):
        yield _ask(rng, at=None, new=300, tokens=2, tag="prompt")


def _everyday(rng: random.Random) -> Iterable[Planned]:
    at = 0.0
    for i in range(14):
        yield _ask(rng, at=at, new=(300 if i % 7 == 3 else rng.randint(10, 60)), tokens=40, tag="chat")
        at += rng.expovariate(2.5)


LITTLE_MEMORY = {
    "tiers.ram_mib": "16", "tiers.ssd_mib": "0", "engine.idle_cells": "512", "templates.look_s": "0.2",
}  # fmt: skip
"""What pushes a prefix out, and the look that pins it, happen within seconds instead of minutes."""

EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit(
        "optimizations.adaptive_chunks",
        "three people are reading when a prompt of 700 tokens arrives",
        _beside_readers,
        Primary("gap", "max", "reader"),
    ),
    Exhibit(
        "optimizations.efficient_steps",
        "three people are reading when a prompt of 1,500 tokens arrives",
        _deep,
        Primary("ttft", "p50", "long"),
    ),
    Exhibit(
        "optimizations.split_steps",
        "six people read answers to texts of 350 tokens when three more come with 60 tokens each",
        _among_long_texts,
        Primary("ttft", "p50", "newcomer"),
    ),
    Exhibit(
        "optimizations.padded_steps",
        "questions of 20 tokens under a system prompt of 1,500 tokens that is known",
        _few_rows_deep,
        Primary("ttft", "p50", "question"),
        users=1,
    ),
    Exhibit(
        "optimizations.earliest_deadline",
        "a prompt of 900 tokens, and five short ones behind it",
        _behind,
        Primary("ttft", "p50", "short"),
    ),
    Exhibit(
        "optimizations.ttft_fuse",
        "eight people are reading, as many as a batch has places, when four more come",
        _full_batch,
        Primary("ttft", "p50", "newcomer"),
    ),
    Exhibit(
        "optimizations.await_prefix",
        "eight people come at once with one new system prompt of 120 tokens",
        _one_beginning,
        Primary("ttft", "p50", "user"),
    ),
    Exhibit(
        "optimizations.admission",
        "prompts of 110 tokens come eight a second, more than twice what can be computed, due in 1.5 s",
        _overload,
        Primary("in_time", "share", "user"),
        drain_s=2.0,
    ),
    Exhibit(
        "optimizations.mined_templates",
        "a system prompt used five times, other prompts that fill the memory, and that system prompt again",
        _flood,
        Primary("ttft", "p50", "again"),
        users=1,
        settings=LITTLE_MEMORY,
        turns=1,
    ),
    Exhibit(
        "optimizations.tiers",
        "four conversations of 300 tokens in turn, more than the pool keeps of idle ones; the second visits",
        _in_turn,
        Primary("ttft", "p50", "second"),
        users=1,
        settings={"engine.idle_cells": "512"},
    ),
    Exhibit(
        "optimizations.replay",
        "the engine's process is killed under four streams",
        _readers,
        Primary("in_time", "share", "reader"),
        turns=1,
        kill_after_s=WARMUP_S + 1.0,
    ),
    Exhibit(
        "optimizations.speculation",
        "a text is repeated to the letter",
        _copy,
        Primary("tpot", "mean", "copy"),
        users=1,
    ),
    Exhibit(
        "optimizations.overlap",
        "one person reads a long answer",
        _alone,
        Primary("tpot", "mean", "reader"),
        users=1,
        settings={"optimizations.speculation": "false"},
        turns=6,
    ),
    Exhibit(
        "engine.prefix_cache",
        "a second question under a system prompt of 250 tokens",
        _next_turn,
        Primary("ttft", "p50", "next"),
        users=1,
    ),
    Exhibit(
        "engine.flash_attention",
        "short chats beside three conversations of 400 tokens that are kept for their next turn",
        _wide,
        Primary("ttft", "p50", "chat"),
        users=1,
    ),
    Exhibit(
        "engine.extra_buffers",
        "prompts of 300 tokens, one after another",
        _prompts,
        Primary("ttft", "p50", "prompt"),
        users=1,
    ),
)

SWITCHES: Mapping[str, Exhibit] = {one.switch: one for one in EXHIBITS}

KEPT_ON = ("engine.flash_attention", "engine.extra_buffers")
"""Ways of llama.cpp to compute, which its other servers have too: no optimisation of ours."""


def everything_off() -> list[str]:
    """The flags of a Headrace with every optimisation off, and no prompt's beginning kept."""
    return [part for one in SWITCHES if one not in KEPT_ON for part in ("--set", f"{one}=false")]


def exhibit(switch: str) -> Exhibit:
    """That of a switch; a mixture of chats for one that has none."""
    return SWITCHES.get(switch) or Exhibit(
        switch, "chats of 10 to 300 tokens, 2.5 a second", _everyday, Primary("ttft", "p50", "chat")
    )
