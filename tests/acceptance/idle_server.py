"""A server in a process of its own whose streams only wait: `python idle_server.py` prints its port, then serves.

The engine answers a generation with "ok" at once, but for two kinds: one whose prompt holds the byte `?` is admitted
and never answered, so its stream carries heartbeats and nothing else; one with the byte `!` stays in the queue.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import uvloop

from headrace.core.events import Admitted, Delta, Finished
from headrace.core.kv import Pin
from headrace.core.request import Generation
from headrace.engines.base import EngineStats, Lives, ModelInfo, Sink
from headrace.gateway.model import ServedModel
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.protocol.chat_template import ChatTemplate, PieceEncoder
from headrace.server import launch
from headrace.server.app import App
from headrace.server.stream import StreamLimits
from headrace.testing import CHATML, CONTROL, ScriptedTokenizer

HEARTBEAT_S = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0


class IdleEngine:
    """A StreamEngine; see the module."""

    info = ModelInfo(name="idle", n_ctx=4096, n_vocab=4096, chat_template=CHATML, control=CONTROL)
    ready = True
    clock_offset = 0.0
    stats = EngineStats()
    lives = Lives()

    async def start(self) -> None:
        pass

    def pin(self, pins: Sequence[Pin]) -> None:
        pass

    def predict(self, tokens: int, priority: int) -> float:
        return 0.0

    async def close(self) -> None:
        pass

    def submit(self, generation: Generation, sink: Sink) -> None:
        rid = generation.rid
        if ord("!") in generation.prompt:
            return
        sink(Admitted(rid, 0, 0))
        if ord("?") not in generation.prompt:
            sink(Delta(rid, 0, "ok", 1))
            sink(Finished(rid, 0, "stop", 1))

    def cancel(self, rid: int) -> None:
        pass

    def pause(self, rid: int) -> None:
        pass

    def resume(self, rid: int) -> None:
        pass


async def main() -> int:
    sock = launch.listen("127.0.0.1", 0, guarded=False)
    engine, tokenizer = IdleEngine(), ScriptedTokenizer()
    template = ChatTemplate(CHATML, control=CONTROL, bos=None, eos=None)
    app = App(
        {"idle": ServedModel(engine, tokenizer, template, PieceEncoder(tokenizer, max_bytes=1 << 20))},
        Metrics({"idle": engine}),
        AccessLog(time.time),
        limits=StreamLimits(header_hold_s=0.0, heartbeat_s=HEARTBEAT_S, queue_timeout_s=3600.0),
    )
    port = sock.getsockname()[1]
    return await launch.serve(app, sock, ready=lambda: _tell(port))


def _tell(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
