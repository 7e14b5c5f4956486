"""KV that waits for the disk and Redis, in the order in which it came, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

from headrace.kv.blob import Block


class WriteQueue:
    """`limit`: bytes of KV."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: OrderedDict[bytes, tuple[Block, bytes]] = OrderedDict()
        self._used = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def __repr__(self) -> str:
        return f"<WriteQueue [{len(self)} blocks, {self._used} bytes]>"

    def put(self, block: Block, payload: bytes) -> bool:
        """False: there is no room. It must not wait already."""
        if self._used + len(payload) > self._limit:
            return False
        self._waiting[block.key] = block, payload
        self._used += len(payload)
        return True

    def get(self, key: bytes) -> bytes | None:
        """Its KV, if it waits."""
        found = self._waiting.get(key)
        return None if found is None else found[1]

    def first(self) -> tuple[Block, bytes]:
        """The next one, which stays until it is dropped. There must be one."""
        return next(iter(self._waiting.values()))

    def drop(self, key: bytes) -> None:
        """Forget it, if it waits."""
        found = self._waiting.pop(key, None)
        if found is not None:
            self._used -= len(found[1])

    def clear(self) -> None:
        self._waiting.clear()
        self._used = 0
