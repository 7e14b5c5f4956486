"""A fleet of hand engines behind one alias: each is asked in turn, and its leases are kept."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from headrace.core.errors import EngineUnavailable, Unsupported
from headrace.core.request import Ask, Sampling
from headrace.gateway.backend import Backend, End
from headrace.gateway.model import ServedModel
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server.app import App
from headrace.server.stream import StreamLimits
from server.hand_engine import HandEngine, Hands, model


@dataclass
class HandLease:
    engine: str
    backend: Backend
    family: str
    ttft_timeout_s: float | None = None
    texts: list[float] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    def first_text(self, seconds: float) -> None:
        self.texts.append(seconds)

    def close(self, end: End) -> None:
        self.ends.append(end)


class HandFleet:
    """`engines`: name → engine or any backend, in the order in which they are tried. All serve the alias "m"."""

    aliases: Collection[str] = ("m",)

    def __init__(
        self, engines: Mapping[str, HandEngine | Backend], *, families: Mapping[str, str] | None = None
    ) -> None:
        self.backends: dict[str, Backend] = {
            name: model(engine) if isinstance(engine, HandEngine) else engine for name, engine in engines.items()
        }
        self.families = families or {}
        self.timeouts: dict[str, float] = {}
        self.leases: list[HandLease] = []

    def created(self, alias: str) -> int:
        return 7

    def sampling(self, alias: str) -> Sampling | None:
        return None

    def ready(self, alias: str) -> bool:
        return True

    def lease(self, ask: Ask, *, without: Collection[str] = (), family: str | None = None) -> HandLease:
        for name, backend in self.backends.items():
            of = self.families.get(name, "f")
            if name not in without and family in (None, of):
                self.leases.append(HandLease(name, backend, of, self.timeouts.get(name)))
                return self.leases[-1]
        raise EngineUnavailable("nobody is left")

    def others(self, ask: Ask, *, without: Collection[str]) -> bool:
        return any(name not in without for name in self.backends)

    def own(self, alias: str) -> ServedModel:
        for backend in self.backends.values():
            if isinstance(backend, ServedModel):
                return backend
        raise Unsupported("nobody tells tokens", param="model")

    async def close(self) -> None:
        pass

    @property
    def ends(self) -> list[tuple[str, list[End]]]:
        return [(lease.engine, lease.ends) for lease in self.leases]


def fleet_server(fleet: HandFleet, *, clock: Hands | None = None, limits: StreamLimits | None = None) -> App:
    counter = itertools.count(1)
    return App(
        fleet,
        Metrics(fleet.backends),
        AccessLog(lambda: 1000.0),
        limits=limits,
        clock=clock or Hands(),
        wall=lambda: 1000.0,
        new_id=lambda: f"id{next(counter)}",
        seed=lambda: 42,
    )
