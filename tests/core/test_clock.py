from __future__ import annotations

import pytest

from headrace.core.clock import offset


@pytest.mark.parametrize(
    ("asked", "theirs", "answered", "want"),
    [
        (10.0, 10.5, 11.0, 0.0),
        (10.0, 10.0, 11.0, 0.0),
        (10.0, 11.0, 11.0, 0.0),
        (10.0, 4.5, 11.0, 6.0),
        (10.0, 110.5, 11.0, -100.0),
    ],
)
def test_offset(asked: float, theirs: float, answered: float, want: float) -> None:
    assert offset(asked, theirs, answered) == want


def test_an_offset_maps_their_stamp_between_ours() -> None:
    assert 10.0 <= 7777.25 + offset(10.0, 7777.25, 12.0) <= 12.0
