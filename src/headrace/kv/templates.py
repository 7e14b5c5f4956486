"""Prompt templates: what a file may say, and how much of each is the same in every chat that is made from it.

    [templates.support]
    system = "You are the support desk of Acme. … Today is {date}."     {name} is a variable, {{ and }} are braces
    user = "Question: {question}"                                       without it, the user's message is free

    system text          variable   text after it       the chat template's own
    ├──── reused ───┤┄┄┄┤ {date} ├── computed again ──┤ <|im_end|>⏎<|im_start|>user⏎ …
                     ^ a word that touches a variable is not counted on: with it, it may become other tokens

Rules: the KV of a token holds all that came before it, so only what stands before the first variable can be reused
exactly. How much that is, is found out, not reckoned: the chat is rendered and tokenised with fillings that differ in
their first character, and what all of them share is the prefix. So it holds for any chat template and any tokenizer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from headrace.core.errors import InvalidRequest, StartupError
from headrace.core.request import Message
from headrace.core.sequence import common_prefix

Encode = Callable[[Sequence[Message]], list[int]]
"""A chat's token ids, as a request with these messages would get them. Raises InvalidRequest."""

SHORT = 64
"""A prefix of fewer tokens saves next to nothing."""

FILLINGS = (
    "", "Zulu", " alpha", "    x", "7", "\n", "\n\n\nline", "\t-", "s", "ing", "'s", "é", "字", "- ", ". ", '"', "{"
)  # fmt: skip
"""Texts for variables. They begin with all that a tokenizer may draw into the token before: letters, digits, signs, and
white space of every kind."""

REACH = 48
"""Characters: no token of the usual vocabularies is longer, runs of white space aside."""

KEYS = ("system", "user", "tools")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BRACES = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}|[{}]")


@dataclass(frozen=True, slots=True)
class Variable:
    """A place that every chat fills in its own way."""

    name: str


Part = str | Variable


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with holes."""

    name: str
    system: tuple[Part, ...]
    user: tuple[Part, ...] = ()
    """Empty: the user's message is whatever the user writes."""

    @property
    def variables(self) -> tuple[str, ...]:
        """In the order of their first use."""
        return tuple(dict.fromkeys(part.name for part in self.system + self.user if isinstance(part, Variable)))

    def messages(self, fill: Callable[[str], str], *, user: str) -> list[Message]:
        """The chat's first two turns. `fill`: variable → text; `user`: the second, if the template leaves it free."""
        second = _filled(self.user, fill) if self.user else user
        return [Message("system", _filled(self.system, fill)), Message("user", second)]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a template is worth. All numbers are tokens."""

    name: str
    tokens: tuple[int, ...]
    """The true prefix: what every chat made from the template begins with."""
    total: int
    """What would be the same if the variables were not there, the chat template's own tokens included."""
    after: tuple[tuple[str, int], ...]
    """(variable, tokens of the text between it and the next), in order. They cannot be reused."""
    warnings: tuple[str, ...]

    @property
    def ends_at(self) -> str | None:
        """The variable that ends the prefix; None if there is none."""
        return self.after[0][0] if self.after else None

    @property
    def frame(self) -> int:
        """Tokens behind the first variable that are neither it nor the template's text, but the chat template's."""
        return max(0, self.total - len(self.tokens) - sum(tokens for _, tokens in self.after))


# Reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def parse(document: Mapping[str, Any]) -> tuple[Template, ...]:
    """The templates of a decoded TOML document, in its order. Raises StartupError with the template and the field."""
    for key in document:
        if key != "templates":
            raise StartupError(f"unknown key {key}: a file of templates holds tables [templates.NAME] only")
    tables = document.get("templates", {})
    if not isinstance(tables, dict):
        raise StartupError("templates: should be tables [templates.NAME]")
    found: dict[tuple[Any, ...], Template] = {}
    for name, table in tables.items():
        template = _template(name, table)
        twin = found.setdefault((template.system, template.user), template)
        if twin is not template:
            raise StartupError(f"templates.{name}: says the same as templates.{twin.name}: remove one of them")
    return tuple(found.values())


def _template(name: str, table: Any) -> Template:
    if not _NAME.fullmatch(name):
        raise StartupError(f"templates.{name!r}: a name is 1 to 64 letters, digits, _ or -")
    where = f"templates.{name}"
    if not isinstance(table, dict):
        raise StartupError(f"{where}: should be a table with system and, if need be, user")
    for key in table:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0)
            raise StartupError(f"{where}.{key}: unknown key; the nearest known one is {near[0]}")
    if "tools" in table:
        tools = table["tools"]
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise StartupError(f"{where}.tools: should be a list of tables, one a tool")
        raise StartupError(f"{where}.tools: prompts cannot hold tools yet, so they have no prefix: remove it")
    if "system" not in table:
        raise StartupError(f"{where}.system: is missing")
    return Template(name, **{field: _parts(f"{where}.{field}", text) for field, text in table.items()})


