"""The file of templates → what the engine keeps warm.

Rules: this module alone reads and writes the file; what it says is decided in `kv`. A file that is named but not there
stops the start, the usual one may be missing. It is replaced as a whole, never half written.
"""

from __future__ import annotations

from pathlib import Path

from headrace.config import config_home
from headrace.core.errors import StartupError
from headrace.core.kv import Pin
from headrace.core.request import ChatRequest, Options
from headrace.gateway.model import ServedModel
from headrace.gateway.whole_file import replace_file
from headrace.kv.template_file import decoded
from headrace.kv.templates import Template, explain, parse
from headrace.settings import Config

USUAL = "templates.toml"


def template_prefixes(config: Config, model: ServedModel) -> list[Pin]:
    """What to pin: the true prefix of every template, in the file's order. Raises StartupError.

    One that is a part of another is left out: whoever holds the longer one holds both.
    """
    n_ctx = model.engine.info.n_ctx
    pins: list[Pin] = []
    for template in load_templates(config):
        tokens = explain(template, lambda chat: model.prepare_chat(ChatRequest("", tuple(chat), Options()))).tokens
        if len(tokens) >= n_ctx:
            raise StartupError(
                f"templates.{template.name}: its prefix is {len(tokens)} tokens and the model's context holds {n_ctx}, "
                "the rest of the chat included: shorten it"
            )
        if tokens:
            pins.append(Pin(template.name, tokens))
    return [pin for at, pin in enumerate(pins) if not any(_holds(other, pin, at > i) for i, other in enumerate(pins))]


def _holds(other: Pin, pin: Pin, earlier: bool) -> bool:
    """Is `pin` a part of `other`? Of two that are equal, the earlier one holds the later."""
    longer = len(other.tokens) > len(pin.tokens) or (earlier and len(other.tokens) == len(pin.tokens))
    return longer and other.tokens[: len(pin.tokens)] == pin.tokens


def templates_file(config: Config) -> Path:
    """Where the templates are, or would be. Raises StartupError where that cannot be told."""
    if config.templates.file:
        return Path(config.templates.file)
    home = config_home()
    if home is None:
        raise StartupError("there is no home directory for templates: set XDG_CONFIG_HOME or templates.file")
    return home / USUAL


def load_templates(config: Config) -> tuple[Template, ...]:
    """The configured templates; none where the usual file is not there. Raises StartupError."""
    if not config.templates.file and config_home() is None:
        return ()
    file = templates_file(config)
    text = read_text(file, missing=None if config.templates.file else "")
    try:
        return parse(decoded(text))
    except StartupError as error:
        raise StartupError(f"{file}: {error.message}") from None


def read_text(file: Path, *, missing: str | None = None) -> str:
    """The file's text; `missing`, unless None, if it is not there. Raises StartupError."""
    try:
        return file.read_bytes().decode()  # not as text: line ends are kept as they are
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise StartupError(f"{file}: there is no such file") from None
    except OSError as error:
        raise StartupError(f"{file}: {(error.strerror or 'cannot be read').lower()}") from None
    except UnicodeDecodeError as error:
        raise StartupError(f"{file}: is not UTF-8 at byte {error.start + 1}") from None


def write_text(file: Path, text: str) -> None:
    """Replace the file as a whole; it keeps its permissions, a link stays a link. Raises StartupError."""
    target = file.resolve()
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        replace_file(target, text.encode(), mode=mode)
    except UnicodeEncodeError:
        raise StartupError(f"{file}: the text cannot be written as UTF-8") from None
    except OSError as error:
        raise StartupError(f"{file}: cannot be written: {(error.strerror or 'unknown').lower()}") from None
