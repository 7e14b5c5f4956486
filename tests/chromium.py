"""Drives a real headless Chromium over its debugging pipe: no driver, no port, no dependency.

    test ── fd 3 ──► chromium      {"id", "method", "params"} NUL
         ◄── fd 4 ──               {"id", "result"} NUL, and events, which are dropped

One command at a time. The page is asked for promises (`wait`), so that a test never sleeps and never polls.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it refuses to run as root otherwise, as it must in containers; it only opens our own page
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--window-size=1000,800",
)


def find_chromium() -> str | None:
    """Path of the program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def chromium_or_skip() -> str:
    """Path of the program. Without it a test is skipped, in CI it fails."""
    program = find_chromium()
    if program is None:
        reason = "no Chromium found (on Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return program


class PageError(Exception):
    """The page threw, or Chromium refused the command."""


class Browser:
    """One Chromium with one page."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        command_end, self._commands = os.pipe()
        self._answers, answer_end = os.pipe()
        self._process = subprocess.Popen(
            # Chromium insists on the numbers 3 and 4, and bash can move any two there.
            [
                *("bash", "-c", f'exec "$@" 3<&{command_end} 4>&{answer_end}', "bash"),
                *(program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"),
            ],
            pass_fds=(command_end, answer_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None

    def __enter__(self) -> Browser:
        try:
            targets = self.command("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self._session = self.command("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End it, and forget its profile."""
        os.close(self._commands)  # the end of the pipe is the end of the browser
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._profile.cleanup()

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol. Raises PageError."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while (answer := self._read()).get("id") != self._last_id:
            pass
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            block = os.read(self._answers, 1 << 16)
            if not block:
                raise PageError("chromium ended")
            self._buffer += block
        data, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        return message

    def open(self, url: str) -> None:
        """Load a page to its `load` event; the scripts of the one before are gone."""
        self.command("Page.enable")
        self.command("Page.navigate", url=url)
        self.run("new Promise((done) => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def run(self, code: str) -> Any:
        """Value of an expression in the page; a promise is awaited. Raises PageError."""
        result = self.command("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true; looked at whenever the document changes."""
        self.run(
            f"new Promise((done) => {{ const look = () => {{ if ({condition}) {{ watch.disconnect(); done(); }} }};"
            " const watch = new MutationObserver(look); watch.observe(document, "
            "{subtree: true, childList: true, characterData: true, attributes: true}); look(); })"
        )

    def type(self, text: str) -> None:
        """Into the focused field."""
        self.command("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key that is no plain letter: Enter, Escape, Tab."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        typed = {"Enter": "\r"}.get(key)
        event: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 * shift}
        self.command("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": typed} if typed else {}))
        self.command("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        """What is on the screen, as PNG."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))
