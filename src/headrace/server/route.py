"""The path table: which paths exist, what they do for which method, and who may call them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from headrace.core.errors import MethodNotAllowed, RouteNotFound
from headrace.server.exchange import Exchange

Handler = Callable[[Exchange], Awaitable[None]]
Check = Callable[[Exchange], None]
"""Raises what refuses a caller. It stands in for the API key."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row. A path that ends in `{name}` takes everything that follows its `/`, further slashes too."""

    path: str
    handlers: dict[str, Handler]
    public: bool = False
    """Answers without a key."""
    check: Check | None = None
    """Who may ask here; None: as everywhere in its table."""

    @property
    def allow(self) -> tuple[str, ...]:
        """The methods there are; whoever answers GET answers HEAD."""
        return tuple(sorted({*self.handlers, *(("HEAD",) if "GET" in self.handlers else ())}))

    def handler(self, method: str) -> Handler:
        """Raises MethodNotAllowed."""
        found = self.handlers.get("GET" if method == "HEAD" else method)
        if found is None:
            allow = self.allow
            raise MethodNotAllowed(f"this path answers {' and '.join(allow)} only", allow=allow)
        return found


class Routes:
    """Finds the row of a path. `check`: who may ask what is not public; None: who has an API key."""

    def __init__(self, *rows: Route, check: Check | None = None) -> None:
        self._check = check
        self._exact = {row.path: row for row in rows if not row.path.endswith("{name}")}
        self._open = tuple((row.path.removesuffix("{name}"), row) for row in rows if row.path.endswith("{name}"))

    def __iter__(self) -> Iterator[Route]:
        yield from self._exact.values()
        yield from (row for _, row in self._open)

    def check(self, row: Route | None) -> Check | None:
        """Who may ask there; `row` None: at a path that there is not."""
        return self._check if row is None or row.check is None else row.check

    def find(self, path: str) -> Route | None:
        """None: there is no such path."""
        row = self._exact.get(path)
        if row is None:
            for start, candidate in self._open:
                if path.startswith(start) and len(path) > len(start):
                    return candidate
        return row


def not_found() -> RouteNotFound:
    """What an unknown path gets; it does not repeat what was asked for."""
    return RouteNotFound("there is no such path; the API lives under /v1")
