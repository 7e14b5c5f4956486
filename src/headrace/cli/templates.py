"""`headrace templates list|add|rm|explain`: prompts that are kept warm, and how much of each can be."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.cli.output import console
from headrace.cli.pull import fetch
from headrace.core.errors import StartupError
from headrace.kv.template_file import decoded, with_template, without_template
from headrace.kv.templates import Encode, Explanation, escaped, explain, parse
from headrace.models import alias_of, script_rate
from headrace.pins import load_templates, read_text, templates_file, write_text
from headrace.settings import Config


def show(config: Config) -> int:
    """`list`: a line a template, and a line a warning. Raises StartupError."""
    out = console(sys.stdout)
    templates = load_templates(config)
    if not templates:
        out.print(f"There are no templates in {templates_file(config)}")
        return 0
    encode = tokenizing(config)
    width = max(len(template.name) for template in templates)
    for template in templates:
        found = explain(template, encode)
        out.print(f"{found.name:<{width}}  {len(found.tokens)} of {found.total} tokens are reused")
        for warning in found.warnings:
            out.print(f"{'':<{width}}  warning: {warning}")
    return 0


def add(config: Config, name: str, *, system: str, user: str | None, literal: bool) -> int:
    """Append a template to the file. Raises StartupError, with the file as it was."""
    fields = {"system": system} if user is None else {"system": system, "user": user}
    if literal:
        fields = {key: escaped(text) for key, text in fields.items()}
    file = templates_file(config)
    new = with_template(read_text(file, missing=""), name, fields)
    parse(decoded(new))
    write_text(file, new)
    out = console(sys.stdout)
    out.print(f"{name} is in {file}; a server reads it when it starts")
    out.print(f"See what it is worth with: headrace templates explain {name}")
    return 0


def rm(config: Config, name: str) -> int:
    """Take a template out of the file. Raises StartupError, with the file as it was."""
    file = templates_file(config)
    write_text(file, without_template(read_text(file), name))
    console(sys.stdout).print(f"{name} is no longer in {file}")
    return 0


def explain_one(config: Config, name: str) -> int:
    """`explain`: which part of a template is reused, which is not, and why. Raises StartupError."""
    templates = {template.name: template for template in load_templates(config)}
    if name not in templates:
        known = ", ".join(templates) or "none"
        raise StartupError(
            f"templates.{name}: there is no such template in {templates_file(config)}; there are: {known}"
        )
    found = explain(templates[name], tokenizing(config))
    out = console(sys.stdout)
    out.print(f"{name}, with {config.model.alias or alias_of(config.model.path)}:")
    for tokens, what in breakdown(found, free=not templates[name].user):
        out.print(f"{tokens:>8}  {what}")
    for warning in found.warnings:
        out.print(f"warning: {warning}")
    return 0


def breakdown(found: Explanation, *, free: bool) -> Iterator[tuple[int, str]]:
    """(tokens, what they are), a line each. `free`: the user's message is not part of the template."""
    end = f"up to {{{found.ends_at}}}" if found.ends_at else "up to the user's message" if free else "all of it"
    yield len(found.tokens), f"reused: {end}"
    for name, tokens in found.after:
        if tokens:
            yield tokens, f"computed for each chat: the text after {{{name}}}"
    if found.frame:
        yield (
            found.frame,
            "computed for each chat: what the chat template puts behind, and a word that touches a variable",
        )
    yield found.total, "in all, without the variables"


def tokenizing(config: Config) -> Encode:
    """How the configured model tokenises a chat; the model is fetched if need be. Raises StartupError."""
    name = config.model.path
    path = name if script_rate(name) else str(fetch(name))

    from headrace.assembly import make_encode

    return make_encode(dataclasses.replace(config, model=dataclasses.replace(config.model, path=path)))


def given(option: str, text: str | None, file: Path | None) -> str | None:
    """The text of a field, given itself or as a file. Raises StartupError for both at once."""
    if text is not None and file is not None:
        raise StartupError(f"--{option} and --{option}-file: give one of them")
    return text if file is None else read_text(file)
