"""The fields of a request body, one row each: name, parser, default.

Rules: an explicit null counts as absent; a value is never mended silently; what is wrong is said with the field's name,
what it must be and what was given. Numbers are shown as they came; text is the user's own and never repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.core.errors import InvalidRequest, Unsupported
from headrace.core.request import Decay, Pacing

T = TypeVar("T")
Parser = Callable[[str, Any], T]
"""(field name, decoded JSON value, never None) → the value. Raises InvalidRequest with that name as `param`."""

MAX_INT = 2**31 - 1
MAX_STOPS = 4
MAX_BIAS = 100.0
MAX_WINDOW = 256


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """A row. `name` is the path as the user writes it, `headrace.timings`; its last part is the key in the object."""

    name: str
    parse: Parser[T]
    default: T

    def read(self, fields: Mapping[str, Any]) -> T:
        """The field's value, `default` where it is missing or null. Raises InvalidRequest."""
        value = fields.get(self.name.rpartition(".")[2])
        return self.default if value is None else self.parse(self.name, value)

    def read_or(self, fields: Mapping[str, Any], default: T) -> T:
        """The same with another default than the row's."""
        value = fields.get(self.name.rpartition(".")[2])
        return default if value is None else self.parse(self.name, value)


def shown(value: Any) -> str:
    """A JSON value as an error may show it: numbers themselves, of anything else only the kind."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        digits = str(value)
        return digits if len(digits) <= 40 else f"a number of {len(digits)} digits"
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    return "an object"


def wrong(name: str, rule: str, value: Any) -> InvalidRequest:
    """The error for a field that must be `rule` and is `value`."""
    return InvalidRequest(f"{name} must be {rule}; got {shown(value)}", param=name)


def nested_deeper(value: Any, limit: int) -> bool:
    """Whether arrays and objects stand more than `limit` levels deep in a decoded JSON value. Takes no stack."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return bool(level)


# Parsers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _within(value: Any, low: float, high: float) -> bool:
    # Compared as it is: an integer may be too large for float(). NaN fails every comparison.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def number(low: float, high: float) -> Parser[float]:
    """low <= x <= high. Integers are numbers too; booleans and digits in quotes are not."""
    rule = f"a number from {low:g} to {high:g}"

    def parse(name: str, value: Any) -> float:
        if not _within(value, low, high):
            raise wrong(name, rule, value)
        return float(value)

    return parse


def share(name: str, value: Any) -> float:
    """0 < x <= 1"""
    if not _within(value, 0.0, 1.0) or value == 0:
        raise wrong(name, "a number above 0 and at most 1", value)
    return float(value)


def above_zero(name: str, value: Any) -> float:
    """x > 0, finite."""
    if not _within(value, 0.0, sys.float_info.max) or value == 0:
        raise wrong(name, "a number above 0", value)
    return float(value)


def integer(low: int, high: int) -> Parser[int]:
    """low <= i <= high. 1.0 is an integer, as in JSON it is the same number as 1."""
    rule = f"an integer from {low} to {high}"

    def parse(name: str, value: Any) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and value.is_integer())) or not low <= value <= high:
            raise wrong(name, rule, value)
        return int(value)

    return parse


def boolean(name: str, value: Any) -> bool:
    """true or false, nothing that only looks like it."""
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def text(name: str, value: Any) -> str:
    """Any string."""
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """An object, its own fields unchecked."""
    if not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value


def one_of(values: Mapping[str, T]) -> Parser[T]:
    """One of these strings, exactly as written; what it stands for."""
    rule = " or ".join(f'"{known}"' for known in values)

    def parse(name: str, value: Any) -> T:
        if not isinstance(value, str) or value not in values:
            raise wrong(name, rule, value)
        return values[value]

    return parse


def decay(name: str, value: Any) -> Decay:
    """An object of `every`, `factor` and `floor`, each with a default and nothing else in it: a name that is misspelt
    would give other text than was asked for, and nobody would know."""
    every = Field(f"{name}.every", integer(1, 10_000), 10)
    factor = Field(f"{name}.factor", share, 0.95)
    floor = Field(f"{name}.floor", number(0, 2), 0.4)
    given = mapping(name, value)
    unknown = len(given.keys() - {"every", "factor", "floor"})
    if unknown:
        raise InvalidRequest(
            f"{name} may hold every, factor and floor; got {unknown} other field{'s'[: unknown > 1]}", param=name
        )
    return Decay(every.read(given), factor.read(given), floor.read(given))


def pace(name: str, value: Any) -> Pacing:
    """One of "off", "adaptive" and "window:N"."""
    if value == "off":
        return Pacing()
    if value == "adaptive":
        return Pacing(adaptive=True)
    window = value.removeprefix("window:") if isinstance(value, str) and value.startswith("window:") else ""
    # As for token ids: few digits, so that int() has no long work on hostile ones.
    digits = window.isascii() and window.isdigit() and len(window) <= 10
    if digits and 1 <= int(window) <= MAX_WINDOW:
        return Pacing(window=int(window))
    rule = f'"off", "adaptive" or "window:N" with N from 1 to {MAX_WINDOW}'
    given = f'"window:{window}"' if digits else shown(value)
    raise InvalidRequest(f"{name} must be {rule}; got {given}", param=name)


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or up to four, none empty: an empty one would match before the first token."""
    rule = f"a string or a list of at most {MAX_STOPS} strings, none of them empty"
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise wrong(name, rule, value)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise InvalidRequest(f"{name} must be {rule}; it holds {shown(stop)}", param=name)
    return tuple(stops)


def logit_bias(n_vocab: int) -> Parser[tuple[tuple[int, float], ...]]:
    """{"token id": addend}: ids within the vocabulary, addends from -100 to 100."""

    def parse(name: str, value: Any) -> tuple[tuple[int, float], ...]:
        biases: dict[int, float] = {}
        for key, bias in mapping(name, value).items():
            # Ten digits hold every id there can be, and keep int() from long work on hostile keys.
            token = int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else -1
            if not 0 <= token < n_vocab:
                raise InvalidRequest(f"{name}: every key must be a token id from 0 to {n_vocab - 1}", param=name)
            if not _within(bias, -MAX_BIAS, MAX_BIAS):
                raise InvalidRequest(
                    f"{name}: every value must be a number from -{MAX_BIAS:g} to {MAX_BIAS:g}; got {shown(bias)}",
                    param=name,
                )
            biases[token] = float(bias)
        return tuple(biases.items())

    return parse


def unsupported(feature: str, *harmless: Any) -> Parser[None]:
    """Refuses what would ask for a feature that is not there; `harmless` values ask for nothing and pass."""

    def parse(name: str, value: Any) -> None:
        if value not in harmless:
            raise Unsupported(f"{name}: {feature} not supported yet; leave this field out", param=name)

    return parse
