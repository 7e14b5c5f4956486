from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from headrace.core.detokenizer import Detokenizer

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


def shown(pieces: Iterable[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """(what each piece showed, and what the end showed last; whether it stopped)."""
    detokenizer = Detokenizer(stop)
    texts = [detokenizer.feed(piece) for piece in pieces]
    return [*texts, detokenizer.flush()], detokenizer.stopped


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """Whole, byte by byte, and in two at every place."""
    yield [data]
    yield [bytes([b]) for b in data]
    for i in range(len(data) + 1):
        yield [data[:i], data[i:]]


def obvious(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """Character by character: the first stop string that is complete ends it, the longest if two end together."""
    for end in range(1, len(text) + 1):
        met = [s for s in stop if text[:end].endswith(s)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


@pytest.mark.parametrize(
    "text", ["", "a", "ok \U0001f525\u010fx!", FAMILY, "é漢\U0001f525\u200d!\n", "\ufffd real", "\0"]
)
def test_valid_text_survives_any_cut(text: str) -> None:
    for pieces in cuts(text.encode()):
        texts, stopped = shown(pieces)
        assert "".join(texts) == text
        assert not stopped
        assert "\ufffd" not in "".join(texts).replace("\ufffd real", "")


def test_a_character_is_shown_when_it_is_whole() -> None:
    texts, _ = shown([b"ok ", b"\xf0\x9f", b"\x94\xa5", b"\xc4", b"\x8f", b"x!"])
    assert texts == ["ok ", "", "🔥", "", "ď", "x!", ""]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xf0\x9f\x94 x", "\ufffd x"),
        (b"a\xffb", "a\ufffdb"),
        (b"\x94\xa5", "\ufffd\ufffd"),
        (b"\xf0\x9f\x94\xf0\x9f\x94\xa5", "\ufffd🔥"),
        (b"\xc0\xaf", "\ufffd\ufffd"),
        (b"\xed\xa0\x80!", "\ufffd\ufffd\ufffd!"),
    ],
)
def test_broken_bytes_give_one_replacement_each_and_leave_the_rest(data: bytes, text: str) -> None:
    for pieces in cuts(data):
        assert "".join(shown(pieces)[0]) == text


@pytest.mark.parametrize("n", range(1, 19))
def test_a_half_character_at_the_end_is_dropped(n: int) -> None:
    data = FAMILY.encode()[:n]
    for pieces in cuts(data):
        assert "".join(shown(pieces)[0]) == data.decode("utf-8", "ignore")


def test_a_stop_string_over_several_tokens_does_not_leak() -> None:
    texts, stopped = shown([b"x ", b"EN", b"D O", b"F", b" y"], ("END OF",))
    assert (texts, stopped) == (["x ", "", "", "", "", ""], True)


def test_held_text_is_shown_at_the_end() -> None:
    texts, stopped = shown([b"UNO ", b"DUE ", b"TR", b"E"], ("TRE\nAAAA",))
    assert (texts, stopped) == (["UNO ", "DUE ", "", "", "TRE"], False)


def test_held_text_is_shown_as_soon_as_it_cannot_be_a_stop() -> None:
    texts, _ = shown([b"a", b"EN", b"EN", b"d"], ("END",))
    assert texts == ["a", "", "EN", "ENd", ""]


def test_only_the_possible_stop_is_held() -> None:
    texts, _ = shown([b"word aab", b"!"], ("aabaac",))
    assert texts == ["word ", "aab!", ""]


def test_a_stop_string_inside_one_token() -> None:
    assert shown([b"AB STOP CD", b"EF"], ("STOP",)) == (["AB ", "", ""], True)


def test_after_a_stop_nothing_comes() -> None:
    detokenizer = Detokenizer(("s",))
    assert detokenizer.feed(b"as") == "a"
    assert detokenizer.feed(b"more") == ""
    assert detokenizer.flush() == ""
    assert detokenizer.stopped


def test_flush_shows_once() -> None:
    detokenizer = Detokenizer(("stop",))
    detokenizer.feed(b"sto")
    assert detokenizer.flush() == "sto"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("xabcd", ("abcd", "c"), "xab"),
        ("xabc", ("ab", "abc"), "x"),
        ("xabc", ("abc", "ab"), "x"),
        ("xabc", ("bc", "abc"), "x"),
        ("aaab", ("aab",), "a"),
        ("xyz", ("zz", "z"), "xy"),
        ("ab🔥cd", ("b🔥c",), "a"),
        ("日本語", ("本",), "日"),
        ("abc", ("zz",), "abc"),
        ("aXbY", ("Y", "X"), "a"),
    ],
)
def test_stops_that_overlap(text: str, stop: tuple[str, ...], kept: str) -> None:
    assert obvious(text, stop)[0] == kept
    for pieces in cuts(text.encode()):
        texts, stopped = shown(pieces, stop)
        assert ("".join(texts), stopped) == obvious(text, stop)


def test_any_text_any_stops_any_cut() -> None:
    for seed in range(1500):
        rng = random.Random(seed)
        letters = rng.choice(["ab", "abc", "aé🔥"])
        text = "".join(rng.choices(letters, k=rng.randrange(14)))
        stop = tuple("".join(rng.choices(letters, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 4)))
        data = text.encode()
        ends = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(6)))
        pieces = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]
        texts, stopped = shown(pieces, stop)
        assert ("".join(texts), stopped) == obvious(text, stop), (seed, pieces, stop)


def test_nothing_is_held_longer_than_needed() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        text = "".join(rng.choices("ab", k=12))
        stop = tuple("".join(rng.choices("ab", k=rng.randint(3, 5))) for _ in range(2))
        detokenizer = Detokenizer(stop)
        out = ""
        for i, letter in enumerate(text):
            out += detokenizer.feed(letter.encode())
            if detokenizer.stopped:
                break
            so_far = text[: i + 1]
            held = max(n for n in range(6) if any(n < len(s) and so_far.endswith(s[:n]) for s in stop))
            assert out == so_far[: len(so_far) - held]
