"""A real nginx for tests: on free ports of the loopback, everything it writes in a directory of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

DEPLOYED = Path(__file__).parents[1] / "deploy" / "nginx" / "headrace.conf"
START_S = 20.0

PLAIN = """
server {
    listen 127.0.0.1:%(port)d;
    location / { proxy_pass http://127.0.0.1:%(upstream)d; }
}
"""
"""Nothing but the address: all that nginx does by itself."""

_AROUND = """
daemon off; master_process off; pid nginx.pid; error_log error.log warn;
events { worker_connections 512; }
http {
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include site.conf;
}
"""


def nginx_or_skip() -> str:
    """Path of the program. Without it a test is skipped, in CI it fails."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        reason = "no nginx found (on Debian: apt-get install nginx-light)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return program


def deployed(port: int, upstream: int, *, listen: str = "") -> str:
    """The configuration that we ship, on these ports. `listen`: further words of that directive."""
    text = DEPLOYED.read_text()
    for theirs, ours in (
        ("listen 80;", f"listen 127.0.0.1:{port}{listen};"),
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{upstream};"),
    ):
        assert text.count(theirs) == 1, f"{DEPLOYED.name} has no {theirs!r}"
        text = text.replace(theirs, ours)
    return text


class NginxServer:
    """One nginx with the given `http` content, stopped by its process id."""

    def __init__(self, program: str, directory: Path, port: int, site: str) -> None:
        self.port = port
        self.directory = directory
        directory.mkdir(exist_ok=True)
        (directory / "site.conf").write_text(site)
        (directory / "nginx.conf").write_text(_AROUND)
        self._command = [program, "-p", str(directory), "-c", "nginx.conf", "-e", "error.log"]
        self._process: subprocess.Popen[bytes] | None = None

    def check(self) -> str:
        """What `nginx -t` says; fails unless it is content."""
        done = subprocess.run([*self._command, "-t"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def start(self) -> None:
        """Returns when it accepts connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > until:
                    self.stop()
                    pytest.fail(f"nginx did not start: {(self.directory / 'error.log').read_text()}")
                time.sleep(0.01)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
