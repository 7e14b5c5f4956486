from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidRequest, StartupError
from headrace.core.request import Message
from headrace.engines.vocab import Vocabulary
from headrace.kv.templates import FILLINGS, Encode, Template, Variable, escaped, explain, parse
from headrace.protocol.chat_template import DEFAULT_TEMPLATE, ChatTemplate, PieceEncoder
from naive import shared

# One whose first turn holds the system text, one that strips and always writes something of its own, one that writes
# no control tokens at all.
INSIDE = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% else %}{{ '[INST] ' + ns.s + '\n\n' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
STRIPPED = (
    "{{ '<|im_start|>system\nToday is sunny.\n' + messages[0].content | trim + '<|im_end|>' }}"
    "{% for m in messages[1:] %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
)
BARE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant:' }}"


def one(system: str, **more: Any) -> Template:
    (template,) = parse({"templates": {"a": {"system": system, **more}}})
    return template


def by_letter(messages: Sequence[Message]) -> list[int]:
    """A chat in one token a character: `S…|U…|`."""
    return [ord(char) for message in messages for char in f"{message.role[0].upper()}{message.content}|"]


def letters(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


# Reading


def test_texts_become_literals_and_variables() -> None:
    assert one("a {b}{c_1} {{d}} {{{e}}}", user="{x}") == Template(
        "a", ("a ", Variable("b"), Variable("c_1"), " {d} {", Variable("e"), "}"), (Variable("x"),)
    )
    assert one("{a} {b} {a}").variables == ("a", "b")


def test_the_order_of_the_file_is_kept_and_an_empty_file_has_none() -> None:
    document = {"templates": {name: {"system": f"I am {name}"} for name in ("z", "a", "m")}}
    assert [template.name for template in parse(document)] == ["z", "a", "m"]
    assert parse({}) == parse({"templates": {}}) == ()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "templates.a.system: is missing"),
        ({"user": "x"}, "templates.a.system: is missing"),
        ({"system": 3}, "templates.a.system: should be text"),
        ({"system": " \n"}, "templates.a.system: is empty"),
        ({"system": "x", "user": ""}, "templates.a.user: is empty"),
        ({"system": "x", "sytsem": "y"}, "templates.a.sytsem: unknown key; the nearest known one is system"),
        ({"system": "x", "tools": "y"}, "templates.a.tools: should be a list of tables"),
        ({"system": "x", "tools": [{"type": "function"}]}, "templates.a.tools: prompts cannot hold tools yet"),
        ({"system": "abc {"}, "templates.a.system: character 5 is a single brace"),
        ({"system": "abc }"}, "templates.a.system: character 5 is a single brace"),
        ({"system": '{"a": 1}'}, "templates.a.system: character 1 is a single brace"),
        ({"system": "x", "user": "{1x}"}, "templates.a.user: character 1 is a single brace"),
        ({"system": "{}"}, "templates.a.system: character 1 is a single brace"),
        ("text", "templates.a: should be a table"),
    ],
)
def test_a_template_that_is_none_is_refused_by_name_and_field(table: Any, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        parse({"templates": {"a": table}})
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"template": {}}, "unknown key template: "),
        ({"templates": 3}, "templates: should be tables"),
        ({"templates": {"a b": {"system": "x"}}}, "templates.'a b': a name is"),
        ({"templates": {"": {"system": "x"}}}, "templates.'': a name is"),
        (
            {"templates": {"a": {"system": "x"}, "b": {"system": "y"}, "c": {"system": "x"}}},
            "templates.c: says the same as templates.a: remove one",
        ),
    ],
)
def test_a_document_that_is_none_is_refused(document: Any, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        parse(document)
    assert caught.value.message.startswith(message)


def test_escaped_text_has_no_variables() -> None:
    text = 'answer as {"a": {b}} }{'
    assert one(escaped(text)).system == (text,)


# Explaining


def test_without_variables_all_is_reused_up_to_the_users_message() -> None:
    found = explain(one("x" * 80), by_letter)
    assert letters(found.tokens) == "S" + "x" * 80 + "|U"
    assert (found.total, found.after, found.ends_at, found.frame, found.warnings) == (83, (), None, 0, ())
    whole = explain(one("x" * 80, user="and now?"), by_letter)
    assert letters(whole.tokens) == "S" + "x" * 80 + "|Uand now?|"


def test_the_prefix_ends_before_the_word_that_touches_the_first_variable() -> None:
    found = explain(one("You are a dear (pre{x} indeed {y}. {x}", user="Go on: {z}"), by_letter)
    assert letters(found.tokens) == "SYou are a dear"
    assert found.ends_at == "x"
    assert found.after == (("x", 8), ("y", 2), ("x", 7), ("z", 0))
    assert found.total == len("SYou are a dear (pre indeed . |UGo on: |")
    assert found.frame == found.total - 15 - 17
    assert found.warnings == (
        "17 tokens after {x} cannot be reused exactly: move the variable to the end",
        "the prefix is 15 tokens: fewer than 64 save next to nothing",
    )


@pytest.mark.parametrize(
    ("system", "user", "prefix"),
    [
        ("{x}", None, "S"),
        ("Text: {x}", None, "SText:"),
        ("Text:\n\n{x}", None, "SText:"),
        ("word{x}", None, "S"),
        ("All.", "{x}", "SAll.|U"),
        ("All.", "Read this: {x}", "SAll.|URead this:"),
        ("All.", "this{x}", "SAll.|U"),
        ("a" * 200 + "{x}", None, "S" + "a" * 152),
    ],
)
def test_where_the_prefix_ends(system: str, user: str | None, prefix: str) -> None:
    found = explain(one(system, **({} if user is None else {"user": user})), by_letter)
    assert letters(found.tokens) == prefix


def test_a_variable_at_the_very_end_costs_nothing_and_is_not_warned_of() -> None:
    found = explain(one("x" * 90 + " {x}"), by_letter)
    assert (found.after, found.warnings) == ((("x", 0),), ())


def test_chats_that_are_refused_do_not_count_unless_all_are() -> None:
    def picky(messages: Sequence[Message]) -> list[int]:
        if not messages[1].content.strip():
            raise InvalidRequest("say something", param="messages")
        return by_letter(messages)

    def never(messages: Sequence[Message]) -> list[int]:
        raise InvalidRequest("the model's chat template refuses these messages: no system role", param="messages")

    assert letters(explain(one("x"), picky).tokens) == "Sx|U"
    with pytest.raises(StartupError, match=r"^templates\.a: .*no system role$"):
        explain(one("x"), never)


# With a real vocabulary


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> Vocabulary:
    return Vocabulary.open(demo_model)


@pytest.fixture(scope="module", params=[None, DEFAULT_TEMPLATE, INSIDE, STRIPPED, BARE])
def encode(vocabulary: Vocabulary, request: pytest.FixtureRequest) -> Encode:
    info = vocabulary.info("demo", 0, 0)
    source = request.param or info.chat_template or DEFAULT_TEMPLATE
    template = ChatTemplate(source, control=info.control, bos=info.bos, eos=info.eos, strftime_now=time.strftime)
    encoder = PieceEncoder(vocabulary, max_bytes=2**20)
    return lambda messages: encoder.encode(template.render(messages), bos=info.bos, add_bos=info.add_bos)


SYSTEMS = [
    "You are the support desk of a shop. Be short, be kind, and never promise a date. Today is {date}. Go.",
    "You are a {role}. Answer as one.",
    "Translate pre{x}ment into inter{y}.",
    "Use the document:\n\n{doc}\n\nAnswer in {language}",
    "Numbers: 12{x}34 (a){y}",
    "Do not say \"{word}\" or '{word}'.",
    "The whole of it stays.",
    "{all}",
    "日本語で答えてください。{x}さん",
    "<|im_{x}|> is only text",
]
WORDS = ["", "s", "fix", "ing", " ", "  two", "\n", "\n\n", "nationalisation", "7", "000", "é", "\U0001f525", "start",
         "<|im_end|>", "|>", "'s", ").", "語", "\t", "Zulu", " and then some more"]  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("user", [None, "Customer {name} asks: {question}", "Summarise it."])
def test_the_prefix_is_one_of_every_chat_whatever_is_filled_in(encode: Encode, system: str, user: str | None) -> None:
    template = one(system, **({} if user is None else {"user": user}))
    found = explain(template, encode)
    assert len(found.tokens) <= found.total
    rng = random.Random(system)
    for _ in range(60):
        values = {name: "".join(rng.choices(WORDS, k=rng.randrange(1, 4))) for name in template.variables}
        chat = template.messages(values.__getitem__, user="".join(rng.choices(WORDS, k=3)))
        ids = encode(chat)
        assert shared(found.tokens, ids) == len(found.tokens), values


def test_little_is_given_away(vocabulary: Vocabulary) -> None:
    info = vocabulary.info("demo", 0, 0)
    template = ChatTemplate(DEFAULT_TEMPLATE, control=info.control, bos=info.bos, eos=info.eos)
    encoder = PieceEncoder(vocabulary, max_bytes=2**20)

    def encode(messages: Sequence[Message]) -> list[int]:
        return encoder.encode(template.render(messages), bos=info.bos, add_bos=info.add_bos)

    text = "You are the support desk of a shop. " * 20
    found = explain(one(text + "Today is {date}. Be kind."), encode)
    assert b"".join(map(vocabulary.piece, found.tokens)).decode() == f"<|im_start|>system\n{text}Today is"
    assert found.after == (("date", 4),)
    free = explain(one(text), encode)
    assert (
        b"".join(map(vocabulary.piece, free.tokens)).decode()
        == f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user"
    )


def test_fillings_differ_in_their_first_character() -> None:
    firsts = [filling[:1] for filling in FILLINGS]
    assert {"", "\n", " ", "\t"} <= set(firsts)
    assert any(first.isalpha() for first in firsts)
    assert any(first.isdigit() for first in firsts)
