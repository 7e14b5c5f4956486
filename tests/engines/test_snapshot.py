"""KV out of llama.cpp and back in, with the demo model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.plan import Chunk, Draw
from headrace.engines.base import StepFailed
from headrace.engines.llama import LlamaEngine, LlamaSettings
from headrace.engines.llama_lib import C
from headrace.engines.snapshot import file_digest
from headrace.engines.vocab import Vocabulary
from headrace.kv.disk import Disk
from headrace.kv.store import Store
from headrace.testing import ManualClock
from rig import GREEDY

pytestmark = pytest.mark.real

Logits = np.ndarray[Any, np.dtype[np.float32]]

SPREAD = 0.15
"""How far logits may be apart where the same KV is summed up in another order, because it lies in other cells or was
computed in a batch of another shape: root mean square, in standard deviations of the logits. What the kernels of a CPU
make of that differs: from nothing to 0.09 was seen. One other token in the prompt made 0.15 to 0.97 a step."""
CERTAIN = 0.6
"""By how many standard deviations the best token leads wherever two answers are to be equal: more than twice what any
single logit was seen to move."""

TEXT = "The quick brown fox jumps over the lazy dog. " * 8 + "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"


@pytest.fixture(scope="module")
def tokens(demo_model: Path) -> list[int]:
    return Vocabulary.open(demo_model).encode(TEXT, special=False)[-96:]


def engine_of(path: Path, cells: int = 256, slots: int = 4, flash_attention: bool = True) -> LlamaEngine:
    settings = LlamaSettings(path, "small", cells=cells, slots=slots, batch=128, flash_attention=flash_attention)
    return LlamaEngine(settings, ManualClock())


@pytest.fixture(scope="module", params=[True, False], ids=["flash", "plain"])
def either(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[LlamaEngine]:
    engine = engine_of(demo_model, flash_attention=request.param)
    yield engine
    engine.close()


@pytest.fixture
def engine(either: LlamaEngine) -> Iterator[LlamaEngine]:
    yield either
    for slot in range(either.n_slots):
        either.trim(slot, 0)
    assert held(either, either.n_slots) == (-1, -1), "the scratch id holds nothing between calls"


def held(engine: LlamaEngine, slot: int) -> tuple[int, int]:
    """First and last position of a sequence id, -1 for none."""
    memory = C.llama_get_memory(engine._context)
    return int(C.llama_memory_seq_pos_min(memory, slot)), int(C.llama_memory_seq_pos_max(memory, slot))


def prefill(engine: LlamaEngine, slot: int, tokens: Sequence[int], start: int = 0) -> None:
    engine.step([Chunk(slot, start, tokens[start:], None)])


def answered(engine: LlamaEngine, slot: int, tokens: Sequence[int], n: int) -> tuple[list[int], Logits]:
    """`n` greedy tokens and the (n, n_vocab) logits that they come from; the slot holds all but the last of `tokens`.
    None of them is a close call, so that another kernel's rounding does not change it."""
    ids, rows = list(tokens), []
    for _ in range(n):
        drawn = engine.step([Chunk(slot, len(ids) - 1, ids[-1:], Draw(GREEDY, 0, len(ids), ids, len(tokens)))]).drawn[0]
        assert drawn is not None
        ids.append(drawn.tokens[0])
        rows.append(np.array(engine._logits[0]))
        second, best = np.partition(rows[-1], -2)[-2:]
        assert best - second > CERTAIN * rows[-1].std(), "this test needs a text that is easier to go on with"
    return ids[len(tokens) :], np.array(rows)


def answer(engine: LlamaEngine, slot: int, tokens: Sequence[int], n: int) -> list[int]:
    """The tokens alone."""
    return answered(engine, slot, tokens, n)[0]


def apart(one: Logits, other: Logits) -> float:
    """See SPREAD."""
    return float(np.sqrt(np.mean((one - other) ** 2)) / one.std())


