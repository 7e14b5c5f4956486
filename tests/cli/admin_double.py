"""An admin API with prepared answers, on a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Desk:
    """`answers`: (status, body) of each request in turn; `asked`: what came, (method, path, key, body)."""

    answers: list[tuple[int, Any]]
    asked: list[tuple[str, str, str | None, Any]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def refusal(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "t", "param": None, "code": None}}


@contextmanager
def desk(answers: Sequence[tuple[int, Any]]) -> Iterator[Desk]:
    desk = Desk(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            desk.asked.append(
                (self.command, self.path, self.headers.get("authorization"), json.loads(body) if body else None)
            )
            status, answer = desk.answers.pop(0)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    desk.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield desk
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
