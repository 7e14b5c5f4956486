from __future__ import annotations

import pytest

from headrace.core.errors import (
    BodyTooLarge,
    Draining,
    EngineFailed,
    EngineUnavailable,
    HeadraceError,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unauthorized,
)
from headrace.core.timeline import Timeline
from headrace.observe.record import OUTCOMES, Record, outcome_of


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("m"), "invalid"),
        (Unauthorized("m"), "invalid"),
        (BodyTooLarge("m"), "invalid"),
        (Overloaded("m"), "rejected"),
        (EngineUnavailable("m"), "rejected"),
        (Draining("m"), "rejected"),
        (EngineFailed("m"), "error"),
        (InternalError("m"), "error"),
    ],
)
def test_the_outcome_says_whose_fault_it_was(error: HeadraceError, outcome: str) -> None:
    assert outcome_of(error) == outcome
    assert outcome in OUTCOMES


def test_a_record_begins_as_that_of_a_client_that_left_before_an_answer() -> None:
    record = Record("id", "GET", "other", Timeline(0.0))
    assert record.status == 499
    assert record.model is None
