"""A StepEngine over llama.cpp: one context, one unified KV pool, one batch a step.

    chunk 0 (decode)   chunk 1 (decode)   chunk 2 (prompt part)
    ┌───┐              ┌───┐              ┌───┬───┬───┬─ ─┐
    │ t │ row 0        │ t │ row 1        │ t │ t │ t │   │ rows 2…     one llama_decode, one forward
    └─▼─┘              └─▼─┘              └───┴───┴───┴─▼─┘
     draw               draw                           draw if the prompt ends here

A step of fewer than 64 rows can be filled up with rows of a sequence that nobody reads, behind all others (`pad`):
they hold nothing between two steps and are never counted; where the pool has no cells for them the step goes without.
A chunk with guesses gives the logits of its last `drafts` + 1 rows; what is drawn from them decides which guesses hold.

Rules: llama.cpp answers a misuse with a process abort, so nothing reaches it that this file has not checked; n_ubatch
= n_batch, so that a step is one ubatch and an aborted or failed one leaves the KV as it was; the batch's arrays are
numpy views over C memory, filled by slices. Facts behind this: unified KV makes `seq_cp` a matter of metadata and a
mixed batch one forward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.attention import TILE, Attention
from headrace.core.clock import Clock
from headrace.core.errors import StartupError
from headrace.core.file_name import original, shown
from headrace.core.plan import Chunk, Draw, Drawn, StepResult
from headrace.core.sampler import Scratch, draw
from headrace.core.verification import verify
from headrace.engines.base import ModelInfo, StepAborted, StepFailed, UntrueNumbers
from headrace.engines.draft import DraftModel, check_vocabulary
from headrace.engines.llama_lib import ABORT_CALLBACK, C, logits_address, model_meta, recent_log
from headrace.engines.memory import Wants, check_memory
from headrace.engines.snapshot import Snapshots, fingerprint
from headrace.engines.vocab import Vocabulary, open_model
from headrace.engines.warming import WARM

_KV_TYPES = {"f16": 1, "q8_0": 8, "bf16": 30}
"""ggml_type numbers."""

MAX_SLOTS = 255
"""LLAMA_MAX_SEQ - 1: of the sequence ids that one context can tell apart, one is for copies out and in, and for rows
that nobody reads."""

_PAD_TOKEN = 0
_NO_CELLS = 1  # llama_decode's code for a batch that finds no room; nothing was changed


@dataclass(frozen=True, slots=True)
class LlamaSettings:
    """How to load a model; tokens, cells and threads."""

    path: Path
    name: str
    cells: int = 16384
    context: int = 0
    """Tokens one sequence may hold; 0: the model's own limit, at most `cells`."""
    slots: int = 64
    batch: int = 576
    """Most tokens in a step."""
    threads: int = 2
    threads_batch: int = 2
    flash_attention: bool = True
    kv_type: str = "f16"
    extra_buffers: bool = True
    """Weights may be laid out anew for this CPU's kernels (AMX, repacked); False: as they stand in the file."""
    check_memory: bool = True
    """Refuse what needs more memory than there is, before it is taken."""
    created: int = 0
    drafts: int = 0
    """Most guesses in a step; each may take a row of logits, n_vocab * 4 bytes."""


