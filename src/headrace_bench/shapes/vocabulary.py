"""A made-up byte-pair vocabulary that splits English as a real one does: a common word is a token, a rare one some.

    256 bytes │ beginnings of words, letter by letter: ` r` ` ri` ` riv` ` rive` ` river` … │ control tokens

Rules: every token but a byte's is a merge of two that come before it, so a word's beginnings are tokens too; words with
a space before them come first, so that their merges win; what no English text needs is filled up with words of drawn
syllables; the same size and seed give the same vocabulary. Nothing here acts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from headrace_bench.load.prompts import WORDS

NORMAL, CONTROL = 1, 3
"""llama.cpp's numbers of the token types."""
BEGIN, END, HEADER, HEADER_END, TURN = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
"""The control tokens that mean something, in Llama 3's notation."""
SPACE = "Ġ"
"""How a byte-pair vocabulary writes a space."""
NEWLINES = "ĊĊ"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
COMMON = """
a all an and any are as at be been but by call can come could day did do down each find first for from get give go had
has have he her him his how i if in into is it its know like little live long look made make man many may me more most
my new no not now number of oil on one only or other out over part people place said see she so some sound take tell
than that the their them then there these they thing this time to two up use very was water way we were what when where
which who will with word work would write year you your about helper hi question say short story summarise
""".split()
STARTS = "You Write Tell Summarise Question Hi user system assistant the a".split()
"""Words that a message begins with, without a space before them."""
CONSONANTS, VOWELS = "b c d f g h j k l m n p r s t v w z br ch cl dr gr pl sh st th tr".split(), "a e i o u".split()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in the notation of byte-pair vocabularies, a printable character a byte."""

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    """Two tokens each, a space between them; the earlier one wins."""
    control: int
    """How many at the end are control tokens."""

    @property
    def types(self) -> list[int]:
        """A number of llama.cpp's for each token."""
        return [NORMAL] * (len(self.tokens) - self.control) + [CONTROL] * self.control

    def id(self, token: str) -> int:
        """ValueError: there is no such token."""
        return self.tokens.index(token)

    @property
    def silent(self) -> list[int]:
        """What an answer must not hold: control tokens would end it, and a lone byte is no text on its own."""
        return [*range(256), *range(len(self.tokens) - self.control, len(self.tokens))]


def vocabulary(size: int, control: int, seed: int) -> Vocabulary:
    """`size` tokens in all, the last `control` of them control tokens. ValueError: English does not fit into it."""
    named = [BEGIN, END, HEADER, HEADER_END, TURN]
    if control < len(named):
        raise ValueError(f"{control} control tokens are too few for {len(named)}")
    spaced = [SPACE + word for word in dict.fromkeys((*COMMON, *WORDS))]
    tokens = dict.fromkeys(_bytes())
    merges: list[str] = []
    _grow(tokens, merges, [*spaced, *(SPACE + word.capitalize() for word in STARTS)])
    drawn, room = random.Random(f"vocabulary {seed}"), size - control
    last: dict[str, None] = {}
    starts: list[str] = []
    _grow(last, starts, [NEWLINES, *STARTS], known=tokens)
    if len(tokens) + len(last) > room:
        raise ValueError(f"{size} tokens are too few for {len(tokens) + len(last) + control}")
    while len(tokens) + len(last) < room:
        word = SPACE + "".join(drawn.choice(CONSONANTS) + drawn.choice(VOWELS) for _ in range(drawn.randint(2, 3)))
        _grow(tokens, merges, [word], limit=room - len(last))
    reserved = [f"<|reserved_{i}|>" for i in range(control - len(named))]
    return Vocabulary((*tokens, *last, *named, *reserved), (*merges, *starts), control)


def _grow(
    tokens: dict[str, None], merges: list[str], words: Iterable[str], *, limit: int = 1 << 31,
    known: dict[str, None] | None = None,
) -> None:  # fmt: skip
    """Adds each word's beginnings of two characters and more, as far as there is room for them."""
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens and (known is None or word[:end] not in known):
                if len(tokens) >= limit:
                    return
                tokens[word[:end]] = None
                merges.append(f"{word[: end - 1]} {word[end - 1]}")


def _bytes() -> list[str]:
    """A printable character for each byte, those that are printable for themselves first, as GPT-2 has them."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return [chr(byte) for byte in own] + [chr(256 + i) for i in range(len(others))]
