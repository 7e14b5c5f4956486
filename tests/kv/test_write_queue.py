from __future__ import annotations

from headrace.kv.blob import blocks, fingerprint
from headrace.kv.write_queue import WriteQueue

ENGINE = fingerprint("x")


def test_it_holds_so_many_bytes_in_order() -> None:
    queue = WriteQueue(100)
    a, b, c = (blocks(ENGINE, "", [i])[0] for i in range(3))
    assert queue.put(a, b"a" * 60)
    assert queue.put(b, b"b" * 40)
    assert not queue.put(c, b"c")
    assert (len(queue), a.key in queue, c.key in queue) == (2, True, False)
    assert queue.first() == (a, b"a" * 60)
    assert (queue.get(b.key), queue.get(c.key)) == (b"b" * 40, None)
    queue.drop(a.key)
    queue.drop(a.key)
    assert queue.first() == (b, b"b" * 40)
    assert queue.put(c, b"c" * 60)
    assert repr(queue) == "<WriteQueue [2 blocks, 100 bytes]>"
    queue.clear()
    assert queue.put(a, b"a" * 100), "all of the room is there again"