class LlamaEngine:
    """See the module. Raises StartupError if the model cannot be loaded or a setting is out of range."""

    def __init__(self, settings: LlamaSettings, clock: Clock) -> None:
        if not 1 <= settings.slots <= MAX_SLOTS:
            raise StartupError(f"engine.slots is {settings.slots}; llama.cpp takes 1 to {MAX_SLOTS}")
        self._clock = clock
        self._path = settings.path
        if settings.check_memory:
            check_memory(settings.path, _wants(settings))
        self._model = open_model(settings.path, vocab_only=False, extra_buffers=settings.extra_buffers)
        self._vocab = Vocabulary(self._model)
        trained = self._check(settings)
        self.piece = self._vocab.answer_piece
        self._abort = ctypes.create_string_buffer(2)
        self.can_share = not (C.llama_model_is_recurrent(self._model) or C.llama_model_is_hybrid(self._model))
        """Recurrent state cannot be cut at a token: no prefix reuse there, and no guesses."""
        self.n_drafts = settings.drafts if self.can_share else 0
        self.n_slots = settings.slots
        self._context = self._make_context(settings)
        self._memory = C.llama_get_memory(self._context)
        self.n_cells = int(C.llama_n_ctx(self._context))
        self.n_batch = int(C.llama_n_batch(self._context))
        self._split = self._pad = 0
        self._computed_at = 0.0
        self.attention = self._attention(settings)
        context = min(settings.context or trained, self.n_cells)
        self.info: ModelInfo = self._vocab.info(settings.name, context, settings.created, trained)
        self._eog = frozenset(self.info.eog)
        self._dirty = False
        """Numbers that are none are in the KV: they go with the sequence that has them."""
        self.draft: DraftModel | None = None
        """Guesses for it, on the same thread; closed with it."""
        self._make_batch()
        self._warm()
        self.save, self.load, self.deepen = self._snapshots.save, self._snapshots.load, self._snapshots.deepen
        self.bytes_per_token = self._snapshots.bytes_per_token

    def _check(self, settings: LlamaSettings) -> int:
        """Tokens it was trained for. Raises StartupError for what the library loads and nobody could use."""
        path = shown(settings.path)
        if self._vocab.size == 0 or not self._vocab.there:
            raise StartupError(f"{path} has no vocabulary (tokenizer.ggml.model): text cannot be made of its tokens")
        if C.llama_model_has_encoder(self._model) or not C.llama_model_has_decoder(self._model):
            raise StartupError(f"{path} is a model that does not write text by itself: it has an encoder")
        trained = int(C.llama_model_n_ctx_train(self._model))
        if (settings.context or trained) < 2:
            raise StartupError(
                f"{path} says that it holds {trained} tokens (context_length): a prompt and an answer need 2 or more; "
                "set engine.context if the file is wrong"
            )
        return trained

    def _make_context(self, settings: LlamaSettings) -> Any:
        params = C.llama_context_default_params()
        params.n_ctx = settings.cells
        params.n_batch = params.n_ubatch = settings.batch
        params.n_seq_max = settings.slots + 1  # the last one is the snapshots', and the padding's
        params.n_outputs_max = params.n_seq_max + self.n_drafts  # fewer would abort the process
        params.n_threads = settings.threads
        params.n_threads_batch = settings.threads_batch
        params.flash_attn_type = int(settings.flash_attention)
        params.type_k = params.type_v = _KV_TYPES[settings.kv_type]
        params.kv_unified = True
        # Layers with a sliding window would otherwise forget what has left it: a prefix that is cut there, or a wrong
        # guess taken back, would go on from cells that are gone. It costs the memory that the window would save.
        params.swa_full = True
        params.abort_callback = ABORT_CALLBACK
        params.abort_callback_data = ctypes.cast(self._abort, ctypes.c_void_p)
        self._params = params
        context = C.llama_init_from_model(self._model, params)
        if not context:
            raise StartupError(
                f"cannot make a context of {settings.cells} KV cells (engine.cells): {recent_log() or 'out of memory'}"
            )
        return context

    def _make_batch(self) -> None:
        n = self.n_batch
        self._batch = C.llama_batch_init(n, 0, 1)
        view = np.ctypeslib.as_array
        self._token = view(self._batch.token, (n,))
        self._pos = view(self._batch.pos, (n,))
        self._output = view(self._batch.logits, (n,))
        view(self._batch.n_seq_id, (n,))[:] = 1
        # llama_batch_init gives every row its own one-element list of sequence ids; one array behind all of them can
        # be filled by slices. The lists it allocated are put back before the batch is freed.
        self._seq = np.zeros(n, dtype=np.int32)
        self._own_lists = [ctypes.cast(self._batch.seq_id[i], ctypes.c_void_p).value or 0 for i in range(n)]
        pointer = ctypes.POINTER(ctypes.c_int32)
        for i in range(n):
            self._batch.seq_id[i] = ctypes.cast(self._seq.ctypes.data + 4 * i, pointer)
        self._logits = np.zeros((0, self.info.n_vocab), dtype=np.float32)
        self._logits_at = 0
        self._scratch = Scratch(self.info.n_vocab)

    def _warm(self) -> None:
        """Page the weights in, compute a decode and a prompt, draw in every way: the first user must not pay for it.

        A graph is not cheaper the second time, whatever its size, and the rest of the buffers that long prompts need is
        touched in 1 % of the time that the first one takes: neither is worth a longer start.
        """
        token = self.info.bos if self.info.bos is not None else 0
        for n in (1, min(64, self.n_batch, self.info.n_ctx)):
            # Tokens from all over the vocabulary: a file that is damaged in places is found out sooner.
            tokens = [token, *(7919 * at % self.info.n_vocab for at in range(1, n))]
            self._warm_step([Chunk(0, 0, tokens, Draw(WARM[0], 0, n, tokens, n))])
            if n > 1:
                self._snapshots = Snapshots(self._model, self._context, scratch=self.n_slots, sample=0)
            self.trim(0, 0)
        ways = WARM[: min(self.n_slots, self.n_batch)]
        self._warm_step([Chunk(slot, 0, [token], Draw(way, 0, 1, [token], 1)) for slot, way in enumerate(ways)])
        for slot in range(len(ways)):
            self.trim(slot, 0)

    def _warm_step(self, chunks: Sequence[Chunk]) -> None:
        """Raises UntrueNumbers, and StartupError for a step that the library refuses."""
        try:
            result = self.step(chunks)
        except StepFailed as error:
            raise StartupError(f"the model in {shown(self._path)} cannot be computed: {error}") from None
        if result.broken:
            raise UntrueNumbers(
                f"the model in {shown(self._path)} computes numbers that are none (NaN or infinite logits)"
            )

    @cached_property
    def fingerprint(self) -> bytes:
        """Names everything that shapes the KV, see `snapshot.fingerprint`. Reads the whole model file once."""
        return fingerprint(self._model, self._context, self._path, self._params)

    def copy(self, source: int, target: int, length: int) -> None:
        """Share positions [0, length) of `source` with the empty slot `target`: metadata only."""
        C.llama_memory_seq_cp(self._memory, source, target, 0, length)

    def trim(self, slot: int, length: int) -> None:
        """Forget positions >= length of a slot."""
        C.llama_memory_seq_rm(self._memory, slot, length, -1)
        if self._dirty and length == 0:
            self._snapshots.scrub(slot)
            self._dirty = False

    def arrange(self, split: int, pad: int) -> None:
        """The next step's first `split` chunks are a batch of their own; `pad` rows fill the last batch up."""
        self._split, self._pad = split, pad

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        """One llama_decode over all chunks, or two, and their draws. Raises StepAborted, StepFailed."""
        split, pad = self._split, self._pad
        self._split = self._pad = 0
        if not split:
            return self._result(self._part(chunks, pad, last=True))
        first = chunks[:split]
        drawn = self._part(first, 0, last=False)
        try:
            drawn += self._part(chunks[split:], pad, last=True)
        except (StepAborted, StepFailed):
            for chunk in first:  # the whole step, or nothing of it
                self.trim(chunk.slot, chunk.start)
            raise
        return self._result(drawn)

    def _result(self, drawn: list[Drawn | None]) -> StepResult:
        broken = tuple([i for i, one in enumerate(drawn) if one is not None and not one.tokens])
        self._dirty |= bool(broken)
        return StepResult(tuple(drawn), self._computed_at, broken)

    def _part(self, chunks: Sequence[Chunk], pad: int, *, last: bool) -> list[Drawn | None]:
        """One batch. What it draws is read before the next one, which writes over its logits."""
        drawing, rows = self._fill(chunks)
        code = self._padded(pad) if pad else C.llama_decode(self._context, self._batch)
        if last or code:
            self._abort[0] = b"\0"  # at the end: an abort that comes just before a step must not be lost
        if code == 2:
            raise StepAborted
        if code != 0:
            raise StepFailed(f"llama_decode of {self._batch.n_tokens} tokens gave {code}: {recent_log()}")
        drawn: list[Drawn | None] = [None] * len(chunks)
        logits = self._outputs(rows) if rows else self._logits
        self._computed_at = self._clock()
        row = 0
        for i in drawing:
            want = chunks[i].draw
            assert want is not None
            if want.drafts:
                end = row + want.drafts + 1
                guesses = chunks[i].tokens[-want.drafts :]
                drawn[i] = verify(logits[row:end], want, guesses, self._eog, self._vocab.piece, self._scratch)
                row = end
            else:
                drawn[i] = draw(logits[row], want, self._vocab.piece, self._scratch)
                row += 1
        return drawn

    def abort(self) -> None:
        """From any thread: the running step, or the next one, ends within one operation of its graph."""
        self._abort[0] = b"\1"

    def close(self) -> None:
        """Free everything. The engine is not to be used again."""
        if not self._context:
            return
        for i, address in enumerate(self._own_lists):
            self._batch.seq_id[i] = ctypes.cast(address, ctypes.POINTER(ctypes.c_int32))
        C.llama_batch_free(self._batch)
        C.llama_free(self._context)
        C.llama_model_free(self._model)
        self._context = None
        if self.draft is not None:
            self.draft.close()

    def _fill(self, chunks: Sequence[Chunk]) -> tuple[list[int], int]:
        """Write the chunks into the batch; returns which of them draw, in row order, and how many rows give logits."""
        total = sum(len(chunk.tokens) for chunk in chunks)
        if not 0 < total <= self.n_batch:
            raise StepFailed(f"a step of {total} tokens; the batch holds 1 to {self.n_batch}")
        drawing: list[int] = []
        row = guesses = 0
        for i, chunk in enumerate(chunks):
            if len(chunk.tokens) == 1:  # a decode: four items cost a fraction of four slices
                self._token[row], self._pos[row], self._seq[row] = chunk.tokens[0], chunk.start, chunk.slot
                self._output[row] = chunk.draw is not None
                if chunk.draw is not None:
                    drawing.append(i)
                row += 1
                continue
            end = row + len(chunk.tokens)
            self._token[row:end] = chunk.tokens
            self._pos[row:end] = range(chunk.start, chunk.start + len(chunk.tokens))
            self._seq[row:end] = chunk.slot
            self._output[row:end] = 0
            if chunk.draw is not None:
                self._output[end - 1 - chunk.draw.drafts : end] = 1
                guesses += chunk.draw.drafts
                drawing.append(i)
            row = end
        if guesses > self.n_drafts:
            raise StepFailed(f"a step of {guesses} guesses; the engine checks at most {self.n_drafts}")
        self._batch.n_tokens = total
        return drawing, len(drawing) + guesses

    def _padded(self, pad: int) -> int:
        """`llama_decode` of the batch and the padding behind it; the padding's cells are free again afterwards."""
        row = self._batch.n_tokens
        end = min(row + pad, self.n_batch)
        self._token[row:end] = _PAD_TOKEN
        self._pos[row:end] = range(end - row)
        self._seq[row:end] = self.n_slots
        self._output[row:end] = 0
        self._batch.n_tokens = end
        code = int(C.llama_decode(self._context, self._batch))
        C.llama_memory_seq_rm(self._memory, self.n_slots, -1, -1)
        if code == _NO_CELLS:
            self._batch.n_tokens = row
            code = int(C.llama_decode(self._context, self._batch))
        return code

    def _attention(self, settings: LlamaSettings) -> Attention:
        """How steps are computed. What is recurrent cannot be taken back where the second part of a step fails."""
        architecture = model_meta(self._model, "general.architecture")
        experts = model_meta(self._model, f"{architecture}.expert_count") or "0"
        return Attention(
            max(1, int(C.llama_model_n_head(self._model))),
            settings.threads_batch,
            tiled=settings.flash_attention and settings.kv_type == "f16",
            splits=self.can_share,
            # Rows of a mixture are grouped by their experts: the logits of others would depend on the padding.
            pads=self.can_share and experts == "0" and self.n_batch >= TILE,
        )

    def _outputs(self, n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The logits of the step's outputs, (n, n_vocab), a view over the library's buffer."""
        address: int = logits_address(self._context)
        if address != self._logits_at or len(self._logits) < n:
            # Wrapping C memory costs as much as a draw; the buffer moves only when it grows.
            shape = (max(n, len(self._logits)), self.info.n_vocab)
            pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
            self._logits = np.ctypeslib.as_array(pointer, shape)
            self._logits_at = address
        return self._logits[:n]


def worker(settings: dict[str, Any], clock: Clock) -> LlamaEngine:
    """The factory that `engines.worker.Blueprint` names: `LlamaSettings` as a dict, paths as text.

    `draft_model`, if there is one, is the path of the model that guesses. Raises StartupError.
    """
    options = dict(settings)
    draft_path = options.pop("draft_model", "")
    loaded = LlamaSettings(**{**options, "path": Path(original(options["path"]))})
    engine = LlamaEngine(loaded, clock)
    if draft_path and engine.n_drafts:
        try:
            other = replace(loaded, path=Path(original(draft_path)), drafts=0)
            engine.draft = DraftModel(_draft_engine(engine, other), clock)
        except StartupError:
            engine.close()
            raise
    return engine


def _wants(s: LlamaSettings) -> Wants:
    return Wants(s.cells, s.batch, s.slots, s.drafts, s.kv_type, s.flash_attention, s.extra_buffers)


def _draft_engine(engine: LlamaEngine, settings: LlamaSettings) -> LlamaEngine:
    try:
        draft = LlamaEngine(settings, engine._clock)
    except StartupError as error:
        raise StartupError(f"engine.draft_model: {error.message}") from error
    try:
        check_vocabulary(draft.info, draft._vocab.piece, engine.info, engine._vocab.piece)
        if not draft.can_share:
            raise StartupError(
                "engine.draft_model cannot be a recurrent model: a wrong guess cannot be taken back there"
            )
    except StartupError:
        draft.close()
        raise
    return draft
