"""Prompts of a given length that no cache has seen: plain words, each about one token. Nothing here acts.

Rules: no two prompts of a schedule are the same; what is to be shared (a system prompt, a block of a trace) is the same
text wherever it stands; another seed makes other texts, so that a second run meets no cache of the first.
"""

from __future__ import annotations

import numpy as np

WORDS = tuple(
    """
    able about above across act add after again age ago air all along also always among and animal answer any area arm
    art ask away baby back ball bank base bear beat become bed before begin behind best better between big bird black
    blood blue board boat body book born both bottom box boy bread bring brother brown build burn bus business buy by
    call came camp can cap car card care carry case cat catch cause cell center century certain chance change check
    child church city class clean clear close clothes cloud coast cold color come common cook cool corn corner cost
    could country course court cover cross crowd cry current cut dance dark day dead deal deep desk did door double
    down draw dream dress drink drive drop dry duck early earth east easy eat edge egg eight else end energy enough
    even evening event ever every exact eye face fact fall family far farm fast father fear feed feel feet few field
    fight fill film find fine finger finish fire first fish fit five flat floor flow flower fly follow food foot for
    force forest form forward four free fresh friend from front fruit full game garden gas gate general get girl give
    glass go gold good got grass gray great green ground group grow guess gun had hair half hall hand happy hard has
    hat have head hear heart heat heavy held help her here high hill his history hit hold hole home hope horse hospital
    hot hotel hour house how human hundred hunt husband ice idea inside iron island job join judge jump just keep key
    kill kind king kitchen knee knew know lake land language large last late laugh law lay lead leaf learn leave left
    leg less let letter level lie life lift light like line lip list listen little live local long look lost lot love
    low lunch machine made main make man many map mark market matter may mean meat meet men metal middle might mile
    milk mind minute miss model money month moon more morning most mother mountain mouth move much music must name
    """.split()
)


def text(rng: np.random.Generator, count: int) -> str:
    """`count` words."""
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), count).tolist())


class Texts:
    """Makes texts that it has not made before."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._made: set[str] = set()

    def new(self, count: int) -> str:
        """`count` words. Texts of one word run out after some hundred: then it has more words than asked for."""
        tries = 0
        while True:
            made = text(self._rng, count + tries // 16)
            if made not in self._made:
                self._made.add(made)
                return made
            tries += 1


class Blocks:
    """Texts of a trace's blocks: an id has one text, as long as a scaled block."""

    def __init__(self, seed: int, tokens: int) -> None:
        self._seed = seed
        self._tokens = tokens
        self._texts: dict[int, str] = {}

    def prompt(self, ids: tuple[int, ...], words: int, most: int) -> str:
        """The first `words` words of the blocks in a row, whole blocks only where they are cut at `most` words."""
        if words > most:
            words = max(1, most // self._tokens) * self._tokens
        whole, rest = divmod(words, self._tokens)
        parts = [self._text(one) for one in ids[:whole]]
        if rest and whole < len(ids):
            parts.append(" ".join(self._text(ids[whole]).split(" ")[:rest]))
        return " ".join(parts)

    def _text(self, one: int) -> str:
        found = self._texts.get(one)
        if found is None:
            found = self._texts[one] = text(np.random.default_rng([self._seed, one]), self._tokens)
        return found
