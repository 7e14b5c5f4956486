"""Which acceptance case is where: every one has a test in this directory, or a reason why not yet.

A case's test is called `test_oc_NN_…`. Parts of a case that need what is not there yet are left out of its test with a
comment; they come with the same part of the program as in the table below.
"""

from __future__ import annotations

import re
from pathlib import Path

CASES = (*range(1, 69), 74, 84, 86, 91)

TOOLS = "tool calls: refused by name until they exist"
STRUCTURED = "structured output: refused by name until it exists"
WIRE = "the checks of proxies that `headrace doctor` makes"
FRONT = "the client package and its hook; today's page has tests of its own"

LATER: dict[int, str] = {
    28: TOOLS,
    29: TOOLS,
    31: STRUCTURED,
    65: WIRE,
    66: FRONT,
    67: FRONT,
}
"""Case → what it waits for."""


def covered() -> set[int]:
    """The cases that have a test."""
    files = Path(__file__).parent.glob("test_*.py")
    return {int(n) for file in files for n in re.findall(r"^(?:async )?def test_oc_(\d\d)_", file.read_text(), re.M)}


def test_every_case_is_tested_or_has_a_reason() -> None:
    missing = sorted(set(CASES) - covered() - LATER.keys())
    assert not missing, f"neither a test nor a reason for OC-{missing}"


def test_no_reason_outlives_its_case() -> None:
    stale = sorted(LATER.keys() & covered())
    assert not stale, f"OC-{stale} are tested: take them from the table"
    assert covered() | LATER.keys() <= set(CASES), "a test of a case that there is not"