def _parts(where: str, text: Any) -> tuple[Part, ...]:
    """Text → literals and variables; no two literals in a row, none empty."""
    if not isinstance(text, str):
        raise StartupError(f"{where}: should be text")
    if not text.strip():
        raise StartupError(f"{where}: is empty")
    parts: list[Part] = []
    literal, at = "", 0
    for brace in _BRACES.finditer(text):
        literal += text[at : brace.start()]
        at = brace.end()
        if brace[1]:
            parts += [literal, Variable(brace[1])] if literal else [Variable(brace[1])]
            literal = ""
        elif len(brace[0]) == 2:
            literal += brace[0][0]
        else:
            raise StartupError(
                f"{where}: character {brace.start() + 1} is a single brace: write {{name}} for a variable, "
                f"{brace[0] * 2} for a brace"
            )
    literal += text[at:]
    return tuple([*parts, literal] if literal else parts)


def escaped(text: str) -> str:
    """Text for a file of templates in which every brace is a brace."""
    return text.replace("{", "{{").replace("}", "}}")


def _filled(parts: Sequence[Part], fill: Callable[[str], str]) -> str:
    return "".join(part if isinstance(part, str) else fill(part.name) for part in parts)


# Explaining ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def explain(template: Template, encode: Encode) -> Explanation:
    """Find the true prefix. Raises StartupError if the model's chat template refuses every chat made from it."""
    prefix = _shared(template, encode, FILLINGS)
    if template.variables:
        cut = _shared(_before_first_variable(template), encode, ("",))
        prefix = prefix[: common_prefix(prefix, cut)]
    total = len(_shared(template, encode, ("",)))
    after = tuple(_after(template, encode))
    return Explanation(template.name, tuple(prefix), total, after, tuple(_warnings(len(prefix), after)))


def _shared(template: Template, encode: Encode, fillings: Sequence[str]) -> list[int]:
    """What chats begin with whatever the user writes, the variables being any of `fillings`."""
    shared: list[int] | None = None
    refused: InvalidRequest | None = None
    for filling in fillings:
        for user in ("",) if template.user else FILLINGS:
            try:
                ids = encode(template.messages(lambda name: filling, user=user))  # noqa: B023 - called at once
            except InvalidRequest as error:
                refused = error  # a chat like this cannot be asked for, so it does not count
                continue
            shared = ids if shared is None else shared[: common_prefix(shared, ids)]
    if shared is None:
        reason = refused.message if refused else "there is nothing to render"
        raise StartupError(f"templates.{template.name}: {reason}")
    return shared


def _before_first_variable(template: Template) -> Template:
    """The template up to its first variable, without the word or the white space that touches it.

    No choice of fillings could tell all that a tokenizer may do with `pre{x}`: the word becomes part of the variable.
    """
    system, variable = _until_variable(template.system)
    if variable:
        # A `user` that is there stays there, empty: whose message it is decides how the chat goes on.
        return replace(template, system=system, user=("",) if template.user else ())
    user, _ = _until_variable(template.user)
    return replace(template, user=user or ("",))


def _until_variable(parts: tuple[Part, ...]) -> tuple[tuple[Part, ...], bool]:
    """(literal before the first variable, shortened; whether there was a variable)"""
    if not parts or (len(parts) == 1 and isinstance(parts[0], str)):
        return parts, False
    return ((_without_last_word(parts[0]),) if isinstance(parts[0], str) else ()), True


def _without_last_word(text: str) -> str:
    word = len(text.rstrip()) if text[-1:].isspace() else len(text) - len(re.split(r"\s", text[-REACH:])[-1])
    return text[:word].rstrip()


def _after(template: Template, encode: Encode) -> Iterator[tuple[str, int]]:
    """For each use of a variable: its name, and the tokens that the text up to the next one adds."""
    parts = [*template.system, *template.user]
    starts = [at for at, part in enumerate(parts) if isinstance(part, Variable)]
    for start, end in pairwise([*starts, len(parts)]):
        variable = parts[start]
        assert isinstance(variable, Variable)
        if end == start + 1:
            yield variable.name, 0
        else:
            before, behind = (_shared(_first(template, at), encode, ("Zulu",)) for at in (start + 1, end))
            yield variable.name, max(0, len(behind) - len(before))


def _first(template: Template, parts: int) -> Template:
    """The template with its first so many parts."""
    rest = max(0, parts - len(template.system))
    user = (template.user[:rest] or ("",)) if template.user else ()
    return replace(template, system=template.system[:parts], user=user)


def _warnings(prefix: int, after: tuple[tuple[str, int], ...]) -> Iterator[str]:
    lost = sum(tokens for _, tokens in after)
    if lost:
        name = after[0][0]
        yield f"{lost} token{'s' * (lost != 1)} after {{{name}}} cannot be reused exactly: move the variable to the end"
    if prefix < SHORT:
        yield f"the prefix is {prefix} token{'s' * (prefix != 1)}: fewer than {SHORT} save next to nothing"
