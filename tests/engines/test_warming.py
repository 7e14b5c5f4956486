from __future__ import annotations

from headrace.core.request import Sampling
from headrace.engines.warming import WARM


def test_every_way_to_draw_is_warmed_at_start() -> None:
    plain = Sampling()
    for name in Sampling.__struct_fields__:
        if name != "seed":
            assert any(getattr(way, name) != getattr(plain, name) for way in WARM), name
