from __future__ import annotations

from headrace_bench.report import palette
from headrace_bench.report.stages import CLIENT, NETWORK, REST, SERVER, UNTOLD


def test_every_stage_has_a_colour_of_its_own() -> None:
    assert set(palette.STAGES) == {*CLIENT, NETWORK, *SERVER, UNTOLD, REST}
    told = [colour for name, colour in palette.STAGES.items() if name != UNTOLD]
    assert len(told) == len(set(told))


def test_a_dollar_in_a_name_begins_no_formula() -> None:
    with palette.looks():
        drawn, axes = palette.figure()
        axes.set_title(palette.unparsed("$5 and $10 \\alpha"))
    assert "$5 and $10 \\alpha" in palette.svg(drawn)


def test_settings_hold_inside_only() -> None:
    import matplotlib

    before = matplotlib.rcParams["svg.hashsalt"]
    with palette.looks():
        assert matplotlib.rcParams["svg.hashsalt"] == "headrace-bench"
    assert matplotlib.rcParams["svg.hashsalt"] == before


def test_markup_in_a_name_is_text_in_the_svg() -> None:
    with palette.looks():
        drawn, axes = palette.figure()
        axes.set_title("<script>&")
    assert "<script>" not in palette.svg(drawn)
