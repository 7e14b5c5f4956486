"""Fills a schedule's slots: what each request says and how long its answer may be. Decides; reads the files it is told.

Rules: no two prompts are the same, those of the warm-up included; what is shared is shared on purpose, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace_bench.load import lengths, traces
from headrace_bench.load.prompts import Blocks, Texts, text
from headrace_bench.load.workload import Measured, Mixed, Real, Sessions, Shared, Traced, Workload, Written

_CHAT = (lengths.SHAREGPT, lengths.AZURE_CONV)
_SHORT = tuple(lengths.only(table, 0, 1) for table in _CHAT)
_LONG = tuple(lengths.only(table, 3) for table in _CHAT)
_CHAT_SOURCE = "chat (ShareGPT and Azure conversation 2023, half each)"
_TAIL = 4
"""Words at the end of a traced prompt that are its own: cut to the same blocks, two prompts would be one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request's content."""

    messages: tuple[dict[str, str], ...]
    max_tokens: int
    prompt_tokens: int
    tag: str = ""


Turns = tuple[Ask, ...]


class Asker:
    """Makes asks for one schedule."""

    def __init__(self, workload: Workload, rng: np.random.Generator, seed: int) -> None:
        self._workload = workload
        self._rng = rng
        self._seed = seed
        self._texts = Texts(rng)
        self._shares = False
        self._system: str | None = None
        self._order: list[int] = []
        self._taken = 0

    def asks(self, rows: Sequence[traces.Row | None]) -> list[Turns]:
        """One for each slot; `rows` has the trace's request of each, where there is a trace.

        May be called again, for more: what is in common stays in common, and no prompt comes again.
        """
        count = len(rows)
        match self._workload:
            case Sessions(_, turns, _, sizes):
                return self._sessions(count, turns, sizes)
            case Written(path, every_turn, sizes):
                return self._written(traces.prompts(path), every_turn, count, sizes)
            case Traced(block, sizes):
                return self._traced([row for row in rows if row is not None], block, sizes)
            case Shared(tokens, sizes):
                return self._shared(count, tokens, sizes)
            case Mixed(share, sizes):
                return self._mixed(count, share, sizes)
            case Measured(path, sizes):
                return self._plain(*lengths.resampled(self._rng, traces.lengths(path), count), sizes)
            case Real("reason", sizes):
                return self._plain(*lengths.reasoning(self._rng, count), sizes)
            case Real("code", sizes):
                return self._plain(*lengths.mixed(self._rng, (lengths.AZURE_CODE,), count), sizes)
            case Real(_, sizes):
                return self._plain(*lengths.mixed(self._rng, _CHAT, count), sizes)

    def notes(self) -> list[str]:
        """What a reader has to know of the lengths and texts."""
        sizes = self._workload.sizes
        match self._workload:
            case Sessions(_, turns, think, _):
                return [
                    sizes.note(f"conversations of {turns} turns, first messages as {_CHAT_SOURCE}"),
                    f"later messages are short ones; {think:g} s of thinking between answer and turn on average, drawn",
                ]
            case Written(path, every_turn, _):
                first = f"texts of {path}" + (", 1 s of thinking between turns on average" if every_turn else "")
                return [
                    f"{first}; one that comes again has words of its own before it",
                    sizes.note_answers("answers as ShareGPT"),
                ]
            case Traced(block, _):
                if not self._shares:
                    return [sizes.note("the trace's pairs")]
                return [
                    f"prompts of the trace's blocks: {traces.BLOCK} tokens are {block} words (divided by "
                    f"{traces.BLOCK / block:g}), cut at {sizes.max_in}; {_TAIL} words at the end are each prompt's own",
                    sizes.note_answers("answers of the trace"),
                ]
            case Shared(tokens, _):
                return [sizes.note(_CHAT_SOURCE), f"one system prompt of {tokens} words in common, in the warm-up too"]
            case Mixed(share, _):
                return [sizes.note(f"{1 - share:.0%} short chats, {share:.0%} of the longest; {_CHAT_SOURCE}")]
            case Measured(path, _):
                return [sizes.note(f"pairs of {path}")]
            case Real("reason", _):
                return [sizes.note("DeepSeek-R1 (ServeGen), prompts and answers drawn apart")]
            case Real("code", _):
                return [sizes.note("code (Azure code 2023)")]
            case Real():
                return [sizes.note(_CHAT_SOURCE)]

    def _plain(self, prompts: lengths.Tokens, answers: lengths.Tokens, sizes: lengths.Sizes) -> list[Turns]:
        fitted = sizes.fit(prompts, answers)
        return [(self._ask(words, most),) for words, most in _pairs(*fitted)]

    def _ask(self, words: int, most: int, tag: str = "", system: str | None = None) -> Ask:
        """A user's message of `words` words, behind a system prompt where there is one."""
        said = self._texts.new(words)
        before = () if system is None else ({"role": "system", "content": system},)
        counted = words + (0 if system is None else system.count(" ") + 1)
        return Ask((*before, {"role": "user", "content": said}), most, counted, tag)

    def _sessions(self, count: int, turns: int, sizes: lengths.Sizes) -> list[Turns]:
        firsts = _pairs(*sizes.fit(*lengths.mixed(self._rng, _CHAT, count)))
        later = _pairs(*sizes.fit(*lengths.mixed(self._rng, _SHORT, count * (turns - 1))))
        return [
            tuple(self._ask(*pair) for pair in (first, *later[place * (turns - 1) : (place + 1) * (turns - 1)]))
            for place, first in enumerate(firsts)
        ]

    def _shared(self, count: int, tokens: int, sizes: lengths.Sizes) -> list[Turns]:
        self._system = self._system or text(self._rng, tokens)
        pairs = _pairs(*sizes.fit(*lengths.mixed(self._rng, _CHAT, count)))
        return [(self._ask(words, most, system=self._system),) for words, most in pairs]

    def _mixed(self, count: int, share: float, sizes: lengths.Sizes) -> list[Turns]:
        long = (self._rng.random(count) < share).tolist()
        pairs = {
            "short": _pairs(*sizes.fit(*lengths.mixed(self._rng, _SHORT, count))),
            "long": _pairs(*sizes.fit(*lengths.mixed(self._rng, _LONG, count))),
        }
        tags = ["long" if is_long else "short" for is_long in long]
        return [(self._ask(*pairs[tag][place], tag),) for place, tag in enumerate(tags)]

    def _written(
        self, written: Sequence[Sequence[str]], every_turn: bool, count: int, sizes: lengths.Sizes
    ) -> list[Turns]:  # fmt: skip
        """All of them in an order of the seed's, then again with words before them that make them new."""
        self._order = self._order or self._rng.permutation(len(written)).tolist()
        found = []
        for place in range(self._taken, self._taken + count):
            again, which = divmod(place, len(self._order))
            turns = written[self._order[which]]
            mark = f"({self._texts.new(_TAIL)}) " if again else ""
            said = [mark + turns[0], *(turns[1:] if every_turn else ())]
            found.append(tuple(said))
        self._taken += count
        _, answers = sizes.fit(*lengths.mixed(self._rng, (lengths.SHAREGPT,), sum(map(len, found))))
        most = iter(answers.tolist())
        return [
            tuple(Ask(({"role": "user", "content": one},), next(most), len(one.split())) for one in said)
            for said in found
        ]

    def _traced(self, rows: Sequence[traces.Row], block: int, sizes: lengths.Sizes) -> list[Turns]:
        prompts = np.array([row.prompt for row in rows], dtype=np.int64)
        fitted = _pairs(*sizes.fit(prompts, np.array([row.answer for row in rows], dtype=np.int64)))
        blocks = Blocks(self._seed, block)
        self._shares = self._shares or any(row.blocks for row in rows)
        found: list[Turns] = []
        for row, (words, most) in zip(rows, fitted, strict=True):
            if not row.blocks:
                found.append((self._ask(words, most),))
                continue
            shared = blocks.prompt(row.blocks, -(-row.prompt * block // traces.BLOCK), sizes.max_in)
            said = f"{shared} {self._texts.new(_TAIL)}"
            found.append((Ask(({"role": "user", "content": said},), most, said.count(" ") + 1),))
        return found


def _pairs(prompts: lengths.Tokens, answers: lengths.Tokens) -> list[tuple[int, int]]:
    return list(zip(prompts.tolist(), answers.tolist(), strict=True))
