from __future__ import annotations

import pytest

from headrace_bench.client.stamps import heard
from headrace_bench.record import Chunk, Record


def record(*chunks: tuple[float, str], outcome: str = "ok", sent: float | None = 1.0) -> Record:
    return Record(
        index=7, scheduled=None, dispatched=1.0, outcome=outcome, sent=sent,  # type: ignore[arg-type]
        chunks=tuple(Chunk(at, "text", len(text.encode())) for at, text in chunks),
        text="".join(text for _, text in chunks),
    )  # fmt: skip


def token(number: int, wrote: float, asked: float | None = None) -> str:
    return f"{number:05}:{wrote:017.6f}{'' if asked is None else f':{asked:017.6f}'} "


def test_what_a_relay_adds() -> None:
    told = heard(record((1.5, token(0, 101.4, 101.1)), (1.6, token(1, 101.45)), (1.7, token(2, 101.6))), 100.0, 3)
    assert (told.index, told.ok, told.lost, told.doubled, told.foreign) == (7, True, 0, 0, 0)
    assert [t.number for t in told.tokens] == [0, 1, 2]
    assert [t.delay for t in told.tokens] == pytest.approx([0.1, 0.15, 0.1])
    # There and back took 0.5 s, of which the upstream had 0.3.
    assert told.ttft_added == pytest.approx(0.2)
    assert told.gaps_added() == pytest.approx([0.05, -0.05])
    assert told.gaps_added(101.5, 102.0) == pytest.approx([-0.05])


def test_a_token_came_with_the_chunk_that_ends_it() -> None:
    whole = token(0, 101.0, 100.9) + token(1, 101.0)
    told = heard(record((1.1, whole[:50]), (1.2, whole[50:])), 100.0, 2)
    assert [t.came for t in told.tokens] == pytest.approx([101.1, 101.2])
    told = heard(record((1.1, whole)), 100.0, 2)
    assert [t.came for t in told.tokens] == pytest.approx([101.1, 101.1])


def test_what_is_lost_doubled_or_foreign_is_counted() -> None:
    texts = [token(0, 101.0, 100.9), token(2, 101.1), token(2, 101.1), token(1, 101.2), "é?", token(5, 101.3)]
    told = heard(record(*((1.0 + n, text) for n, text in enumerate(texts))), 100.0, 6)
    assert (told.lost, told.doubled, told.foreign) == (2, 2, 2)


def test_an_answer_that_failed_loses_nothing_besides() -> None:
    told = heard(record((1.1, token(0, 101.0, 100.9)), outcome="truncated"), 100.0, 5)
    assert (told.ok, told.lost, len(told.tokens)) == (False, 0, 1)
    assert told.ttft_added == pytest.approx(0.0)


@pytest.mark.parametrize(
    "one",
    [
        record(),
        record((1.1, token(1, 101.0))),
        record((1.1, token(0, 101.0, 100.0)), sent=None),
    ],
)
def test_there_is_no_ttft_without_its_first_token(one: Record) -> None:
    assert heard(one, 100.0, 2).ttft_added is None
