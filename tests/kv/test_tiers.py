from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from headrace.kv.blob import Block, blocks, common_tokens, fingerprint, pack, root, salt_digest
from headrace.kv.tiers import BlockIndex, File, FileBook, Hit, Memory, RestoreCost, victims, worth

ENGINE = fingerprint("x")
ROOT = root(ENGINE, salt_digest(""))


def conversation(*parts: tuple[int, int]) -> list[int]:
    """(token, how many of it), …"""
    return [token for token, n in parts for _ in range(n)]


def enter(index: BlockIndex, tokens: list[int]) -> list[Block]:
    """As the store does."""
    entered = []
    for block in blocks(ENGINE, "", tokens):
        if not index.covered(block):
            if (shorter := index.shorter(block)) is not None:
                index.remove(shorter, "ram")
            index.add(block, 10 * (block.end - block.start), "ram")
            entered.append(block)
    return entered


# --- the index


def test_the_longest_beginning_is_found_to_the_token() -> None:
    index = BlockIndex()
    enter(index, conversation((1, 300), (2, 400)))
    for n in (1, 255, 256, 257, 300, 511, 512, 513, 700):
        assert index.match(conversation((1, 300), (2, 400))[:n], ROOT).length == n
    assert index.match(conversation((1, 300), (3, 400)), ROOT).length == 300, "a block may be used in part"
    assert index.match(conversation((1, 300), (2, 999)), ROOT).length == 700
    assert index.match([9], ROOT) == Hit(0, ())
    assert index.match([], ROOT) == Hit(0, ())
    assert index.match([1, 1], root(ENGINE, salt_digest("tenant"))).length == 0


def test_a_hit_tells_what_to_load() -> None:
    index = BlockIndex()
    enter(index, conversation((1, 600)))
    hit = index.match(conversation((1, 550), (2, 5)), ROOT)
    assert [(p.block.start, p.block.end, p.size, p.ram) for p in hit.parts] == [
        (0, 256, 2560, True),
        (256, 512, 2560, True),
        (512, 600, 880, True),
    ]
    assert (hit.length, hit.bytes(ram=True), hit.bytes(ram=False), hit.cold) == (550, 6000, 0, ())
    assert hit.first(512) == Hit(512, hit.parts[:2])
    assert hit.first(513) == Hit(513, hit.parts)
    assert hit.first(999) is hit


def test_full_blocks_are_shared_and_a_longer_tail_replaces_the_shorter_one() -> None:
    index = BlockIndex()
    enter(index, conversation((1, 300)))
    assert [(b.start, b.end) for b in enter(index, conversation((1, 300), (2, 30)))] == [(256, 330)]
    assert index.count("ram") == 2
    assert enter(index, conversation((1, 310))) != [], "a fork is kept beside it"
    assert enter(index, conversation((1, 290))) == [], "what a longer one begins with is not"
    assert [(b.start, b.end) for b in enter(index, conversation((1, 300), (2, 300)))] == [(256, 512), (512, 600)]
    assert index.count("ram") == 4


def test_a_pinned_tail_is_not_replaced() -> None:
    index = BlockIndex()
    tail = enter(index, conversation((1, 300)))[-1]
    index.pin([tail.key])
    enter(index, conversation((1, 400)))
    assert tail.key in index
    index.unpin([tail.key])
    longer = Block(ENGINE, tail.salt, tail.parent, 256, pack([1] * 100))
    assert index.shorter(longer) == tail.key


def test_only_public_ones_are_matched_if_asked() -> None:
    index = BlockIndex()
    public = enter(index, conversation((1, 256), (2, 44)))
    enter(index, conversation((1, 256), (2, 40), (3, 10)))
    tokens = conversation((1, 256), (2, 40), (3, 99))
    assert index.match(tokens, ROOT, public_only=True).length == 0
    keys = [block.key for block in public]
    index.pin(keys[:1], public=256)
    assert index.match(tokens, ROOT, public_only=True).length == 256
    index.pin(keys)
    assert index.match(tokens, ROOT, public_only=True).length == 256
    index.pin(keys, public=300)
    assert index.match(tokens, ROOT, public_only=True).length == 296
    index.unpin(keys)
    assert index.match(tokens, ROOT, public_only=True).length == 296, "pinned for somebody still"
    index.unpin(keys)
    assert index.match(tokens, ROOT, public_only=True).length == 256
    index.pin(keys, public=300)
    assert index.match(tokens, ROOT).length == 306


