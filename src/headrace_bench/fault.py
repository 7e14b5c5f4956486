"""What a user did or met that ends a verb: one clear line, and the exit status that goes with it."""

from __future__ import annotations


class Fault(Exception):
    """The message is one line: what was given, what was found, what to do. `status`: 1 the run failed, 2 misused."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


class Misuse(Fault):
    """A flag, a file or a folder that cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=2)
