"""Which beginnings of prompts come again and again, and are worth keeping warm?

                      root
                     ╱    ╲
      [you are a helper]  [summarise]        a node: a run of tokens, and how many prompts began with all up to its end
           41.2 uses        1 use            (decayed: an hour ago counts less than now)
            ╱      ╲
       [hello]   [in English: …]             pinned: the paths whose uses × tokens are most for the KV they take
       3.1 uses     17.8 uses                here [you are a helper][in English: …], which holds its beginning too

Rules: nothing is counted token by token; runs are compared as slices. A prompt weighs more the later it comes instead
of all others fading: a count is one addition. What was seen once is forgotten before what was seen again: a stream of
prompts without anything in common cannot push the rest out. Of salted prompts nothing is learned. Pure: time is an
argument.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from headrace.core.sequence import common_prefix

HALF_LIFE_S = 600.0
"""After so long a prompt counts half."""
MIN_TOKENS = 64
"""A shorter prefix, or a shorter addition to one, is not worth a place."""
MIN_USES = 3.0
"""Decayed uses from which on a prefix may be pinned, …"""
KEEP_USES = 1.5
"""… and under which a pinned one is let go."""
STICKINESS = 1.25
"""What is pinned goes only for something that is worth so many times as much."""
PLACE_TOKENS = 256
"""What a pinned prefix costs besides its KV (a sequence id, an entry in each tier), in tokens of KV."""
MAX_DEPTH = 16_384
"""Tokens of a prompt that are looked at."""
_REBASE = 400.0
"""Half-lives after which weights begin anew at 1: a float would end at 1,024."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """One that is worth pinning."""

    tokens: tuple[int, ...]
    uses: float
    """Prompts that began with all of it, decayed."""
    saved: float
    """Tokens that need not be computed thanks to it, decayed; what it shares with another prefix counts for both."""


class _Node:
    __slots__ = ("again", "children", "end", "parent", "pinned", "tokens", "weight")

    def __init__(self, tokens: array[int], parent: _Node | None, end: int, weight: float) -> None:
        self.tokens = tokens
        self.parent = parent
        self.end = end
        """Tokens from the root to the end of this run."""
        self.weight = weight
        """Uses, in the scale of `Miner._weight`."""
        self.children: dict[int, _Node] = {}
        self.again = False
        """More than one prompt came by."""
        self.pinned = False
        """The last choice holds it."""


class Miner:
    """Learns from prompts, chooses prefixes. One thread calls it; `now` in s never goes back."""

    def __init__(self, *, half_life_s: float = HALF_LIFE_S, max_nodes: int = 4096, max_tokens: int = 1_000_000) -> None:
        """`max_nodes` and `max_tokens` bound the memory: about 300 bytes a node, 4 a token."""
        self._half_life = half_life_s
        self._max_nodes, self._max_tokens = max_nodes, max_tokens
        self._root = _Node(array("i"), None, 0, 0.0)
        # Both in the order of last use, deepest first within one prompt: the first of either has no younger descendant.
        self._once: dict[_Node, None] = {}
        self._again: dict[_Node, None] = {}
        self._tokens = self._once_tokens = 0
        self._epoch = 0.0
        self._pinned: list[_Node] = []

    def __repr__(self) -> str:
        return f"<Miner [{self.nodes} nodes, {self._tokens} tokens, {len(self._pinned)} chosen]>"

    @property
    def nodes(self) -> int:
        return len(self._once) + len(self._again)

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return self._tokens

    def observe(self, tokens: Sequence[int], now: float, salt: str = "") -> None:
        """A prompt arrived. 1,000 tokens take about 0.05 ms."""
        if salt or not tokens:
            return
        rest = array("i", tokens[:MAX_DEPTH])
        weight = self._weight(now)
        node, done, path = self._root, 0, []
        while done < len(rest):
            child = node.children.get(rest[done])
            if child is None:
                child = _Node(rest[done:], node, len(rest), 0.0)
                node.children[rest[done]] = child
                self._once[child] = None
                self._tokens += len(child.tokens)
                self._once_tokens += len(child.tokens)
            else:
                same = common_prefix(child.tokens, rest, done)
                if same < len(child.tokens):
                    child = self._split(child, same)
                self._seen_again(child)
            child.weight += weight
            node, done = child, child.end
            path.append(child)
        self._touch(path)
        self._forget()

    def uses(self, tokens: Sequence[int], now: float) -> float:
        """Decayed uses of a prefix, as far as they are remembered."""
        rest = array("i", tokens)
        node, done = self._root, 0
        while done < len(rest):
            child = node.children.get(rest[done])
            if child is None or common_prefix(child.tokens, rest, done) < min(len(child.tokens), len(rest) - done):
                return 0.0
            node, done = child, child.end
        return node.weight / self._weight(now)

    def choose(self, budget: int, now: float, cells: int | None = None) -> tuple[Prefix, ...]:
        """The prefixes to pin from now on, best first: at most `budget`, none a part of another.

        Together they take at most `cells` tokens of KV, what they share counted once; None: as many as they are. A few
        ms with a full memory: call it when the engine is idle, every few seconds.
        """
        scale = 1.0 / self._weight(now)
        kept = _Kept(self._eligible(scale), scale)
        kept.drop_small()
        if cells is not None:
            kept.fit(cells)
            kept.drop_small()
        kept.reduce(budget)
        leaves = sorted(kept.leaves, key=kept.density, reverse=True)
        for node in self._pinned:
            for held in _path(node):
                held.pinned = False
        for leaf in leaves:
            for held in _path(leaf):
                held.pinned = True
            self._touch(list(_path(leaf))[::-1])  # what is pinned is not forgotten before it cools
        self._pinned = leaves
        return tuple(_prefix(leaf, scale) for leaf in leaves)

    def _eligible(self, scale: float) -> list[_Node]:
        """Nodes that are used often enough. With a node its ancestors are among them: they are used as often."""
        return [n for n in self._again if n.weight * scale >= (KEEP_USES if n.pinned else MIN_USES)]

    def _weight(self, now: float) -> float:
        """What one use counts now."""
        age = (now - self._epoch) / self._half_life
        if age < _REBASE:
            return math.pow(2.0, age)
        fade = math.pow(2.0, -age)
        for nodes in (self._once, self._again):
            for node in nodes:
                node.weight *= fade
        self._epoch = now
        return 1.0

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a run in two; returns the upper part, which has the uses of both."""
        parent = node.parent
        assert parent is not None
        upper = _Node(node.tokens[:at], parent, node.end - len(node.tokens) + at, node.weight)
        upper.again, upper.pinned = node.again, node.pinned
        (self._again if node.again else self._once)[upper] = None
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _seen_again(self, node: _Node) -> None:
        if not node.again:
            node.again = True
            del self._once[node]
            self._again[node] = None
            self._once_tokens -= len(node.tokens)

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            order = self._again if node.again else self._once
            del order[node]
            order[node] = None

    def _forget(self) -> None:
        """Keep to the bounds: first goes what was seen once, unless that is less than a quarter."""
        while self.nodes > self._max_nodes or self._tokens > self._max_tokens:
            once = 4 * len(self._once) > self._max_nodes or 4 * self._once_tokens > self._max_tokens
            self._drop(next(iter(self._once if once or not self._again else self._again)))

    def _drop(self, node: _Node) -> None:
        """Forget a node and what is below it."""
        assert node.parent is not None
        del node.parent.children[node.tokens[0]]
        below = [node]
        while below:
            gone = below.pop()
            below.extend(gone.children.values())
            self._tokens -= len(gone.tokens)
            if gone.again:
                del self._again[gone]
            else:
                del self._once[gone]
                self._once_tokens -= len(gone.tokens)