def test_of_a_block_only_the_pinned_beginning_is_public() -> None:
    index = BlockIndex()
    blocks = enter(index, conversation((1, 256), (2, 10), (3, 30)))
    other = enter(index, conversation((1, 256), (2, 12), (4, 30)))
    index.pin([block.key for block in blocks], public=266)
    tokens = conversation((1, 256), (2, 10), (3, 30), (9, 9))
    assert index.match(tokens, ROOT, public_only=True).length == 266, "what follows was somebody's own text"
    index.pin([block.key for block in other], public=268)
    assert index.match(conversation((1, 256), (2, 12), (3, 9)), ROOT, public_only=True).length == 268
    whole = enter(index, conversation((5, 256)))
    index.pin([whole[0].key], public=100)
    assert index.match(conversation((5, 256), (6, 9)), ROOT, public_only=True).length == 100


def test_a_public_block_that_was_lost_and_comes_again_is_public() -> None:
    index, tokens = BlockIndex(), conversation((1, 256), (2, 44))
    keys = [block.key for block in blocks(ENGINE, "", tokens)]
    index.pin(keys, public=300)
    assert index.match(tokens, ROOT, public_only=True).length == 0, "nothing is kept yet"
    enter(index, tokens)
    assert index.match(tokens, ROOT, public_only=True).length == 300
    index.remove(keys[1], "ram")
    assert index.match(tokens, ROOT, public_only=True).length == 256
    enter(index, tokens)
    assert index.match(tokens, ROOT, public_only=True).length == 300
    index.unpin(keys)
    assert index.match(tokens, ROOT, public_only=True).length == 0


def test_looking_for_public_blocks_does_not_look_at_their_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    index = BlockIndex()
    (pinned,) = enter(index, conversation((1, 200)))
    index.pin([pinned.key], public=200)
    for other in range(100):
        enter(index, conversation((2, 10), (other, 200)))
    looks: list[bytes] = []

    def counting(a: bytes, b: bytes) -> int:
        looks.append(a)
        return common_tokens(a, b)

    monkeypatch.setattr("headrace.kv.tiers.common_tokens", counting)
    assert index.match(conversation((1, 300)), ROOT, public_only=True).length == 200
    assert looks == [pinned.packed]
    monkeypatch.undo()
    seen = Counting(index._children[ROOT])
    index._children[ROOT] = seen
    index.match(conversation((1, 300)), ROOT, public_only=True)
    assert seen.walked == 0


class Counting(list[tuple[bytes, bytes]]):
    """Counts how often it was walked through."""

    walked = 0

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        self.walked += 1
        return super().__iter__()


def test_a_block_is_forgotten_with_its_last_tier() -> None:
    index = BlockIndex()
    block = enter(index, [1, 2])[0]
    index.add(block, 20, "ssd")
    index.remove(block.key, "ram")
    hit = index.match([1, 2], ROOT)
    assert hit.cold == (block.key,)
    index.remove(block.key, "ram")  # twice does no harm
    index.remove(block.key, "ssd")
    assert index.match([1, 2], ROOT).length == 0
    assert block.key not in index
    assert not index.covered(block)
    index.remove(block.key, "ssd")


def test_the_longest_unused_goes_first_and_parents_after_their_children() -> None:
    index = BlockIndex()
    a = enter(index, conversation((1, 600)))
    b = enter(index, conversation((2, 300)))
    index.touch([x.key for x in a])
    order = [entry.block for entry in index.oldest("ram")]
    assert order == [*b, a[2], a[1], a[0]]
    index.touch([x.key for x in b])
    index.pin([a[1].key])
    assert [entry.block for entry in index.oldest("ram")] == [a[2], a[0], b[1], b[0]]
    index.pin([a[1].key])
    index.unpin([a[1].key])
    assert index.pinned(a[1].key), "pinned twice"
    index.unpin([a[1].key])
    index.unpin([a[1].key])
    assert not index.pinned(a[1].key)
    index.pin([a[1].key])
    assert index.pinned(a[1].key), "an unpin too many is not remembered"


