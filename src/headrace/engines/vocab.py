"""A GGUF's vocabulary: text to ids, ids to bytes, and what the model file says about itself.

The server process opens the file with `vocab_only` (milliseconds, no weights); the engine uses the vocabulary of its
whole model.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any

from headrace.core.errors import StartupError
from headrace.core.file_name import shown
from headrace.engines.base import ModelInfo
from headrace.engines.gguf import check_parts
from headrace.engines.llama_lib import C, load_model, model_meta, recent_log
from headrace.protocol.defaults import read_defaults


def open_model(path: Path, *, vocab_only: bool, extra_buffers: bool = True) -> Any:
    """A `llama_model *`. Raises StartupError in one line if the file is missing, no GGUF, or broken."""
    check_parts(path)  # what can be told without the library, in better words than its own
    model = load_model(path, vocab_only=vocab_only, extra_buffers=extra_buffers)
    if not model:
        raise StartupError(
            f"cannot load the model file {shown(path)}: {recent_log() or 'it is broken or of an unknown kind'}"
        )
    return model


class Vocabulary:
    """Tokenizer over a `llama_model *` that the caller keeps alive.

    `encode` and `piece` may be called from any thread.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._vocab = C.llama_model_get_vocab(model)
        self.size: int = C.llama_vocab_n_tokens(self._vocab)
        self._pieces: list[bytes | None] = [None] * self.size
        self._answers: list[bytes | None] = [None] * self.size

    @classmethod
    def open(cls, path: Path) -> Vocabulary:
        """Only the vocabulary of a file; its memory is given back with the object. Raises StartupError."""
        model = open_model(path, vocab_only=True)
        vocabulary = cls(model)
        # At the exit of the process nobody needs it back, and the library may be gone before.
        weakref.finalize(vocabulary, C.llama_model_free, model).atexit = False
        return vocabulary

    @property
    def there(self) -> bool:
        """Does the file have one?"""
        return int(C.llama_vocab_type(self._vocab)) != C.LLAMA_VOCAB_TYPE_NONE

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`, no BOS added."""
        data = text.encode("utf-8", "surrogatepass")
        size = len(data) + 8
        ids = (C.llama_token * size)()
        n = C.llama_tokenize(self._vocab, data, len(data), ids, size, False, special)
        if n < 0:  # more tokens than bytes: only seen with a vocabulary that adds a space in front
            size = -n
            ids = (C.llama_token * size)()
            n = C.llama_tokenize(self._vocab, data, len(data), ids, size, False, special)
        return ids[:n]

    def piece(self, token: int) -> bytes:
        """The token's bytes; a control token gives its text."""
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._to_piece(token, special=True)
        return piece

    def answer_piece(self, token: int) -> bytes:
        """The token's bytes as an answer shows them: nothing for a control token."""
        piece = self._answers[token]
        if piece is None:
            piece = self._answers[token] = self._to_piece(token, special=False)
        return piece

    def _to_piece(self, token: int, *, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n: int = C.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def info(self, name: str, n_ctx: int, created: int, trained: int = 0) -> ModelInfo:
        """The model as the server sees it; `n_ctx` tokens a sequence, of which it was `trained` for so many (0: not
        told), `created` in Unix seconds."""
        vocab = self._vocab
        eog = tuple(t for t in range(self.size) if C.llama_vocab_is_eog(vocab, t))
        control = {
            self.piece(t).decode("utf-8", "replace"): t for t in range(self.size) if C.llama_vocab_is_control(vocab, t)
        }
        control.pop("", None)
        bos: int = C.llama_vocab_bos(vocab)
        eos: int = C.llama_vocab_eos(vocab)
        sampling, faults = read_defaults(lambda key: model_meta(self._model, key))
        return ModelInfo(
            name=name,
            n_ctx=n_ctx,
            n_vocab=self.size,
            chat_template=model_meta(self._model, "tokenizer.chat_template"),
            bos=bos if bos >= 0 else None,
            add_bos=bool(C.llama_vocab_get_add_bos(vocab)),
            eos=eos if eos >= 0 else None,
            eog=eog,
            control=control,
            created=created,
            title=model_meta(self._model, "general.name") or "",
            sampling=sampling,
            faults=faults,
            trained=trained,
        )
