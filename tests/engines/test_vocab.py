from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.core.errors import StartupError
from headrace.engines.llama_lib import C
from headrace.engines.vocab import Vocabulary, open_model

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
TEXTS = [
    "",
    "a",
    " ",
    "  two spaces first",
    "Hello, world!\n\n\tindented\r\n",
    "é漢\U0001f525 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u2028\u2029\u0085\ufeff\ufffd",
    "nul \0 inside",
    "x" * 3000,
    " " * 500,
    "\ud800 half",
]


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> Vocabulary:
    return Vocabulary.open(demo_model)


def back(vocabulary: Vocabulary, ids: list[int]) -> str:
    return b"".join(map(vocabulary.piece, ids)).decode("utf-8", "surrogatepass")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_comes_back(vocabulary: Vocabulary, text: str, special: bool) -> None:
    ids = vocabulary.encode(text, special=special)
    assert back(vocabulary, ids) == text
    assert all(0 <= token < vocabulary.size for token in ids)


def test_any_text_comes_back(vocabulary: Vocabulary) -> None:
    rng = random.Random(3)
    for _ in range(300):
        points = rng.choices([*range(32, 127), *range(0x80, 0x3000), *range(0x1F300, 0x1F700)], k=rng.randrange(40))
        text = "".join(map(chr, points))
        assert back(vocabulary, vocabulary.encode(text, special=False)) == text


def test_no_bos_is_added(vocabulary: Vocabulary) -> None:
    assert vocabulary.encode("", special=True) == []
    assert vocabulary.piece(vocabulary.encode("hello", special=True)[0]) == b"hello"


def test_control_text_is_a_control_token_only_if_asked(vocabulary: Vocabulary) -> None:
    control = set(vocabulary.info("m", 1, 0).control.values())
    text = f"{IM_START}user\nhi{IM_END}"
    plain, special = vocabulary.encode(text, special=False), vocabulary.encode(text, special=True)
    assert not control & set(plain)
    assert special[0] == vocabulary.info("m", 1, 0).control[IM_START]
    assert special[-1] == vocabulary.info("m", 1, 0).control[IM_END]
    assert back(vocabulary, plain) == back(vocabulary, special) == text


def test_a_control_token_has_a_text_but_not_in_answers(vocabulary: Vocabulary) -> None:
    control = vocabulary.info("m", 1, 0).control
    assert len(control) > 3
    for text, token in control.items():
        assert vocabulary.piece(token) == text.encode()
        assert vocabulary.answer_piece(token) == b""


def test_every_other_token_shows_its_bytes(vocabulary: Vocabulary) -> None:
    control = set(vocabulary.info("m", 1, 0).control.values())
    pieces = {token: vocabulary.piece(token) for token in range(vocabulary.size) if token not in control}
    assert all(vocabulary.answer_piece(token) == piece for token, piece in pieces.items())
    assert sum(len(piece) == 0 for piece in pieces.values()) == 0
    singles = {piece for piece in pieces.values() if len(piece) == 1}
    assert {bytes([byte]) for byte in range(32, 127)} <= singles
    assert max(map(len, pieces.values())) > 64, "longer than the first buffer"


def test_threads_may_share_it(vocabulary: Vocabulary) -> None:
    texts = [f"{i} " + text for i in range(20) for text in TEXTS[:8]]
    want = [vocabulary.encode(text, special=True) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda text: vocabulary.encode(text, special=True), texts))
        assert got == want
        assert list(pool.map(lambda ids: back(vocabulary, ids), got)) == texts


def test_what_the_file_says_of_itself(vocabulary: Vocabulary) -> None:
    info = vocabulary.info("demo", 2048, 1_700_000_000)
    assert (info.name, info.n_ctx, info.created) == ("demo", 2048, 1_700_000_000)
    assert info.n_vocab == vocabulary.size == 49152
    assert info.control[IM_START] == info.bos
    assert info.control[IM_END] == info.eos
    assert info.eos in info.eog
    assert info.control["<|endoftext|>"] in info.eog
    assert not info.add_bos
    assert info.chat_template is not None
    assert "add_generation_prompt" in info.chat_template


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        open_model(path, vocab_only=True)
    assert "\n" not in caught.value.message
    assert str(path) in caught.value.message
    return caught.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.gguf")


def test_a_folder(tmp_path: Path) -> None:
    assert "directory" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all", b"version https://git-lfs.github.com/spec/v1"])
def test_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert "not a GGUF file" in refusal(path)


@pytest.mark.parametrize("size", [4, 24, 1000, 100_000, 3_000_000])
def test_a_file_that_was_cut(tmp_path: Path, demo_model: Path, size: int) -> None:
    path = tmp_path / "m.gguf"
    with demo_model.open("rb") as whole:
        path.write_bytes(whole.read(size))
    assert "m.gguf is broken" in refusal(path) or "m.gguf is cut short" in refusal(path)
    with pytest.raises(StartupError):
        Vocabulary.open(path)


def test_its_memory_is_given_back(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, freed = C.llama_model_free, []

    def record(model: object) -> None:
        freed.append(model)
        free(model)

    monkeypatch.setattr(C, "llama_model_free", record)
    vocabulary = Vocabulary.open(demo_model)
    assert vocabulary.encode("a", special=False)
    assert not freed
    del vocabulary
    assert len(freed) == 1