def test_it_agrees_with_a_naive_one() -> None:
    """Small alphabet, so that sequences share, fork and repeat."""
    rng = random.Random(3)
    index = BlockIndex()
    known: list[list[int]] = []

    def common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    for _ in range(300):
        base = rng.choice(known) if known and rng.random() < 0.7 else []
        tokens = base[: rng.randrange(len(base) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 600))]
        expected = max((common(tokens, other) for other in known), default=0)
        assert index.match(tokens, ROOT).length == expected
        enter(index, tokens)
        known.append(tokens)
        assert index.match(tokens, ROOT).length == len(tokens)
    siblings: dict[bytes, list[bytes]] = {}
    for entry in index.oldest("ram"):
        siblings.setdefault(entry.block.parent, []).append(entry.block.packed)
    for group in siblings.values():
        group.sort()
        assert not any(b.startswith(a) for a, b in pairwise(group)), "no block begins a sibling"


# --- RAM


def test_memory_keeps_within_its_limit() -> None:
    index = BlockIndex()
    memory = Memory(index, 100)
    a, b, c = (blocks(ENGINE, "", [i])[0] for i in range(3))
    assert memory.keep(a, b"a" * 40) == []
    assert memory.keep(b, b"b" * 40) == []
    assert memory.keep(c, b"c" * 40) == [(a, b"a" * 40)]
    assert (memory.used, len(memory), memory.get(a.key), memory.get(c.key)) == (80, 2, None, b"c" * 40)
    assert a.key not in index
    assert memory.keep(a, b"a" * 101) is None
    assert memory.used == 80, "one that can never fit drives nobody out"
    index.pin([b.key])
    assert memory.keep(a, b"a" * 61) is None
    assert memory.used == 80
    assert memory.keep(a, b"a" * 60) == [(c, b"c" * 40)]
    memory.drop(a.key)
    memory.drop(a.key)
    assert memory.used == 40


# --- the directory's books


def test_the_book_adds_up() -> None:
    book = FileBook()
    for i in range(3):
        book.enter(File(str(i), 10, i, True))
    book.enter(File("1", 30, 9, True))
    book.touch("0", 20)
    book.touch("nobody", 20)
    book.drop("2")
    book.drop("2")
    assert (book.total, [file.name for file in book.oldest()]) == (40, ["1", "0"])
    assert "0" in book
    assert "2" not in book


def test_victims() -> None:
    files = [File(str(i), 10, i, i != 1) for i in range(8)]

    def names(excess: int, spare: int = 0, kept: str = "") -> str | None:
        chosen = victims(files, excess, spare, lambda file: file.name in kept)
        return chosen if chosen is None else "".join(file.name for file in chosen)

    assert [names(n) for n in (1, 10, 11)] == ["0", "0", "02"], "a directory is none"
    assert names(11, kept="0") == "23"
    assert [names(5, n) for n in (4, 5, 14, 15)] == ["0", "0", "0", "02"], "never more than may be spared"
    assert (names(70), names(71), names(70, kept="5")) == ("0234567", None, None)


# --- is it worth it?


def test_restore_seconds_are_learned_for_each_tier() -> None:
    index = BlockIndex()
    enter(index, conversation((1, 256)))
    hit = index.match([1] * 256, ROOT)
    cost = RestoreCost(weight=0.5)
    assert cost.predict(hit) == pytest.approx(2560 * 1.2e-10)
    for _ in range(40):
        cost.learn("ram", 1000, 1e-3)
        cost.learn("redis", 1000, 5e-3)
    cost.learn("ram", 0, 9.0)
    assert cost.predict(hit) == pytest.approx(2.56e-3)
    block = hit.parts[0].block
    index.add(block, 2560, "ssd")
    index.remove(block.key, "ram")
    cold = index.match([1] * 256, ROOT)
    assert cost.predict(cold) == pytest.approx(2.56e-3 + 2560 * 1e-9)
    assert cost.predict(hit, 1000) == pytest.approx(2.56e-3 + 1e-3 + 5e-3)


def test_worth_it_only_if_faster() -> None:
    assert worth(0.01, 0.02)
    assert not worth(0.02, 0.02)
    assert not worth(0.03, 0.02)
