"""A stand-in for a gateway: copies bytes between a client and one of its upstreams, and can be told to take another.

It knows three things of HTTP: /readyz, POST /admin/v1/switch, and that everything else is for the upstream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from headrace_bench.server import Server, free_port

PROGRAM = """
import asyncio, json, sys
port, *urls = sys.argv[1:]
there = {name: int(url.rsplit(":", 1)[1]) for name, url in zip("ab", urls)}
now = ["a"]
OK = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nConnection: close\\r\\nContent-Length: 2\\r\\n\\r\\n{}"
BAD = OK.replace(b"200 OK", b"409 Conflict")

async def copy(reader, writer, data=b""):
    try:
        while True:
            writer.write(data)
            data = await reader.read(65536)
            if not data:
                break
    except OSError:
        pass
    finally:
        writer.close()

async def serve(reader, writer):
    data = await reader.read(65536)
    if data.startswith(b"GET /readyz"):
        writer.write(OK)
        writer.close()
    elif data.startswith(b"POST /admin/v1/switch"):
        if not data.endswith(b"}"):
            data += await reader.read(65536)
        to = json.loads(data.partition(b"\\r\\n\\r\\n")[2])["to"]
        writer.write(OK if to in there and b"Bearer " in data else BAD)
        now[0] = to if to in there else now[0]
        writer.close()
    elif data:
        up, down = await asyncio.open_connection("127.0.0.1", there[now[0]])
        await asyncio.gather(copy(reader, down, data), copy(up, writer))
    else:
        writer.close()

async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", int(port)) as server:
        await server.serve_forever()

asyncio.run(main())
"""


def relay(folder: Path, *urls: str, name: str = "headrace") -> Server:
    """Not started yet."""
    port = free_port()
    words = [sys.executable, "-c", PROGRAM, str(port), *urls]
    return Server(name, words, url=f"http://127.0.0.1:{port}", ready="/readyz", log=folder / f"{name}.log")


def started_by(folder: Path, name: str = "headrace") -> Callable[[str], Server]:
    """As `gateways.headrace` gives it."""
    return lambda url: relay(folder, url, name=name)
