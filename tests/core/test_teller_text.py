from __future__ import annotations

from headrace.core.events import Delta, Event, Finished, Marks, TokenLogprob
from headrace.core.plan import Drawn
from headrace.core.request import Generation
from headrace.core.sequence import Sequence, sequences
from headrace.core.teller import Teller

END = 0
PIECES = {
    END: b"",
    1: b"a",
    2: b"bc",
    3: b"st",
    4: b"op",
    5: "é".encode()[:1],
    6: "é".encode()[1:],
    7: b"",
}
STAMPS = Marks(1.0, 2.0, 3.0, 4.0, 9.0)


def teller() -> Teller:
    return Teller(PIECES.__getitem__, frozenset({END}))


def choice(max_tokens: int = 10, stop: tuple[str, ...] = (), resume: tuple[int, ...] = ()) -> Sequence:
    generation = Generation(5, [8, 9], max_tokens, stop=stop, resume=(resume,) if resume else ())
    (s,) = sequences(generation, 1.0, PIECES.__getitem__)
    s.scheduled, s.restored, s.prefilled = 2.0, 3.0, 4.0
    return s


def tell(s: Sequence, *tokens: int, by: Teller | None = None, told: list[Event] | None = None) -> tuple[int, bool]:
    return take(by or teller(), s, Drawn(tokens), 9.0, [] if told is None else told)


def take(by: Teller, s: Sequence, drawn: Drawn, now: float, told: list[Event]) -> tuple[int, bool]:
    taken = by.book(s, drawn, now)
    told += by.tell([taken])
    return len(taken.ids), taken.reason is not None


def test_a_token_becomes_text_and_the_first_one_says_when() -> None:
    s, told = choice(), list[Event]()
    assert tell(s, 1, told=told) == (1, False)
    assert tell(s, 2, told=told) == (1, False)
    assert told == [Delta(5, 0, "a", 1, (), STAMPS, (1,)), Delta(5, 0, "bc", 1, (), None, (2,))]
    assert s.tokens == [8, 9, 1, 2]


def test_a_burst_is_one_event() -> None:
    s, told = choice(), list[Event]()
    assert tell(s, 1, 2, 1, told=told) == (3, False)
    assert told == [Delta(5, 0, "abca", 3, (), STAMPS, (1, 2, 1))]


def test_half_a_character_waits_for_the_other_half() -> None:
    s, told = choice(), list[Event]()
    tell(s, 5, told=told)
    assert told == []
    tell(s, 6, told=told)
    assert told == [Delta(5, 0, "é", 2, (), STAMPS, (5, 6))]


def test_half_a_character_at_the_end_is_not_told() -> None:
    s, told = choice(1), list[Event]()
    assert tell(s, 5, told=told) == (1, True)
    assert told == [Finished(5, 0, "length", 1)]


def test_the_ending_token_counts_and_says_nothing() -> None:
    s, told = choice(), list[Event]()
    assert tell(s, 1, END, 2, 2, told=told) == (2, True), "what a burst holds beyond it is not the answer's"
    assert told == [Delta(5, 0, "a", 2, (), STAMPS, (1, END)), Finished(5, 0, "stop", 2)]
    assert s.tokens == [8, 9, 1, END]


def test_an_answer_that_ends_at_once_has_no_text() -> None:
    s, told = choice(), list[Event]()
    assert tell(s, END, told=told) == (1, True)
    assert told == [Finished(5, 0, "stop", 1)]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    s, told = choice(stop=("stop",)), list[Event]()
    tell(s, 1, 3, told=told)
    assert told == [Delta(5, 0, "a", 2, (), STAMPS, (1, 3), True)]
    tell(s, 3, told=told)
    assert told[1:] == [Delta(5, 0, "st", 1, (), None, (3,), True)], "the first st was none, the second may be"
    assert tell(s, 4, 1, told=told) == (1, True)
    assert told[2:] == [Finished(5, 0, "stop", 4)]


def test_the_last_token_that_may_be_ends_it() -> None:
    s, told = choice(3), list[Event]()
    assert tell(s, 1, told=told) == (1, False)
    assert tell(s, 1, 2, 2, told=told) == (2, True)
    assert told[1:] == [Delta(5, 0, "abc", 2, (), None, (1, 2)), Finished(5, 0, "length", 3)]


def test_a_stop_string_with_the_last_token_is_a_stop() -> None:
    s, told = choice(2, stop=("stop",)), list[Event]()
    assert tell(s, 3, 4, told=told) == (2, True)
    assert told == [Finished(5, 0, "stop", 2)]


def test_what_was_held_back_is_told_at_the_end() -> None:
    s, told = choice(1, stop=("stop",)), list[Event]()
    tell(s, 3, told=told)
    assert told == [Delta(5, 0, "st", 1, (), STAMPS, (3,)), Finished(5, 0, "length", 1)]


def test_logprobs_go_out_with_or_without_text() -> None:
    one, two = TokenLogprob(7, b"", -1.0), TokenLogprob(1, b"a", -2.0)
    s, told = choice(), list[Event]()
    by = teller()
    take(by, s, Drawn((7,), (one,)), 8.0, told)
    take(by, s, Drawn((1, END), (two, TokenLogprob(END, b"", -3.0))), 9.0, told)
    assert told == [
        Delta(5, 0, "", 1, (one,), None, (7,)),
        Delta(5, 0, "a", 2, (two,), STAMPS, (1, END)),
        Finished(5, 0, "stop", 3),
    ]


def test_tokens_are_counted_as_far_as_they_are_the_answers() -> None:
    by = teller()
    tell(choice(), 1, 2, by=by)
    tell(choice(1), 1, 2, 2, by=by)
    assert by.tokens == 3


def test_a_replay_goes_on_without_marks_if_its_reader_has_text() -> None:
    s, told = choice(resume=(1, 3)), list[Event]()
    tell(s, 2, told=told)
    assert told == [Delta(5, 0, "bc", 1, (), None, (2,))]


def test_a_replay_remembers_half_a_stop_string() -> None:
    s, told = choice(stop=("stop",), resume=(1, 3)), list[Event]()
    assert tell(s, 4, told=told) == (1, True)
    assert told == [Finished(5, 0, "stop", 3)]