# Choosing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Kept:
    """The part of the tree that shall be pinned: its leaves are the prefixes. It starts as all that is eligible."""

    def __init__(self, nodes: list[_Node], scale: float) -> None:
        self._scale = scale
        # Dictionaries stand for sets: they keep an order, so equal traffic gives equal choices.
        self._below: dict[_Node, dict[_Node, None]] = {node: {} for node in nodes}
        for node in nodes:
            if node.parent in self._below:
                self._below[node.parent][node] = None
        self.leaves = {node: None for node, below in self._below.items() if not below}

    def _value(self, node: _Node) -> float:
        """Uses, with a bonus for what is pinned already."""
        return node.weight * self._scale * (STICKINESS if node.pinned else 1.0)

    def _own(self, leaf: _Node) -> Iterator[_Node]:
        """The nodes that no other prefix needs, from the leaf up."""
        node: _Node | None = leaf
        while node in self._below and (node is leaf or len(self._below[node]) == 1):
            yield node
            node = node.parent

    def density(self, leaf: _Node) -> tuple[float, int]:
        """What the leaf's own nodes save per token of KV; of equals, the longer is worth more."""
        saved = tokens = 0.0
        for node in self._own(leaf):
            saved += self._value(node) * len(node.tokens)
            tokens += len(node.tokens)
        return saved / (tokens + PLACE_TOKENS), leaf.end

    def reduce(self, budget: int) -> None:
        """Without the least dense prefixes; what they share with others stays."""
        ties = count()
        order = [(self.density(leaf), next(ties), leaf) for leaf in self.leaves]
        heapify(order)
        while len(self.leaves) > budget:
            density, _, leaf = heappop(order)
            if leaf not in self.leaves or density != self.density(leaf):
                continue  # it is in the heap again, as it is now
            own = list(self._own(leaf))
            for node in own:
                self._cut(node)
            above = own[-1].parent
            if above in self._below:
                for heir in self._leaves_under(above):
                    heappush(order, (self.density(heir), next(ties), heir))

    def drop_small(self) -> None:
        """Without prefixes that are too short, and without ends too short for the uses that they cost.

        An end goes if fewer than MIN_TOKENS stand behind the last place where the path branches or loses half its uses.
        """
        todo = list(self.leaves)
        while todo:
            leaf = todo.pop()
            if leaf not in self.leaves:
                continue
            end: list[_Node] = []
            for node in self._own(leaf):
                if end and node.weight >= 2 * leaf.weight:
                    break
                end.append(node)
            if leaf.end >= MIN_TOKENS and sum(len(node.tokens) for node in end) >= MIN_TOKENS:
                continue
            above = end[-1].parent
            for node in end:
                self._cut(node)
            if above in self._below:
                todo.extend(self._leaves_under(above))

    def fit(self, cells: int) -> None:
        """Take off the ends with the fewest uses until the rest fits."""
        used = sum(len(node.tokens) for node in self._below)
        ties = count()
        order = [(self._value(leaf), next(ties), leaf) for leaf in self.leaves]
        heapify(order)
        while used > cells:
            leaf = heappop(order)[2]
            used -= len(leaf.tokens)
            self._cut(leaf)
            above = leaf.parent
            if above is not None and above in self.leaves:
                heappush(order, (self._value(above), next(ties), above))

    def _leaves_under(self, node: _Node) -> Iterator[_Node]:
        """Those whose own part may have become longer: `node` itself, or the only path that is left below it."""
        while len(self._below[node]) == 1:
            (node,) = self._below[node]
        if not self._below[node]:
            yield node

    def _cut(self, leaf: _Node) -> None:
        self.leaves.pop(leaf, None)
        del self._below[leaf]
        above = leaf.parent
        if above in self._below:
            del self._below[above][leaf]
            if not self._below[above]:
                self.leaves[above] = None


def _path(node: _Node) -> Iterator[_Node]:
    """From the node up, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _prefix(leaf: _Node, scale: float) -> Prefix:
    path = list(_path(leaf))
    tokens = tuple(token for node in reversed(path) for token in node.tokens)
    return Prefix(tokens, leaf.weight * scale, sum(node.weight * scale * len(node.tokens) for node in path))