def test_a_restored_sequence_goes_on_as_the_computed_one(engine: LlamaEngine, tokens: list[int]) -> None:
    n = len(tokens) - 1
    prefill(engine, 0, tokens[:-1])
    first, second = engine.save(0, 0, 64), engine.save(0, 64, n)
    expected, logits = answered(engine, 0, tokens, 4)
    engine.trim(0, 0)
    assert list(engine.load(0, 0, 64, first)) == list(range(64))
    assert list(engine.load(0, 64, n, second)) == list(range(64, n))
    again, same = answered(engine, 0, tokens, 4)
    assert again == expected
    assert np.array_equal(same, logits), "the same KV in the same cells, in batches of the same shape"
    engine.trim(0, 0)
    prefill(engine, 3, tokens[:40])  # so that the restored cells lie elsewhere
    assert list(engine.load(1, 0, 64, first)) == list(range(64))
    assert list(engine.load(1, 64, n, second)) == list(range(64, n))
    assert held(engine, 1) == (0, n - 1)
    again, close = answered(engine, 1, tokens, 4)
    assert again == expected
    assert apart(logits, close) < SPREAD


def test_what_is_computed_on_what_was_restored_is_as_computed_at_once(engine: LlamaEngine, tokens: list[int]) -> None:
    prefill(engine, 0, tokens[:-1])
    beginning = engine.save(0, 0, 40)
    expected, logits = answered(engine, 0, tokens, 4)
    engine.trim(0, 0)
    assert engine.load(0, 0, 40, beginning)
    prefill(engine, 0, tokens[:-1], 40)
    again, close = answered(engine, 0, tokens, 4)
    assert again == expected
    assert apart(logits, close) < SPREAD


def test_the_kv_of_another_token_is_further_away_than_that(engine: LlamaEngine, tokens: list[int]) -> None:
    other = [*tokens[:-10], tokens[-30], *tokens[-9:]]
    found = []
    for slot, prompt in enumerate((tokens, other)):
        prefill(engine, slot, prompt[:-1])
        chunk = Chunk(slot, len(prompt) - 1, prompt[-1:], Draw(GREEDY, 0, len(prompt), prompt, len(prompt)))
        engine.step([chunk])
        found.append(np.array(engine._logits[:1]))
    assert apart(*found) > 1.2 * SPREAD


def test_what_is_restored_is_saved_alike(engine: LlamaEngine, tokens: list[int]) -> None:
    prefill(engine, 0, tokens[:80])
    blob = engine.save(0, 16, 80)
    engine.trim(0, 16)
    assert engine.load(0, 16, 80, blob)
    assert engine.save(0, 16, 80) == blob
    assert len(blob) - 64 * engine.bytes_per_token == len(engine.save(0, 0, 1)) - engine.bytes_per_token


def test_a_shared_beginning_is_left_alone(engine: LlamaEngine, tokens: list[int]) -> None:
    n = len(tokens) - 1
    prefill(engine, 0, tokens[:-1])
    tail = engine.save(0, 50, n)
    engine.copy(0, 1, 50)
    assert engine.load(1, 50, n, tail)
    assert (held(engine, 0), held(engine, 1)) == ((0, n - 1), (0, n - 1))
    engine.trim(0, 0)
    assert answer(engine, 1, tokens, 3) == [*answer_of(engine, 2, tokens, 3)]


def answer_of(engine: LlamaEngine, slot: int, tokens: Sequence[int], n: int) -> list[int]:
    prefill(engine, slot, tokens[:-1])
    return answer(engine, slot, tokens, n)


def test_a_load_says_which_cells_it_took_in_which_order(engine: LlamaEngine, tokens: list[int]) -> None:
    """As `kv.cells` follows it: the lowest free cells, in the order of the cells that were saved."""
    for slot, n in ((0, 30), (1, 40)):
        prefill(engine, slot, tokens[:n])
    engine.trim(0, 0)
    prefill(engine, 1, tokens[:75], 40)  # 30 tokens before those it has, 5 behind
    payload = engine.save(1, 0, 75)
    order = engine.load(2, 0, 75, payload)
    assert list(order) == [*range(40, 70), *range(40), *range(70, 75)]
    engine.trim(1, 0)
    assert engine.save(2, 0, 75)[16 : 16 + 75 * 12 : 12] == payload[16 : 16 + 75 * 12 : 12]
    with_order = engine.load(0, 0, 30, engine.save(2, 0, 30))
    assert list(with_order) == list(range(30))


