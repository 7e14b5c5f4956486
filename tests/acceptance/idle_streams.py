"""Open streams that only wait, and say what they cost: `python idle_streams.py [STREAMS] [silent|queued]`.

The server is `idle_server.py` in a process of its own, so that its memory is its own. Requests that are answered at
once are timed from this process before the streams are there and while they are.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

from acceptance.process import Process

PROGRAM = Path(__file__).with_name("idle_server.py")
KINDS = {"silent": "?", "queued": "!"}
TIMED = 500
HEARTBEAT_S = "15"


def request(text: str) -> bytes:
    fields = {"model": "idle", "stream": True, "messages": [{"role": "user", "content": text}]}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8000\r\naccept: application/json\r\n"
        "accept-encoding: gzip, deflate\r\nuser-agent: OpenAI/Python 1.99.0\r\ncontent-type: application/json\r\n"
        "authorization: Bearer sk-0123456789abcdef0123456789abcdef\r\nx-stainless-lang: python\r\n"
        f"x-stainless-os: Linux\r\nx-stainless-runtime: CPython\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Timed:
    """One kept connection; `first` is how many ms a request's first byte took."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def first(self) -> float:
        asked = time.perf_counter()
        self._socket.sendall(request("hi"))
        got = self._socket.recv(65536)
        took = time.perf_counter() - asked
        while not got.endswith(b"0\r\n\r\n"):
            got += self._socket.recv(65536)
        return took * 1e3


def timed(port: int) -> str:
    one = Timed(port)
    for _ in range(50):
        one.first()
    took = []
    for _ in range(TIMED):
        took.append(one.first())
        time.sleep(0.005)
    took.sort()
    return "  ".join(f"{name} {took[int(share * (TIMED - 1))]:.2f}" for name, share in
                     (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)))  # fmt: skip


def main(streams: int, kind: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with subprocess.Popen([sys.executable, str(PROGRAM), HEARTBEAT_S], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port, process = int(child.stdout.readline()), Process(child.pid)
        before = timed(port)
        memory = process.memory
        held = []
        data = request(KINDS[kind])
        for number in range(streams):
            held.append(socket.create_connection(("127.0.0.1", port)))
            held[-1].sendall(data)
            if number % 100 == 99 and kind == "silent":
                for one in held[-100:]:
                    one.recv(4096)
        timed(port)
        out = {
            "kind": kind,
            "streams": streams,
            "KiB a stream": round((process.memory - memory) / streams / 1024, 1),
            "TTFT ms before": before,
            "TTFT ms beside": timed(port),
        }
        out["TTFT ms beside again"] = timed(port)
        cpu = process.cpu_s
        time.sleep(2)
        out["CPU share"] = round((process.cpu_s - cpu) / 2, 3)
        for one in held:
            one.close()
        time.sleep(1)
        out["TTFT ms after"] = timed(port)
        child.terminate()
    for name, value in out.items():
        sys.stdout.write(f"{name:22} {value}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, sys.argv[2] if len(sys.argv) > 2 else "silent")
