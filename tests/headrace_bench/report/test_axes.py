from __future__ import annotations

import pytest

from headrace_bench.report import axes, palette


def labels(low: float, high: float) -> list[str]:
    """Of the ticks inside the limits."""
    drawn, put = palette.figure()
    axes.time_axis(put, "x", [low, high], "nothing")
    drawn.canvas.draw()
    left, right = put.get_xlim()
    ticks = [*put.xaxis.get_major_ticks(), *put.xaxis.get_minor_ticks()]
    return [tick.label1.get_text() for tick in ticks if left <= tick.get_loc() <= right and tick.label1.get_text()]


def test_an_axis_of_times_has_labels_however_narrow_or_wide() -> None:
    assert {"50 ms", "100 ms", "200 ms"} <= set(labels(40, 300))
    assert {"1 ms", "1 s"} <= set(labels(0.5, 30_000))
    assert labels(150, 260) == ["200 ms"]


def test_zero_and_nothing() -> None:
    assert labels(0.0, 10.0)
    _, put = palette.figure()
    axes.time_axis(put, "y", [], "nothing here")
    assert [text.get_text() for text in put.texts] == ["nothing here"]


def test_seconds_have_room_at_both_ends() -> None:
    _, put = palette.figure()
    axes.clock_axis(put, [0.0, 100.0])
    assert put.get_xlim() == (-2.0, 102.0)
    axes.clock_axis(put, [5.0])
    assert put.get_xlim() == (4.0, 6.0)


@pytest.mark.parametrize(("ms", "text"), [(0.25, "0.25 ms"), (999, "999 ms"), (1500, "1.5 s")])
def test_milliseconds_in_words(ms: float, text: str) -> None:
    assert axes.shown_ms(ms) == text


def test_parts_that_nobody_has_are_in_no_legend() -> None:
    _, put = palette.figure()
    axes.stacked(put, [{"lag": 0.0, "prefill": 3.0}, {"prefill": 1.0, "queue": 2.0}], ["a", "b"], 0.5)
    legend = put.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["queue", "prefill"]