def test_part_of_a_restored_block_can_be_trimmed(engine: LlamaEngine, tokens: list[int]) -> None:
    prefill(engine, 0, tokens[:80])
    blob = engine.save(0, 0, 80)
    engine.trim(0, 0)
    assert engine.load(1, 0, 80, blob)
    engine.trim(1, 30)
    prefill(engine, 1, tokens[:-1], 30)
    assert answer(engine, 1, tokens, 3) == answer_of(engine, 2, tokens, 3)


def test_no_cell_leaks(engine: LlamaEngine, tokens: list[int]) -> None:
    """256 cells: 64 held, so a leak of even one cell in each of 200 rounds would exhaust them."""
    prefill(engine, 0, tokens[:64])
    blob = engine.save(0, 0, 64)
    for _ in range(200):
        assert engine.save(0, 0, 64) == blob
        assert engine.load(1, 0, 64, blob)
        engine.trim(1, 0)
    for slot in (1, 2, 3):
        assert engine.load(slot, 0, 64, blob), "all the other cells are free"
    assert held(engine, 0) == (0, 63)


def test_a_load_without_enough_cells_changes_nothing(engine: LlamaEngine, tokens: list[int]) -> None:
    prefill(engine, 0, tokens[:90])
    blob = engine.save(0, 30, 90)
    engine.copy(0, 1, 30)
    prefill(engine, 2, tokens[:90])
    prefill(engine, 3, tokens[:40])  # 220 of 256 cells
    assert not engine.load(1, 30, 90, blob)
    assert [held(engine, slot) for slot in range(4)] == [(0, 89), (0, 29), (0, 89), (0, 39)]
    engine.trim(2, 0)
    assert engine.load(1, 30, 90, blob)


def test_what_is_not_the_kv_of_these_positions_is_refused(engine: LlamaEngine, tokens: list[int]) -> None:
    prefill(engine, 0, tokens[:64])
    blob = engine.save(0, 0, 32)
    bad = bytearray(blob)
    bad[16:20] = (31).to_bytes(4, "little")  # the first cell's position
    twice = bytearray(blob)
    twice[20:24] = (2).to_bytes(4, "little")  # in two sequences
    more = bytearray(blob)
    more[12:16] = (33).to_bytes(4, "little")  # cells
    for payload in (b"", blob[:-1], blob + b"\0", bytes(bad), bytes(twice), bytes(more), b"\0" * len(blob)):
        assert not engine.load(1, 0, 32, payload)
        assert held(engine, 1) == (-1, -1)
    tensors = bytearray(blob)
    tensors[16 + 32 * 12 + 4] ^= 1  # the layer count: only the library can tell
    assert not engine.load(1, 0, 32, bytes(tensors))
    assert held(engine, 1) == (-1, -1)
    assert not engine.load(1, 32, 64, engine.save(0, 32, 64)), "the slot does not end there"
    assert not engine.load(0, 0, 32, blob), "nor does this one"
    assert not engine.load(99, 0, 32, blob)
    assert not engine.load(1, 0, 0, b"")
    assert engine.load(1, 0, 32, blob)


@pytest.mark.parametrize(
    ("slot", "start", "end"), [(0, 0, 65), (0, -1, 4), (0, 8, 8), (1, 0, 1), (4, 0, 1), (-1, 0, 1)]
)
def test_only_what_is_there_can_be_saved(
    engine: LlamaEngine, tokens: list[int], slot: int, start: int, end: int
) -> None:
    prefill(engine, 0, tokens[:64])
    with pytest.raises(StepFailed, match="to save"):
        engine.save(slot, start, end)


# --- through the tiers


@contextmanager
def stored(engine: LlamaEngine, path: Path) -> Iterator[Store]:
    store = Store(engine.fingerprint, 10**9, ManualClock(), disk=Disk(path, 10**9, engine.fingerprint))
    store.start()
    assert store.opened(60.0)
    yield store
    store.close(60.0)


