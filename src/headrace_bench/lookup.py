"""`memory`, prompt lookup: tokens per second with speculation and without, where text is copied and where it is not.

Rules: two servers are up, only one is asked at a time, and who is first changes with the round; the ratio is taken
within a round, its median is the figure; both must write the same text, for speculation changes none.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from headrace_bench.lab import Lab
from headrace_bench.memory import body
from headrace_bench.server import Server
from headrace_bench.figures.stats import median
from headrace_bench.wire import Answer, chat

LIGHTHOUSE = (
    "The lighthouse at Carrow Point was built in 1871 by a crew of forty men. They carried the stone from the quarry "
    "at Hale on flat boats, two blocks at a time. The lamp burned whale oil until 1904, when a small engine was "
    "brought from Leeds. Every night the keeper climbed 182 steps, wound the clock, cleaned the lens and wrote the "
    "weather into a green book. In the winter of 1923 the sea broke the lower door and took the boat, three barrels "
    "and the keeper's hat. The door was made again of oak and iron. Today the lamp is electric and nobody climbs the "
    "steps, but the green book is still there, open at the last page."
)
NAMES = "Anna Boris Clara David Emma Felix Greta Hugo".split()
CITIES = "Leeds York Hale Derby Bath Dover Ripon Truro".split()


def people(seed: int) -> str:
    """Eight lines of JSON, about 220 tokens, that differ with the seed."""
    rng = random.Random(seed)
    names, cities = rng.sample(NAMES, len(NAMES)), rng.sample(CITIES, len(CITIES))
    return "\n".join(
        f'{{"id": {i}, "name": "{name}", "city": "{city}", "age": {rng.randint(18, 80)}}}'
        for i, (name, city) in enumerate(zip(names, cities, strict=True))
    )


# The demo model copies a text to the last letter only if the conversation shows it once how; asked straight away it
# rewords the second sentence.
COPIES = (LIGHTHOUSE, people(0))
PROSE = ("Write a long story about a river.", "Explain how bread is made, from the field to the table.")
LONGEST = 250
OFF = ("--set", "optimizations.speculation=false")


def copying(text: str) -> list[dict[str, str]]:
    """A chat whose answer is `text`."""
    turns = (("user", text), ("assistant", text), ("user", "Please repeat that once more, word for word."))
    return [{"role": role, "content": content} for role, content in turns]


def telling(question: str) -> list[dict[str, str]]:
    """A chat whose answer is new text."""
    return [{"role": "user", "content": question}]


def lookup(lab: Lab) -> dict[str, Any]:
    """Bars: copying >= 1.5 times the tokens per second, prose >= 0.98."""
    chats = {
        **{f"copy {i}": copying(text) for i, text in enumerate(COPIES)},
        **{f"prose {i}": telling(question) for i, question in enumerate(PROSE)},
    }
    rounds: list[dict[str, dict[str, float]]] = []
    same = copied = 0
    with lab.headrace(name="headrace-on") as on, lab.headrace(*OFF, name="headrace-off") as off:
        for turn in range(lab.rounds + 1):
            found: dict[str, dict[str, float]] = {}
            for name, messages in chats.items():
                pair = {server.name: _ask(server, lab, messages) for server in ((on, off) if turn % 2 else (off, on))}
                found[name] = {server: answer.rate for server, answer in pair.items()}
                if turn == 0:
                    same += pair[on.name].text == pair[off.name].text
                    copied += name.startswith("copy") and pair[on.name].text.strip() == messages[0]["content"]
            if turn:  # the round before the first warms up, and compares the texts
                rounds.append(found)
    return {
        "copy_ratio": ratio(rounds, "copy", on.name, off.name),
        "prose_ratio": ratio(rounds, "prose", on.name, off.name),
        "same_text": same,
        "chats": len(chats),
        "copied_to_the_letter": copied,
        "rounds": rounds,
    }


def ratio(rounds: list[dict[str, dict[str, float]]], kind: str, on: str, off: str) -> float:
    """The median over rounds and chats of a kind of the rate `on` over the rate `off`."""
    return median([r[on] / r[off] for found in rounds for name, r in found.items() if name.startswith(kind)])


def _ask(server: Server, lab: Lab, messages: list[dict[str, str]]) -> Answer:
    return asyncio.run(chat(server.url, body(lab.model.stem, messages, LONGEST)))
