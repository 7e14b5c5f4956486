from __future__ import annotations

import numpy as np

from headrace_bench.load.prompts import WORDS, Blocks, Texts, text


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_words_are_plain_and_different() -> None:
    assert len(set(WORDS)) == len(WORDS) > 300
    assert all(word.isascii() and word.islower() and word.isalpha() for word in WORDS)


def test_a_text_has_the_words_asked_for() -> None:
    assert len(text(rng(), 900).split()) == 900
    assert text(rng(), 50) == text(rng(), 50) != text(rng(2), 50)


def test_no_text_is_made_twice_even_where_there_are_few() -> None:
    texts = Texts(rng())
    made = [texts.new(1) for _ in range(2 * len(WORDS))]
    assert len(set(made)) == len(made)
    assert all(len(one.split()) == 4 for one in (texts.new(4) for _ in range(100)))


def test_blocks_that_are_equal_are_equal_text() -> None:
    blocks = Blocks(seed=1, tokens=16)
    one = blocks.prompt((0, 5, 9), words=40, most=512)
    other = blocks.prompt((0, 5, 7), words=48, most=512)
    assert len(one.split()) == 40
    assert len(other.split()) == 48
    assert one.split()[:32] == other.split()[:32]
    assert one.split()[32:] != other.split()[32:40]
    assert Blocks(seed=1, tokens=16).prompt((0, 5, 9), 40, 512) == one
    assert Blocks(seed=2, tokens=16).prompt((0, 5, 9), 40, 512) != one


def test_long_prompts_are_cut_at_a_block() -> None:
    blocks = Blocks(seed=1, tokens=16)
    assert len(blocks.prompt(tuple(range(100)), words=1600, most=100).split()) == 96
    assert len(blocks.prompt(tuple(range(100)), words=1600, most=8).split()) == 16