def served(engine: LlamaEngine, store: Store, tokens: Sequence[int]) -> tuple[int, list[int]]:
    """As a request is: restore what there is, compute the rest, answer, save. (restored tokens, answer)"""
    n = len(tokens) - 1
    hit = store.match(tokens[:n])
    over, found = threading.Event(), dict[bytes, bytes]()

    def done(got: Mapping[bytes, bytes]) -> None:
        found.update(got)
        over.set()

    store.fetch(hit.cold, done)
    assert over.wait(60.0)
    have = 0
    for part in hit.parts:
        payload = store.get(part.block.key) or found.get(part.block.key)
        if payload is None or not engine.load(0, part.block.start, part.block.end, payload):
            break
        have = min(part.block.end, hit.length)
    engine.trim(0, have)
    if have < n:
        prefill(engine, 0, tokens[:n], have)
    text = answer(engine, 0, tokens, 4)
    for block in store.missing(tokens[:n]):
        store.put(block, engine.save(0, block.start, block.end))
    engine.trim(0, 0)
    return have, text


def file_of(path: Path) -> Path:
    """The longest block's."""
    return max(path.glob("*.kv"), key=lambda file: file.stat().st_size)


def flip_one_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("either", [True], ids=["flash"], indirect=True)
@pytest.mark.parametrize("damage", [flip_one_byte, half, Path.unlink])
def test_a_damaged_file_never_changes_an_answer(
    engine: LlamaEngine, tokens: list[int], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    other = [*tokens[-3:], *tokens[50:]]
    with stored(engine, tmp_path) as store:
        cold = served(engine, store, tokens)
        assert cold[0] == 0
        assert served(engine, store, tokens) == (len(tokens) - 1, cold[1])
    with stored(engine, tmp_path) as store:
        assert served(engine, store, tokens) == (len(tokens) - 1, cold[1]), "warm after a restart"
        cold_other = answer_of(engine, 0, other, 4)
        engine.trim(0, 0)
    damage(file_of(tmp_path))
    with stored(engine, tmp_path) as store:
        assert served(engine, store, tokens) == (0, cold[1])
        assert served(engine, store, other) == (0, cold_other)
        assert served(engine, store, tokens) == (len(tokens) - 1, cold[1])
        assert store.stats.damaged == (damage is not Path.unlink)
    with stored(engine, tmp_path) as store:
        damage(file_of(tmp_path))  # indexed already
        assert served(engine, store, tokens) == (0, cold[1])
        assert served(engine, store, other) == (len(other) - 1, cold_other)
        assert served(engine, store, tokens) == (len(tokens) - 1, cold[1])
        assert store.stats.damaged == (damage is not Path.unlink)


@pytest.mark.parametrize("either", [True], ids=["flash"], indirect=True)
def test_other_settings_find_nothing(engine: LlamaEngine, demo_model: Path, tokens: list[int], tmp_path: Path) -> None:
    with stored(engine, tmp_path) as store:
        cold = served(engine, store, tokens)
    quantised = LlamaEngine(
        LlamaSettings(demo_model, "small", cells=256, slots=4, batch=128, kv_type="q8_0"), ManualClock()
    )
    with stored(quantised, tmp_path) as store:
        first = served(quantised, store, tokens)
        assert first[0] == 0
        assert served(quantised, store, tokens) == (len(tokens) - 1, first[1])
    quantised.close()
    with stored(engine, tmp_path) as store:
        assert served(engine, store, tokens) == (len(tokens) - 1, cold[1]), "each finds its own again"


# --- the fingerprint


def test_the_fingerprint_names_what_shapes_the_kv(demo_model: Path, loaded_engine: LlamaEngine) -> None:
    def of(**options: object) -> bytes:
        settings = {"cells": 256, "slots": 2, "batch": 64, **options}
        engine = LlamaEngine(LlamaSettings(demo_model, "x", **settings), ManualClock())  # type: ignore[arg-type]
        try:
            return engine.fingerprint
        finally:
            engine.close()

    plain = of()
    assert len(plain) == 16
    assert plain == of(slots=3, batch=32), "how it is computed does not shape it"
    others = [of(kv_type="q8_0"), of(flash_attention=False), of(cells=512)]
    assert len({plain, loaded_engine.fingerprint, *others}) == 5


def test_an_overwritten_file_has_another_digest(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = bytearray(b"GGUF" + bytes(2**20))
    path.write_bytes(data)
    before = file_digest(path)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(data)
    assert file_digest(copy) == before, "neither name nor time counts"
    data[700_000] = 1
    path.write_bytes(data)
    assert file_digest(path) != before
