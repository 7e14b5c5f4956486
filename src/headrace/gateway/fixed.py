"""The simplest fleet: every model is its own alias, and what is in the mapping is there.

For embedding and for tests; a server has a `pool.Pool`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from headrace.core.errors import EngineUnavailable, ModelNotFound, Unsupported
from headrace.core.request import Ask, Sampling
from headrace.gateway.backend import Backend, End, Lease
from headrace.gateway.model import ServedModel

log = logging.getLogger(__name__)


class FixedLease:
    """Nothing is learned from it."""

    ttft_timeout_s: float | None = None

    def __init__(self, engine: str, backend: Backend) -> None:
        self.engine = engine
        self.backend = backend
        self.family = engine

    def first_text(self, seconds: float) -> None:
        pass

    def close(self, end: End) -> None:
        pass


class FixedFleet:
    """`models`: served name → model, read anew at each request, so models may come and go."""

    def __init__(self, models: Mapping[str, Backend]) -> None:
        self._models = models

    @property
    def aliases(self) -> Collection[str]:
        return self._models.keys()

    @property
    def backends(self) -> Mapping[str, Backend]:
        return self._models

    def created(self, alias: str) -> int:
        return self._models[alias].created

    def sampling(self, alias: str) -> Sampling | None:
        model = self._models[alias]
        return model.sampling if isinstance(model, ServedModel) else None

    def ready(self, alias: str) -> bool:
        return self._models[alias].ready

    def lease(self, ask: Ask, *, without: Collection[str] = (), family: str | None = None) -> Lease:
        backend = self._models.get(ask.model)
        if backend is None:
            raise ModelNotFound(f"no such model; served here: {', '.join(sorted(self._models))}", param="model")
        if ask.model in without or family not in (None, ask.model):
            raise EngineUnavailable("there is no other engine for this model; try again shortly")
        if not backend.ready:
            raise EngineUnavailable("the model is not ready yet; try again shortly")
        return FixedLease(ask.model, backend)

    def own(self, alias: str) -> ServedModel:
        model = self._models[alias]
        if not isinstance(model, ServedModel):
            raise Unsupported("model: its engine does not tell tokens", param="model")
        if not model.ready:
            raise EngineUnavailable("the model is not ready yet; try again shortly")
        return model

    def others(self, ask: Ask, *, without: Collection[str]) -> bool:
        return ask.model in self._models and ask.model not in without

    async def close(self) -> None:
        backends = set(self._models.values())
        for error in await asyncio.gather(*(backend.close() for backend in backends), return_exceptions=True):
            if error is not None:
                log.error("an engine did not close: %s", type(error).__name__)
