from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import EngineFailed
from headrace.core.events import Delta, Finished
from headrace.core.request import Generation
from headrace.core.timeline import Timeline
from headrace.gateway.backend import Work
from headrace.gateway.gate import Seen
from headrace.gateway.mirror import Mirror
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.observe.record import Record
from headrace.server.app import App
from headrace.server.live import Live
from headrace.server.mirroring import compare, mirror_routes
from server.asgi_driver import Client, on_loop
from server.hand_engine import HandEngine, Hands, model


class Copy:
    """Keeps what it is told."""

    compares = True

    def __init__(self) -> None:
        self.told: list[Any] = []

    def close(self, live: Seen, text: str | None) -> None:
        self.told.append((live, text))

    def cancel(self) -> None:
        self.told.append("cancelled")


@pytest.mark.parametrize("end", ["whole", "failed", "left", "open"])
def test_a_copy_is_told_how_the_live_request_went(end: str) -> None:
    clock = Hands(now=0.0)
    live = Live(Timeline(0.0), clock)
    live.submit(model(HandEngine()), Work((Generation(1, [0], 5),), 1, 1))
    clock.now = 0.25
    live.book(Delta(1, 0, "hi", 1))
    if end == "whole":
        live.book(Finished(1, 0, "stop", 2))
    elif end == "failed":
        live.fail(EngineFailed("broke"))
    elif end == "left":
        live.leave()
    record = Record("id", "POST", "/v1/chat/completions", live.timeline, stream=True, gaps=[0.5])
    copy = Copy()
    compare(copy, live, record)  # type: ignore[arg-type]
    expected: dict[str, Any] = {
        "whole": (Seen(True, 0.25, (0.5,)), "hi"),
        "failed": (Seen(False, 0.25, (0.5,)), "hi"),
        "left": "cancelled",
        "open": "cancelled",
    }
    assert copy.told == [expected[end]]


@on_loop
async def test_the_operator_sees_the_table() -> None:
    class Nothing:
        @property
        def routes(self) -> dict[str, Any]:
            return {}

        def lease_of(self, name: str) -> Any:
            raise AssertionError

    app = App({}, Metrics({}), AccessLog(lambda: 0.0), rows=mirror_routes(Mirror(Nothing(), Hands())))
    async with Client(app).get("/admin/v1/mirror") as call:
        assert call.status == 200
        assert call.json() == {}
