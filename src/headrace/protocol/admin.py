"""Bodies of the admin API: parsed once, refused by the name of what is wrong.

Rule: a field that is not known is refused: one that is misspelt would switch everything where a tenth was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.protocol.fields import Field, boolean, share, text, wrong


def name(field: str, value: Any) -> str:
    """A string that is not empty."""
    if not text(field, value):
        raise wrong(field, "a name", value)
    return str(value)


ALIAS: Field[str] = Field("alias", name, "")
TO: Field[str] = Field("to", name, "")
WEIGHT: Field[float] = Field("weight", share, 1.0)
WAIT: Field[bool] = Field("wait", boolean, True)


@dataclass(frozen=True, slots=True)
class SwitchAsk:
    """`POST /admin/v1/switch`"""

    alias: str
    to: str
    weight: float
    """0 < weight <= 1: of the alias's requests."""
    wait: bool
    """Answer at the change-over; else at once."""


def parse_switch(fields: Mapping[str, Any]) -> SwitchAsk:
    """Raises InvalidRequest."""
    only(fields, "alias", "to", "weight", "wait")
    for row in (ALIAS, TO):
        if not row.read(fields):
            raise InvalidRequest(
                f"{row.name} is missing; name an {'alias' if row is ALIAS else 'engine'}", param=row.name
            )
    return SwitchAsk(ALIAS.read(fields), TO.read(fields), WEIGHT.read(fields), WAIT.read(fields))


def only(fields: Mapping[str, Any], *known: str) -> None:
    """Raises InvalidRequest if there are others."""
    unknown = len(fields.keys() - set(known))
    if unknown:
        raise InvalidRequest(
            f"the body may hold {', '.join(known)}; got {unknown} other field{'s'[: unknown > 1]}", param=None
        )
