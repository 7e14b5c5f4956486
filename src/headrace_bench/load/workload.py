"""What is asked: `--workload` read into a type. Nothing here acts.

    chat                     lengths of real conversations            sessions:20,turns=4   conversations
    code                     long prompts, short answers              shared:300            one system prompt in common
    reason                   long answers                             lengths:FILE.csv      lengths of your own
    mixed,share=0.05         short chats, and some of the longest     prompts:FILE.jsonl    texts of your own
    trace,block=16           a trace's own lengths and sharing

Each takes `scale`, by which real lengths are divided, and `max_in` and `max_out`, at which they are cut after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace_bench.load.lengths import Sizes
from headrace_bench.load.term import Term

FLAG = "--workload"
KINDS = ("chat", "code", "reason", "mixed", "lengths", "prompts", "sessions", "shared", "trace")
_SIZES = ("scale", "max_in", "max_out")


@dataclass(frozen=True, slots=True)
class Real:
    """Lengths of a table that is built in."""

    kind: Literal["chat", "code", "reason"]
    sizes: Sizes = Sizes()  # noqa: RUF009 - frozen, so one for all is right


@dataclass(frozen=True, slots=True)
class Mixed:
    """Short chats, and a `share` of the longest prompts: does a long one hold up the short ones behind it?"""

    share: float
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Measured:
    """Pairs of lengths from a file."""

    path: str
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Written:
    """Texts from a file; of each line the first message, or all as turns of a session."""

    path: str
    every_turn: bool
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations of `turns` turns; at most `count` are begun in the window, all that arrive if it is None."""

    count: int | None
    turns: int
    think: float
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Shared:
    """Chats behind one system prompt of `tokens` tokens."""

    tokens: int
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Traced:
    """Lengths of the trace that gives the times; its blocks of 512 tokens become blocks of `block`."""

    block: int
    sizes: Sizes


Workload = Real | Mixed | Measured | Written | Sessions | Shared | Traced


def parse(text: str) -> Workload:
    """What `--workload` says. Misuse for what says nothing."""
    term = Term.read(FLAG, text)
    if term.kind not in KINDS:
        raise term.unknown(KINDS)
    options = term.options
    match term.kind:
        case "chat" | "code" | "reason":
            _nothing(term)
            term.only(*_SIZES)
            kind: Literal["chat", "code", "reason"] = (
                "chat" if term.kind == "chat" else "code" if term.kind == "code" else "reason"
            )
            return Real(kind, _sizes(term, max_out=512 if kind == "reason" else 128))
        case "mixed":
            _nothing(term)
            term.only("share", *_SIZES)
            share = term.positive(options.get("share", "0.05"), "share")
            if share >= 1:
                raise term.wrong(f"share has to be less than 1, not {share:g}")
            return Mixed(share, _sizes(term, max_in=1024))
        case "lengths":
            term.only(*_SIZES)
            return Measured(_file(term), _sizes(term, scale=1.0, max_in=1_000_000, max_out=1_000_000))
        case "prompts":
            term.only("turns", *_SIZES)
            if (turns := options.get("turns", "1")) not in ("1", "all"):
                raise term.wrong(f"turns has to be 1 or all, not {turns}")
            return Written(_file(term), turns == "all", _sizes(term))
        case "sessions":
            term.only("turns", "think", *_SIZES)
            return Sessions(
                term.count(term.value, "the number of conversations") if term.value else None,
                term.count(options.get("turns", "4"), "turns"),
                term.number(options.get("think", "1"), "think, seconds,"),
                _sizes(term),
            )
        case "shared":
            term.only(*_SIZES)
            return Shared(term.count(term.value, "the tokens of the system prompt"), _sizes(term))
        case _:
            _nothing(term)
            term.only("block", *_SIZES)
            return Traced(term.count(options.get("block", "16"), "block, tokens,"), _sizes(term))


def _sizes(term: Term, scale: float = 8.0, max_in: int = 512, max_out: int = 128) -> Sizes:
    return Sizes(
        term.positive(term.options.get("scale", str(scale)), "scale"),
        term.count(term.options.get("max_in", str(max_in)), "max_in, tokens,", 8),
        term.count(term.options.get("max_out", str(max_out)), "max_out, tokens,", 2),
    )


def _nothing(term: Term) -> None:
    if term.value:
        raise term.wrong(f"{term.kind} takes options only: {term.kind},scale=8")


def _file(term: Term) -> str:
    if not term.value:
        raise term.wrong(f"which file? {term.kind}:FILE")
    return term.value
