"""The small language of `--arrivals` and `--workload`: `kind:value,option=number,…`, read once. Nothing here acts.

    gamma:4,cv=2.5        trace:/data/conv.csv,time_scale=0.5        chat
    ─kind ─value option   ─kind ──value─────── option                ─kind

Rules: what cannot be read is a `Misuse` that names the flag, what was given and what would do; an option that nobody
asked for is one too, so that a misspelt one never passes for a default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from headrace_bench.fault import Misuse

_OPTION = re.compile(r"[a-z_]+=")


@dataclass(frozen=True, slots=True)
class Term:
    """One such text, taken apart."""

    flag: str
    text: str
    kind: str
    value: str
    options: dict[str, str]

    @classmethod
    def read(cls, flag: str, text: str) -> Term:
        """Commas in front of the first option belong to the value: file names and lists have them."""
        kind, _, rest = text.strip().partition(":")
        parts = rest.split(",") if rest else []
        if not rest and "," in kind:
            kind, *parts = kind.split(",")
        options: dict[str, str] = {}
        while parts and _OPTION.match(parts[-1]):
            key, _, value = parts.pop().partition("=")
            if key in options:
                raise Misuse(f"{flag} {text}: {key} is given twice")
            options[key] = value
        return cls(flag, text, kind, ",".join(parts), options)

    def wrong(self, why: str) -> Misuse:
        """To be raised."""
        return Misuse(f"{self.flag} {self.text}: {why}")

    def only(self, *options: str) -> None:
        """Misuse where it has other options than these."""
        for option in self.options:
            if option not in options:
                known = f"this kind takes {', '.join(options)}" if options else "this kind takes no options"
                raise self.wrong(f"{option} is not known here; {known}")

    def number(self, text: str | None, what: str, least: float = 0.0, above: bool = False) -> float:
        """`text` as a finite number of at least `least`, or of more than that."""
        try:
            value = float(text or "")
        except ValueError:
            raise self.wrong(f"{what} has to be a number, not {text!r}") from None
        if not math.isfinite(value) or value < least or (above and value == least):
            raise self.wrong(f"{what} has to be {'more than' if above else 'at least'} {least:g}, not {text}")
        return value

    def positive(self, text: str | None, what: str) -> float:
        """`text` as a number above 0."""
        return self.number(text, what, above=True)

    def count(self, text: str | None, what: str, least: int = 1) -> int:
        """`text` as a whole number of at least `least`."""
        value = self.number(text, what, least)
        if value != int(value):
            raise self.wrong(f"{what} has to be a whole number, not {text}")
        return int(value)

    def unknown(self, kinds: Collection[str]) -> Misuse:
        """To be raised for a kind that is none of `kinds`."""
        return self.wrong(f"{self.kind or 'nothing'} is not a kind; choose from {', '.join(kinds)}")


def shown(value: float) -> str:
    """A number as one would write it in such a text; reads back as the same number."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
