"""The figures of resumable streams as they are shown."""

from __future__ import annotations

from headrace.observe.stream_metrics import StreamFigures, stream_families


def test_every_figure_is_shown() -> None:
    figures = StreamFigures(open=1, kept=2, bytes=3, readers=4, adopted=5, unshared=6)
    figures.resumed["live"] += 7
    figures.ended["stopped"] += 8
    shown = {
        (sample.name, *sample.labels.values()): sample.value
        for family in stream_families(figures)
        for sample in family.samples
    }
    assert shown["headrace_stream_logs", "open"] == 1
    assert shown["headrace_stream_logs", "ended"] == 2
    assert shown["headrace_stream_log_bytes",] == 3
    assert shown["headrace_stream_log_readers",] == 4
    assert shown["headrace_streams_adopted_total",] == 5
    assert shown["headrace_streams_unshared_total",] == 6
    assert shown["headrace_streams_resumed_total", "live"] == 7
    assert shown["headrace_streams_resumed_total", "elsewhere"] == 0
    assert shown["headrace_stream_logs_ended_total", "stopped"] == 8
