from __future__ import annotations

import pytest

from headrace.core.admission import Backlog, Bounds
from headrace.core.errors import Overloaded
from headrace.core.events import Admitted, Delta, Event, Failed, Finished
from headrace.core.request import Generation
from headrace.engines.base import EngineStats
from headrace.engines.streams import Streams
from headrace.testing import ManualClock


class Sink(list[Event]):
    """Remembers what it was given."""

    def __call__(self, event: Event) -> None:
        self.append(event)


def streams_of(max_waiting: int) -> Streams:
    return Streams(Backlog(Bounds(max_waiting)), ManualClock())


def opened(streams: Streams, rid: int, n: int = 1) -> Sink:
    sink = Sink()
    streams.open(Generation(rid, [1], 1, n), sink)
    return sink


def test_events_go_to_their_own_sink_in_order() -> None:
    streams = streams_of(10)
    a, b = opened(streams, 1), opened(streams, 2)
    events: list[Event] = [Admitted(1, 0, 0), Admitted(2, 0, 0), Delta(2, 0, "x", 1), Delta(1, 0, "y", 1)]
    streams.deliver(events)
    assert a == [events[0], events[3]]
    assert b == [events[1], events[2]]


def test_the_last_choice_s_end_ends_the_generation() -> None:
    streams = streams_of(10)
    sink = opened(streams, 1, n=2)
    streams.deliver([Admitted(1, 0, 0), Finished(1, 0, "stop", 1)])
    assert 1 in streams
    streams.deliver([Admitted(1, 1, 0), Finished(1, 1, "stop", 1)])
    assert 1 not in streams
    assert len(sink) == 4
    streams.deliver([Delta(1, 1, "late", 1)])
    assert len(sink) == 4


def test_a_failure_ends_all_choices() -> None:
    streams = streams_of(10)
    sink = opened(streams, 1, n=3)
    streams.deliver([Admitted(1, 0, 0), Failed(1, "c", "m"), Delta(1, 0, "late", 1), Failed(1, "c", "m")])
    assert sink == [Admitted(1, 0, 0), Failed(1, "c", "m")]
    assert len(streams) == 0


def test_nothing_comes_after_a_close() -> None:
    streams = streams_of(10)
    sink = opened(streams, 1)
    assert streams.close(1)
    assert not streams.close(1)
    streams.deliver([Delta(1, 0, "late", 1)])
    assert sink == []


def test_a_sink_may_close_its_stream_and_open_another() -> None:
    streams = streams_of(1)
    other = Sink()

    def sink(event: Event) -> None:
        streams.close(1)
        streams.open(Generation(2, [1], 1), other)

    streams.open(Generation(1, [1], 1), sink)
    streams.deliver([Admitted(1, 0, 0), Delta(1, 0, "no more", 1), Admitted(2, 0, 0)])
    assert other == [Admitted(2, 0, 0)]
    assert (len(streams), streams.waiting) == (1, 0)


def test_a_stream_is_over_when_its_sink_hears_of_the_end() -> None:
    streams = streams_of(10)
    live: list[bool] = []
    streams.open(Generation(1, [1], 1), lambda event: live.append(1 in streams))
    streams.deliver([Admitted(1, 0, 0), Finished(1, 0, "stop", 1)])
    assert live == [True, False]


def test_waiting_counts_generations_that_no_step_has_worked_on() -> None:
    streams = streams_of(10)
    for rid in range(5):
        opened(streams, rid, n=2)
    assert streams.waiting == 5
    streams.deliver([Admitted(0, 0, 0), Admitted(0, 1, 0), Admitted(1, 1, 0)])
    assert streams.waiting == 3
    streams.close(0)
    streams.close(2)
    assert streams.waiting == 2
    streams.deliver([Failed(3, "c", "m")])
    assert streams.waiting == 1
    streams.fail_all("c", "m")
    assert (streams.waiting, len(streams)) == (0, 0)


def test_a_full_queue_refuses() -> None:
    streams = streams_of(2)
    opened(streams, 1)
    opened(streams, 2)
    with pytest.raises(Overloaded) as caught:
        opened(streams, 3)
    assert caught.value.message.count("2") == 2
    assert caught.value.retry_after == 1
    assert 3 not in streams
    streams.deliver([Admitted(1, 0, 0)])
    opened(streams, 3)
    with pytest.raises(Overloaded):
        opened(streams, 4)


def test_fail_all_tells_each_once() -> None:
    streams = streams_of(10)
    sinks = [opened(streams, rid, n=2) for rid in range(3)]
    streams.deliver([Finished(1, 0, "stop", 1)])
    streams.fail_all("code", "message")
    assert [sink[-1] for sink in sinks] == [Failed(rid, "code", "message") for rid in range(3)]
    streams.fail_all("code", "message")
    assert [len(sink) for sink in sinks] == [1, 2, 1]


def test_it_says_how_many() -> None:
    streams = streams_of(10)
    opened(streams, 1)
    opened(streams, 2)
    streams.deliver([Admitted(2, 0, 0)])
    assert repr(streams) == "<Streams [2 live, 1 waiting]>"


