"""An upstream that dies at every byte of its answer, and what its client has of it then."""

from __future__ import annotations

import itertools

import pytest

from acceptance.asking import CHAT, COMP, on_loop
from acceptance.relay_scene import continuing, relaying
from upstreams import End, Play, Request, chat_events, completion_events, stream

PIECES = ["Gr\u00fcn", " \U0001f525", "\u2028", " end"]
TRUTH = "".join(PIECES)
EVENTS = {CHAT: chat_events(PIECES, ascii=False), COMP: completion_events(PIECES)}
WHOLE = {path: stream(events) for path, events in EVENTS.items()}
SIZE = {path: sum(map(len, play.pieces)) for path, play in WHOLE.items()}
STEP: dict[End, int] = {"close": 1, "reset": 7}
"""Every byte for an orderly end, some for a reset."""

every_end = pytest.mark.parametrize(("path", "end"), list(itertools.product((CHAT, COMP), STEP)))


class Dying:
    """Answers up to `offset`, then ends its connection."""

    def __init__(self, path: str, end: End) -> None:
        self.offset = 0
        self._path = path
        self._end: End = end

    def __call__(self, request: Request) -> Play:
        assert request.path == self._path
        return WHOLE[self._path].cut_at(self.offset, self._end)


@every_end
@on_loop
async def test_alone(path: str, end: End) -> None:
    dying = Dying(path, end)
    finished = b"".join(WHOLE[path].pieces).index(b'"stop"') + len(b'"stop"')
    async with relaying(dying) as scene:
        texts: dict[int, str | None] = {}
        for dying.offset in range(0, SIZE[path] + 1, STEP[end]):
            got = await scene.ask(path)
            if got.status == 200 and "[DONE]" in got.events:
                got.check_whole(TRUTH)
                assert dying.offset > finished, "it ended before the upstream had said so"
                texts[dying.offset] = TRUTH
            else:
                got.check_broken(TRUTH)
                texts[dying.offset] = got.text if got.status == 200 else None
        if end == "close":
            # Whatever came whole went out: the text grows with the offset, piece by piece, to all of it.
            seen = [text or "" for text in texts.values()]
            assert seen == sorted(seen, key=len)
            assert list(dict.fromkeys(seen)) == ["".join(PIECES[:n]) for n in range(len(PIECES) + 1)]
            assert texts[SIZE[path]] == TRUTH
        await scene.idle()


@every_end
@on_loop
async def test_with_a_second_engine(path: str, end: End) -> None:
    dying = Dying(path, end)
    goes_on = continuing(TRUTH, lambda pieces: stream(completion_events(pieces)))
    begun = continued = 0

    def second(request: Request) -> Play:
        nonlocal begun, continued
        if request.path == path and (path == CHAT or request.json["prompt"] == "hi"):
            begun += 1
            return WHOLE[path]
        continued += request.path == COMP
        return goes_on(request)

    async with relaying(dying, second) as scene:
        for dying.offset in range(0, SIZE[path] + 1, STEP[end]):
            got = await scene.ask(path)
            got.check_whole(TRUTH)
        assert begun > 0, "before the first text it begins anew"
        assert continued > 0, "after it it goes on"
        await scene.idle()


@on_loop
async def test_a_body_that_ends_with_its_connection() -> None:
    """Where only the end of the connection ends a body, a cut looks like an end: the stream itself must say."""
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"".join(EVENTS[CHAT])
    offset = 0
    async with relaying(lambda _: Play([raw[:offset]], "close")) as scene:
        outcomes = set()
        for offset in range(len(raw) + 1):
            got = await scene.ask(CHAT)
            whole = got.status == 200 and "[DONE]" in got.events
            (got.check_whole if whole else got.check_broken)(TRUTH)
            outcomes.add((got.status, whole))
            assert whole or offset < raw.index(b'"stop"') + 120
        assert outcomes >= {(502, False), (200, True)}
