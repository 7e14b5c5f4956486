r"""Messages → chat template → pieces → token ids.

    messages ─ guard ─▶ turns ─ Jinja, sandboxed ─▶ text ─ split ─▶ 1 'user\nhi' 2 '\n' … ─ PieceEncoder ─▶ ids

Rules: a control token in the prompt was written by the template, never by a user (`control_text` has the method); the
text of users reaches the tokenizer to the letter. A template is a file from the internet: it runs in a sandbox, its
output is bounded, and whatever goes wrong in it is the caller's 400 without a line of its source.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.core.errors import InvalidRequest
from headrace.core.request import Message
from headrace.core.tokenizer import Tokenizer
from headrace.protocol.control_text import ControlTexts
from headrace.protocol.turns import Turn, guarded, strings, tojson, with_content_only, with_objects, with_strings

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Plain ChatML, for a model that brings no template."""

MAX_RENDERED = 32 * 2**20
"""Characters a template may write."""
_MAX_REASON = 300
_MIN_CACHED = 16


class _Refusal(Exception):
    """The template called raise_exception."""


class _Broken(Exception):
    """The template failed in any other way."""


class _Generation(Extension):
    """`{% generation %}` marks what training learns from; for us its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the control tokens it may write. Read only once made: any thread may render."""

    def __init__(
        self,
        source: str,
        *,
        control: Mapping[str, int],
        bos: int | None,
        eos: int | None,
        strftime_now: Callable[[str], str] | None = None,
    ) -> None:
        """Compile. `control`: text → id of every control token. Raises ValueError, one line, for a source that is none.

        `strftime_now` (format → today's date) is `time.strftime` in a server. Without it the function is undefined, and
        templates that test for it fall back to a date of their own.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = _raise_exception
        if strftime_now is not None:
            environment.globals["strftime_now"] = strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno} of the chat template: {error.message}") from None
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError):
            raise ValueError("the chat template cannot be compiled") from None
        self._source = source
        self._knows_tool_calls = "tool_calls" in source
        self._control = ControlTexts(control)
        texts = {token: text for text, token in control.items()}
        self._given = {
            "add_generation_prompt": True,
            "bos_token": texts.get(bos, "") if bos is not None else "",
            "eos_token": texts.get(eos, "") if eos is not None else "",
            "tools": None,
        }

    def render(self, messages: Sequence[Message]) -> tuple[str | int, ...]:
        """The prompt in pieces: int, a control token that the template wrote; str, text to encode with special=False.

        Raises InvalidRequest(param="messages") with the template's own words if it refuses the messages.
        """
        if self._knows_tool_calls:
            calls = any("tool_calls" in message.fields for message in messages)
            ways = (with_objects, with_strings) if calls else (with_strings,)
        else:
            ways = (with_content_only,)
        for way in ways:
            try:
                return self._pieces([way(message) for message in messages])
            except _Broken:
                continue
            except _Refusal as refusal:
                raise InvalidRequest(
                    f"the model's chat template refuses these messages: {refusal}", param="messages"
                ) from None
        raise InvalidRequest("the model's chat template cannot render these messages", param="messages")

    def _pieces(self, turns: list[Turn]) -> tuple[str | int, ...]:
        texts = [text for turn in turns for text in strings(turn)]
        mark = self._control.mark([*texts, self._source])
        if mark is None:
            raise InvalidRequest("the messages use every private-use character there is", param="messages")
        pieces = self._run(turns, self._control.guard, mark)
        if any(map(self._control.suspicious, texts)):
            # A template that deletes from a user's text could leave a control text behind. One that does not writes the
            # same control tokens when every possible beginning is marked; if it does not, that reading is the safe one.
            safe = self._run(turns, self._control.guard_throughout, mark)
            if _tokens(safe) != _tokens(pieces):
                return safe
        return pieces

    def _run(self, turns: list[Turn], guard: Callable[[str, str], str], mark: str) -> tuple[str | int, ...]:
        marked = [guarded(turn, lambda text: guard(text, mark)) for turn in turns]
        written: list[str] = []
        room = MAX_RENDERED
        try:
            for text in self._template.generate(messages=marked, **self._given):
                written.append(text)
                room -= len(text)
                if room < 0:
                    raise _Broken
        except _Refusal as refusal:
            reason = " ".join(str(refusal).replace(mark, "").split())
            raise _Refusal(reason[:_MAX_REASON] or "it gives no reason") from None
        except Exception:
            # Undefined names, sandbox violations, arithmetic on text: whatever a template can do wrong.
            raise _Broken from None
        return self._control.split("".join(written), mark)


def _raise_exception(reason: object) -> None:
    raise _Refusal(str(reason))


def _tokens(pieces: tuple[str | int, ...]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


# Token ids ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PieceEncoder:
    """Pieces → token ids, remembering the ids of texts: the same system prompt is not tokenised for every request.

    The memory has two generations: what is used is in the young one; when that holds half of `max_bytes` it becomes the
    old one, and what the old one held is gone. Threads may share an encoder without a lock: an operation on the memory
    is one on a dict, and losing a race costs at most tokenising a text again.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int) -> None:
        """`max_bytes` bounds the memory, texts and ids together, estimated from above; 0 remembers nothing."""
        self._tokenizer = tokenizer
        self._half = max_bytes // 2
        self._young: dict[str, array[int]] = {}
        self._old: dict[str, array[int]] = {}
        self._young_bytes = 0
        self._old_bytes = 0

    @property
    def bytes(self) -> int:
        """What the memory holds now, estimated from above; <= max_bytes."""
        return self._young_bytes + self._old_bytes

    def encode(self, pieces: Sequence[str | int], *, bos: int | None, add_bos: bool) -> list[int]:
        """Ids of a rendered chat. With `add_bos` it begins with exactly one `bos`, written by the template or not."""
        ids: list[int] = []
        if add_bos and bos is not None and (not pieces or pieces[0] != bos):
            ids.append(bos)
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._text(piece))
        return ids

    def encode_raw(self, text: str, *, parse_special: bool, bos: int | None, add_bos: bool) -> list[int]:
        """Ids of a prompt without a template; [] if nothing comes of it. `parse_special`: control texts in it count.

        The BOS text at the very beginning always counts as that one token, and no other is put before it: people paste
        prompts with it, and a model with two, or with its spelling, is quietly worse.
        """
        ids: list[int] = []
        if bos is not None:
            written = self._tokenizer.piece(bos).decode("utf-8", "replace")
            if written and text.startswith(written):
                text = text.removeprefix(written)
                ids.append(bos)
            elif add_bos:
                ids.append(bos)
        if text:
            ids.extend(self._tokenizer.encode(text, special=True) if parse_special else self._text(text))
        return ids

    def _text(self, text: str) -> Sequence[int]:
        if len(text) < _MIN_CACHED:
            return self._tokenizer.encode(text, special=False)
        ids = self._young.get(text)
        if ids is None:
            ids = self._old.get(text)
            if ids is None:
                ids = array("i", self._tokenizer.encode(text, special=False))
            self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: array[int]) -> None:
        size = 4 * len(text) + ids.itemsize * len(ids) + 256  # a character takes at most 4 bytes; 256 for the objects
        if size > self._half // 2:
            return  # one huge document must not push everything else out
        if self._young_bytes + size > self._half:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[text] = ids
        self._young_bytes += size
