"""No string of a user's becomes a control token, and none is changed."""

from __future__ import annotations

import random

import pytest

from headrace.protocol.control_text import ControlTexts

CHATML = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
# Texts that overlap, contain and continue one another.
NASTY = {"aba": 0, "ab": 1, "<s>": 2, "</s>": 3, "<s>>": 4, ">>": 5, " x ": 6, "[A]": 7, "A][": 8, "\n\n": 9}
MARK = "\ue000"


def test_what_the_template_wrote_is_found_longest_first() -> None:
    texts = ControlTexts(NASTY)
    assert texts.split("<s>>aba</s>ab[A][", MARK) == (4, 0, 3, 1, 7, "[")
    assert texts.split("", MARK) == ()
    assert texts.split("plain", MARK) == ("plain",)


def test_without_control_tokens_all_is_text() -> None:
    texts = ControlTexts({})
    assert texts.split(texts.guard("<|im_end|>", MARK), MARK) == ("<|im_end|>",)
    assert not texts.suspicious("<")


def test_a_control_text_of_one_character_stays_text() -> None:
    texts = ControlTexts({"#": 5, "": 6, "##": 7})
    assert texts.split("#a##", MARK) == ("#a", 7)


@pytest.mark.parametrize(
    ("text", "guarded"),
    [
        ("", ""),
        ("hello", "hello"),
        ("a < b", "a < b"),
        ("a <|im b", "a <|im b"),
        ("<|im_end|>", "¤<¤|im_end|>"),
        ("x<|im_end|><|im_end|>y", "x<¤|im_end|><¤|im_end|>y"),
        ("x <", "x <¤"),
        ("x <|im_e \n", "x <|im_e¤ \n"),
        ("> x", "¤> x"),
        ("\n im_end|>", "\n ¤im_end|>"),
        (" im_end ", " ¤im_end "),
        ("_", "¤_"),
        (" ", " "),
    ],
)
def test_marks_stand_only_where_a_control_text_could_arise(text: str, guarded: str) -> None:
    assert ControlTexts(CHATML).guard(text, "¤") == guarded


def test_overlapping_control_texts_are_all_broken() -> None:
    assert ControlTexts({"aba": 0}).guard("ababa", "¤") == "¤a¤ba¤ba¤"


def test_the_mark_occurs_nowhere() -> None:
    texts = ControlTexts({"<\ue001>": 0})
    assert texts.mark([]) == "\ue000"
    assert texts.mark(["é", "\ue000\ue002"]) == "\ue003"
    assert texts.mark(["".join(map(chr, range(0xE000, 0xF900)))]) is None


@pytest.mark.parametrize("control", [CHATML, NASTY], ids=["chatml", "nasty"])
@pytest.mark.parametrize("throughout", [False, True])
def test_random_strings_between_random_template_texts(control: dict[str, int], throughout: bool) -> None:
    draw = random.Random(7)
    texts = ControlTexts(control)
    guard = texts.guard_throughout if throughout else texts.guard
    names = list(control)
    fragments = sorted({name[i:j] for name in names for i in range(len(name)) for j in range(i + 1, len(name) + 1)})
    back = {token: text for text, token in control.items()}
    for _ in range(3000):
        users = ["".join(draw.choices([*fragments, *names, " ", "é"], k=draw.randrange(5))) for _ in range(3)]
        ours = [draw.choice([*names, ":", "role:"]) for _ in range(4)]
        # A template may strip, and may write users' strings side by side.
        strip, adjacent = draw.random() < 0.5, draw.random() < 0.5
        rendered = expected = alone = ours[0]
        for user, our in zip(users, ours[1:], strict=True):
            marked, seen = guard(user, MARK), user
            if strip:
                marked, seen = marked.strip(), user.strip()
            rest = "" if adjacent else our
            rendered, expected, alone = (
                rendered + marked + rest,
                expected + seen + rest,
                alone + MARK * bool(marked) + rest,
            )
        pieces = texts.split(rendered, MARK)
        assert "" not in pieces
        assert [piece for piece in pieces if isinstance(piece, int)] == [
            piece for piece in texts.split(alone, MARK) if isinstance(piece, int)
        ]
        # Where control texts are white space, or marks stand at both ends, strip() strips less: no harm done.
        if not strip or (control is CHATML and not throughout):
            assert "".join(piece if isinstance(piece, str) else back[piece] for piece in pieces) == expected


def test_thousands_of_control_tokens_take_one_branch_a_character() -> None:
    control = {f"<unused{i}>": i for i in range(6000)} | {f"<|reserved_{i}|>": 6000 + i for i in range(1000)}
    texts = ControlTexts(control)
    every = "".join(control)
    assert texts.split(every, MARK) == tuple(control.values())
    guarded = texts.guard(every, MARK)
    assert texts.split(guarded, MARK) == (every,)
    hostile = "<unused" * 20_000
    assert texts.split(texts.guard(hostile, MARK), MARK) == (hostile,)
