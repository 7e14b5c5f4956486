from __future__ import annotations

import msgspec
import pytest

from headrace_bench.selection import (
    COLUMNS,
    Facts,
    Measured,
    figures,
    fit,
    fits,
    middle,
    notes,
    parameters,
    rows,
    spread,
)

FACTS = Facts(
    quantisation="Q4_1",
    parameters=134_515_008,
    size=98_362_432,
    context=8192,
    vocabulary=49152,
    perplexity=39.499,
    bits_per_byte=1.17012,
    scored_tokens=1194,
    scored_bytes=5412,
)


def test_a_row_has_everything_or_a_dash() -> None:
    model = Measured("a", FACTS, ttft={64: [0.2, 0.1, 0.3]}, tpot=[0.010, 0.012], prefill=[200.0, 210.0, 190.0])
    row = rows([model, Measured("unread")])
    assert row == [
        ("a", "135 M", "Q4_1", "98", "200 (?–?)", "200 (?–?)", "–", "–", "11.00 ± 1.41", "39.50", "1.1701"),
    ]
    assert len(row[0]) == len(COLUMNS)


def test_an_interval_needs_six_samples() -> None:
    assert middle([1, 2, 3, 4, 5], 1) == "3 (?–?)"
    assert middle([6, 1, 2, 3, 4, 5], 1) == "3 (1–6)"
    assert middle([], 1) == "–"


def test_a_deviation_needs_two() -> None:
    assert spread([]) == "–"
    assert spread([2.0]) == "2.00"
    assert spread([1.0, 3.0]) == "2.00 ± 1.41"


def test_words_for_a_length() -> None:
    found = fit((16, 52), (144, 180))
    assert (found.base, found.slope) == (36, 1)
    assert [found.words(n) for n in (64, 512, 1)] == [28, 476, 1]
    assert fit((10, 40), (20, 60)).words(100) == 40
    with pytest.raises(ValueError, match="20 words are 40 tokens"):
        fit((10, 40), (20, 40))


@pytest.mark.parametrize(("tokens", "counts"), [(512, True), (537, True), (486, False), (540, False), (None, False)])
def test_a_prompt_of_another_length_is_not_counted(tokens: int | None, counts: bool) -> None:
    model = Measured("a")
    assert model.took(512, tokens, 0.5) is counts
    assert model.ttft == ({512: [0.5]} if counts else {})


def test_perplexity_is_explained_and_vocabularies_are_told_apart() -> None:
    other = msgspec.structs.replace(FACTS, vocabulary=32000)
    lines = notes([Measured("a", FACTS), Measured("b", FACTS, notes=["no TTFT at 2,048"])], 512, 256, 1500)
    assert "bytes from 1,500 on (5,412 bytes, 1,194 tokens for a)" in lines[0]
    assert "compare bits per byte" in lines[0]
    assert lines[-1] == "b: no TTFT at 2,048"
    assert not [line for line in lines if "different vocabularies (" in line]
    assert "(32,000, 49,152 tokens)" in notes([Measured("a", FACTS), Measured("b", other)], 512, 256, 1500)[-1]


def test_names_of_sizes() -> None:
    assert [parameters(n) for n in (134_515_008, 1_711_376_384)] == ["135 M", "1.7 B"]


def test_what_memory_does_not_hold() -> None:
    assert fits(10, None) is None
    assert fits(10, 10) is None
    assert fits(7_200_000_000, 4_000_000_000) == ("its 7.2 GB do not fit into the 4.0 GB of memory that are free")


def test_the_samples_go_into_a_file() -> None:
    found = figures([Measured("a", FACTS, ttft={64: [0.1]})])
    assert found["a"]["ttft"] == {"64": [0.1]}
    assert msgspec.json.encode(found)
