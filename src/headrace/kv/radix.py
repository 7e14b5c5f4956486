"""Which slot already holds the longest prefix of these tokens?

                      root
                     ╱    ╲
        [you are a helper]  [summarise]          an edge carries a run of tokens
         slots {0, 1, 2}      slots {3}          and the slots whose sequences run through all of it
              ╱      ╲
         [hello]    [tell me]
        slots {1}   slots {0}                    slot 2 ends at the end of the upper edge

Rules: a slot's sequence ends at the end of an edge; an edge without slots does not exist; only computed tokens are
entered, so whatever `match` returns can be copied at once. Pure: nothing here knows what a slot is.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.sequence import common_prefix


class _Edge:
    __slots__ = ("children", "parent", "slots", "tokens")

    def __init__(self, tokens: list[int], parent: _Edge | None, slots: set[int]) -> None:
        self.tokens = tokens
        self.parent = parent
        self.slots = slots
        self.children: dict[int, _Edge] = {}


class Radix:
    """Token sequences by slot, searchable by prefix. Sequences are lists of ints."""

    def __init__(self) -> None:
        self._root = _Edge([], None, set())
        self._ends: dict[int, _Edge] = {}
        self._lengths: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Radix [{len(self._ends)} slots, {sum(map(len, self._edges()))} tokens]>"

    def length(self, slot: int) -> int:
        """Tokens entered for `slot`; 0 if it is unknown."""
        return self._lengths.get(slot, 0)

    def tokens(self, slot: int) -> list[int]:
        """The slot's sequence."""
        parts: list[list[int]] = []
        edge = self._ends.get(slot)
        while edge is not None:
            parts.append(edge.tokens)
            edge = edge.parent
        return [token for part in reversed(parts) for token in part]

    def match(self, tokens: list[int]) -> tuple[int, int | None]:
        """(length, slot) of the longest entered prefix of `tokens`; (0, None) if not even one token fits."""
        edge, done = self._root, 0
        slot: int | None = None
        while done < len(tokens):
            child = edge.children.get(tokens[done])
            if child is None:
                break
            same = common_prefix(child.tokens, tokens, done)
            done += same
            slot = min(child.slots)
            if same < len(child.tokens):
                break
            edge = child
        return done, slot

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Append `tokens` to the slot's sequence; a new slot starts empty."""
        if not tokens:
            return  # a slot that holds nothing is not entered
        edge = self._ends.get(slot, self._root)
        self._lengths[slot] = self._lengths.get(slot, 0) + len(tokens)
        rest = list(tokens)
        while rest:
            child = edge.children.get(rest[0])
            if child is None:
                if edge is not self._root and not edge.children and len(edge.slots) == 1:
                    edge.tokens.extend(rest)  # the common case of decoding: a private leaf grows in place
                else:
                    child = _Edge(rest, edge, {slot})
                    edge.children[rest[0]] = child
                    edge = child
                break
            same = common_prefix(child.tokens, rest)
            if same < len(child.tokens):
                child = self._split(child, same)
            child.slots.add(slot)
            edge, rest = child, rest[same:]
        self._ends[slot] = edge

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first `length` tokens of the slot's sequence; 0 forgets the slot."""
        if slot not in self._ends or length >= self._lengths[slot]:
            return
        edge, end = self._ends[slot], self._lengths[slot]
        while end - len(edge.tokens) >= length and edge.parent is not None:
            parent = edge.parent
            end -= len(edge.tokens)
            self._leave(edge, slot)
            edge = parent
        if end > length:
            keep = length - (end - len(edge.tokens))
            if len(edge.slots) == 1 and not edge.children:
                del edge.tokens[keep:]
            else:
                lower = edge
                edge = self._split(edge, keep)
                self._leave(lower, slot)
        if length == 0:
            del self._ends[slot], self._lengths[slot]
        else:
            self._ends[slot], self._lengths[slot] = edge, length

    def remove(self, slot: int) -> None:
        """Forget the slot."""
        self.truncate(slot, 0)

    def redundant(self, slot: int) -> bool:
        """Does another slot hold everything this one holds?"""
        edge = self._ends.get(slot)
        return edge is None or len(edge.slots) > 1

    def _split(self, edge: _Edge, at: int) -> _Edge:
        """Cut an edge in two and return the upper part; slots that end here end at the lower part."""
        parent = edge.parent
        assert parent is not None
        upper = _Edge(edge.tokens[:at], parent, set(edge.slots))
        parent.children[edge.tokens[0]] = upper
        edge.tokens = edge.tokens[at:]
        edge.parent = upper
        upper.children[edge.tokens[0]] = edge
        return upper

    def _leave(self, edge: _Edge, slot: int) -> None:
        edge.slots.discard(slot)
        if not edge.slots and edge.parent is not None:
            del edge.parent.children[edge.tokens[0]]

    def _edges(self) -> list[list[int]]:
        found: list[list[int]] = []
        stack = [self._root]
        while stack:
            edge = stack.pop()
            found.append(edge.tokens)
            stack.extend(edge.children.values())
        return found
