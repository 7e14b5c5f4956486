from __future__ import annotations

import random

import pytest

from headrace.core.events import Delta, Event, Finished, Marks, TokenLogprob
from headrace.core.plan import Drawn
from headrace.core.request import Generation
from headrace.core.sequence import Sequence, sequences
from headrace.core.teller import Taken, Teller

EOG = 0
PIECES = [b"", b"a", b"b", b"c", b"ab", b"\xe2", b"\x82", b"\xac", "é".encode(), b" end"]


def piece(token: int) -> bytes:
    return PIECES[token]


def made(max_tokens: int = 100, stop: tuple[str, ...] = ()) -> Sequence:
    """One that waits for its first token."""
    (sequence,) = sequences(Generation(7, [1, 2, 3], max_tokens, stop=stop), 1.0, piece)
    sequence.scheduled, sequence.restored, sequence.prefilled = 2.0, 3.0, 4.0
    return sequence


def teller() -> Teller:
    return Teller(piece, frozenset({EOG}))


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Delta)]


# --- booking and telling apart


def test_booking_needs_no_telling() -> None:
    t, sequence = teller(), made(max_tokens=3)
    booked = [t.book(sequence, Drawn((token,)), 5.0 + i) for i, token in enumerate((1, 2, 3))]
    assert [taken.reason for taken in booked] == [None, None, "length"]
    assert [taken.drawn for taken in booked] == [1, 2, 3]
    assert (sequence.tokens, sequence.drawn, t.tokens) == ([1, 2, 3, 1, 2, 3], 3, 3)
    assert (sequence.untold, sequence.shown) == ([], False), "telling has not begun"
    assert t.tell(booked) == [
        Delta(7, 0, "a", 1, (), Marks(1.0, 2.0, 3.0, 4.0, 5.0), (1,)),
        Delta(7, 0, "b", 1, (), None, (2,)),
        Delta(7, 0, "c", 1, (), None, (3,)),
        Finished(7, 0, "length", 3),
    ]


def test_an_ending_token_is_counted_and_not_shown() -> None:
    t, sequence = teller(), made()
    booked = [t.book(sequence, Drawn((1,)), 5.0), t.book(sequence, Drawn((EOG,)), 6.0)]
    assert t.tell(booked)[1:] == [Finished(7, 0, "stop", 2)]
    assert sequence.untold == [EOG], "no event told of it"


def test_what_a_burst_holds_after_its_end_is_not_booked() -> None:
    for drawn, ids, reason in (((1, EOG, 2), (1, EOG), "stop"), ((1, 2, 3, 1), (1, 2, 3), "length")):
        t, sequence = teller(), made(max_tokens=3)
        taken = t.book(sequence, Drawn(drawn), 5.0)
        assert (taken.ids, taken.reason, taken.drawn, t.tokens) == (ids, reason, len(ids), len(ids))
        assert sequence.tokens == [1, 2, 3, *ids]


def test_half_a_character_is_told_when_it_is_whole_with_the_marks_of_that_step() -> None:
    t, sequence = teller(), made()
    booked = [t.book(sequence, Drawn((token,)), 5.0 + i) for i, token in enumerate((5, 6, 7))]
    assert t.tell(booked) == [Delta(7, 0, "€", 3, (), Marks(1.0, 2.0, 3.0, 4.0, 7.0), (5, 6, 7))]


@pytest.mark.parametrize(
    ("stop", "tokens", "holds"),
    [
        ((), (1, 2), [False, False]),
        ((), (1, 5), [False]),
        ((), ((1, 5), (6, 7)), [True, False]),  # the first half of a character came with a whole one
        (("bc",), (1, 2, 1), [False, False]),
        (("bc",), ((1, 2), 1), [True, False]),
    ],
)
def test_an_event_says_whether_its_tokens_hold_more_than_its_text(
    stop: tuple[str, ...], tokens: tuple[int | tuple[int, ...], ...], holds: list[bool]
) -> None:
    t, sequence = teller(), made(stop=stop)
    drawn = [Drawn(ids if isinstance(ids, tuple) else (ids,)) for ids in tokens]
    events = t.tell([t.book(sequence, one, 5.0) for one in drawn])
    assert [event.holds for event in events if isinstance(event, Delta)] == holds


def test_logprobs_are_of_text_only() -> None:
    t, sequence = teller(), made()
    logprobs = tuple(TokenLogprob(token, piece(token), -1.0) for token in (1, EOG))
    (delta, _) = t.tell([t.book(sequence, Drawn((1, EOG), logprobs), 5.0)])
    assert isinstance(delta, Delta)
    assert delta.logprobs == logprobs[:1]
    assert delta.ids == (1, EOG)


# --- who owns the detokenizer


def test_without_stop_strings_booking_leaves_the_detokenizer_alone() -> None:
    t, sequence = teller(), made()
    taken = t.book(sequence, Drawn((5,)), 5.0)
    assert taken.text is None
    assert sequence.detokenizer.feed(b"\x82\xac") == "\ufffd\ufffd", "it has not seen the first byte"


def test_with_stop_strings_telling_leaves_the_detokenizer_alone() -> None:
    t, sequence = teller(), made(stop=("bc",))
    booked = [t.book(sequence, Drawn((token,)), 5.0) for token in (1, 2, 3)]
    assert [(taken.text, taken.reason) for taken in booked] == [("a", None), ("", None), ("", "stop")]
    del sequence.detokenizer
    events = t.tell(booked)
    assert texts(events) == ["a"]
    assert events[-1] == Finished(7, 0, "stop", 3)


def test_what_was_held_back_is_told_at_the_end() -> None:
    t, sequence = teller(), made(max_tokens=2, stop=("bc",))
    events = t.tell([t.book(sequence, Drawn((token,)), 5.0) for token in (1, 2)])
    assert texts(events) == ["a", "b"]


@pytest.mark.parametrize("seed", range(40))
def test_it_does_not_matter_how_far_telling_lags_behind(seed: int) -> None:
    rng = random.Random(seed)
    stop = rng.choice([(), ("abc",), ("é", "ca")])
    bursts = [tuple(rng.choices(range(1, 10), k=rng.randint(1, 3))) for _ in range(rng.randint(1, 30))]
    bursts.append((EOG,))
    length = rng.randint(1, 60)

    def told(lag: float) -> list[Event]:
        t, sequence = teller(), made(length, stop)
        events: list[Event] = []
        late: list[Taken] = []
        chance = random.Random(seed)
        for i, burst in enumerate(bursts):
            late.append(t.book(sequence, Drawn(burst), float(i)))
            over = late[-1].reason
            if chance.random() >= lag or over:
                events += t.tell(late)
                late.clear()
            if over:
                break
        return events

    at_once = told(0.0)
    assert isinstance(at_once[-1], Finished)
    assert told(0.5) == told(1.0) == at_once