def test_who_would_be_late_is_refused_by_the_engine_s_figures() -> None:
    clock = ManualClock()
    streams = Streams(Backlog(Bounds()), clock)
    sink = Sink()
    streams.open(Generation(1, [1] * 1000, 1, deadline=0.5), sink)
    streams.learn(EngineStats(prefill_s=0.001, decode_share=0.5))
    with pytest.raises(Overloaded, match=r"4\.0 s.*3 s") as caught:
        streams.open(Generation(2, [2] * 1000, 1, deadline=3.0), sink)
    assert (caught.value.reason, caught.value.retry_after) == ("deadline", 1)
    assert 2 not in streams
    streams.deliver([Admitted(1, 0, 0)])
    streams.learn(EngineStats(prefill_s=0.001, decode_share=0.5, begun_tokens=400))
    streams.open(Generation(2, [2] * 1000, 1, deadline=3.0), sink)
    streams.close(1)
    streams.close(2)
    streams.open(Generation(3, [3] * 1000, 1, deadline=2.0), sink)


def test_waiting_makes_a_prompt_go_before_shorter_ones() -> None:
    clock = ManualClock()
    streams = Streams(Backlog(Bounds()), clock)
    streams.learn(EngineStats(prefill_s=0.001))
    streams.open(Generation(1, [1] * 3000, 1), Sink())
    short = Generation(2, [2] * 500, 1, deadline=1.0)
    streams.open(short, Sink())
    streams.close(2)
    clock.advance(10.5)
    with pytest.raises(Overloaded):
        streams.open(Generation(3, [3] * 500, 1, deadline=1.0), Sink())


# --- a worker's death


def told(streams: Streams, rid: int, index: int, *ids: int) -> None:
    streams.deliver([Delta(rid, index, "x", len(ids), ids=ids)])


def test_a_replay_goes_on_from_the_tokens_told() -> None:
    streams = streams_of(10)
    asked = Generation(1, [9, 8], 5, n=4, stop=("s",))
    streams.open(asked, Sink())
    assert streams.place(1) is asked
    streams.deliver([Admitted(1, i, 0) for i in (0, 1, 3)])
    told(streams, 1, 0, 4, 5)
    told(streams, 1, 3, 7)
    told(streams, 1, 0, 6)
    streams.deliver([Finished(1, 3, "stop", 2)])
    assert streams.displace() == [1]
    again = streams.place(1)
    assert again.resume == ((4, 5, 6), (), (), None)
    assert (again.prompt, again.max_tokens, again.n, again.stop) == ([9, 8], 5, 4, ("s",))
    assert asked.resume == ()
    told(streams, 1, 0, 7)
    streams.displace()
    assert streams.place(1).resume == ((4, 5, 6, 7), (), (), None)


def test_of_two_admissions_of_a_choice_one_is_told() -> None:
    streams = streams_of(10)
    sink = opened(streams, 1, n=2)
    streams.deliver([Admitted(1, 0, 0)])
    streams.displace()
    streams.deliver([Admitted(1, 0, 7), Admitted(1, 1, 3), Admitted(1, 1, 3)])
    assert sink == [Admitted(1, 0, 0), Admitted(1, 1, 3)]
    assert streams.waiting == 0


def test_who_told_most_is_the_first_suspect() -> None:
    streams = streams_of(10)
    for rid in range(6):
        opened(streams, rid, n=2)
    for rid in (0, 1, 2, 3, 5):
        streams.place(rid)
    streams.deliver([Admitted(rid, 0, 0) for rid in (1, 2, 3)])
    told(streams, 2, 0, 1, 2)
    told(streams, 3, 0, 1)
    told(streams, 3, 1, 1, 2)
    assert streams.unplaced() == [4]
    assert streams.displace() == [3, 2, 1], "0 and 5 were in the worker's queue"
    assert streams.unplaced() == [0, 1, 2, 3, 4, 5]
    assert streams.displace() == []


def test_if_nobody_was_computed_all_that_the_worker_had_are_suspects() -> None:
    streams = streams_of(10)
    for rid in range(3):
        opened(streams, rid)
    streams.place(0)
    streams.place(2)
    assert streams.displace() == [0, 2]


def test_begun_are_the_choices_that_are_computed() -> None:
    streams = streams_of(10)
    opened(streams, 1, n=4)
    assert streams.begun(1) == set()
    streams.deliver([Admitted(1, 0, 0), Admitted(1, 2, 0), Admitted(1, 3, 0), Finished(1, 2, "stop", 1)])
    assert streams.begun(1) == {0, 3}


def test_a_pause_is_remembered() -> None:
    streams = streams_of(10)
    opened(streams, 1)
    assert not streams.paused(1)
    assert streams.pause(1, True)
    assert streams.paused(1)
    streams.displace()
    assert streams.paused(1)
    assert streams.pause(1, False)
    assert not streams.paused(1)
    assert not streams.pause(2, True)
    assert not streams.paused(2)
