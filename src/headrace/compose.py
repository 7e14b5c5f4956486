"""The composition root: a `Config` becomes objects, wired once, here and nowhere else.

Config ─► Kit (see `assembly`) ─► OwnEngine ─┐
  └─────► EngineSpec ─► Upstream  ───────────┴► Pool ─► App ─► Service
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from headrace import fleet
from headrace.admin import Admin
from headrace.assembly import Kit
from headrace.config import cache_home, for_engine
from headrace.core.errors import HeadraceError
from headrace.entrance import Entrance, make_entrance, make_shared
from headrace.gateway.mirror import Mirror
from headrace.gateway.own import OwnEngine
from headrace.gateway.pool import Pool, Starting
from headrace.gateway.shared import SharedRedis
from headrace.gateway.spec import EngineSpec
from headrace.gateway.upstream import Upstream
from headrace.models import Store, script_rate
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server import launch
from headrace.server.app import App
from headrace.server.cors import Cors
from headrace.server.mirroring import mirror_routes
from headrace.server.page import load_page
from headrace.server.slice import shorten
from headrace.server.stream import StreamLimits
from headrace.server.streams import LogLimits
from headrace.server.usage import usage_routes
from headrace.settings import Config

log = logging.getLogger(__name__)

Prepare = Callable[[EngineSpec], Config]
"""The settings of an engine of ours, its model a file that is there. Any thread; minutes if the model is fetched.
Raises StartupError."""


async def serve(config: Config, on_ready: Callable[[str], None], *, prepare: Prepare | None = None) -> int:
    """Serve until told to stop; the exit code. `on_ready` gets the base URL. Raises StartupError.

    Without declared engines `config.model.path` is the path of a file and `config.model.alias` is set: names are
    resolved before. `prepare` does so for declared ones; by default from the model store, without a tuned profile.
    """
    logging.basicConfig(level=config.log.level.upper(), format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its starts and stops are ours to tell
    shared = make_shared(config)
    entrance = make_entrance(config, shared)
    try:
        await entrance.start()
        return await _serve(config, on_ready, entrance, make_pool(config, prepare), shared)
    finally:
        await entrance.close()
        if shared is not None:
            await shared.close()


async def _serve(
    config: Config, on_ready: Callable[[str], None], entrance: Entrance, pool: Pool, shared: SharedRedis | None
) -> int:
    server = config.server
    if server.slice_us:
        shorten(server.slice_us)
    cors = Cors.of(server.cors_origins)
    guard = entrance.guard
    sock = launch.listen(server.host, server.port, guarded=guard.guarded or server.insecure)

    async def promote(alias: str, engine: str) -> None:
        try:
            await admin.switcher.switch(alias, engine)
        except HeadraceError as error:
            log.warning("%s is not switched to %s: %s", alias, engine, error.message)

    mirror = Mirror(pool, time.monotonic, promote=promote)
    rows = (*usage_routes(entrance.usage), *mirror_routes(mirror))
    admin = Admin(config, pool, sock, guarded=lambda: guard.guarded, more=rows)
    app = App(
        pool,
        Metrics(pool.backends, fleet=pool, mirror=mirror),
        AccessLog(time.time),
        guard=guard,
        mirror=mirror,
        page=load_page(),
        cors=cors,
        rows=admin.rows,
        body_limit=server.body_limit_bytes,
        limits=make_stream_limits(config),
        log_limits=make_log_limits(config),
        shared=shared,
        lease_s=config.streams.lease_s,
    )
    try:
        return await launch.serve(
            app,
            sock,
            beside=admin.beside(app),
            drain_s=server.drain_s,
            head_timeout_s=server.head_timeout_s,
            start=lambda: fleet.load(pool, config),
            ready=lambda: on_ready(launch.url_of(sock)),
        )
    finally:
        await mirror.close()
        await admin.close()
        await pool.close()


def make_stream_limits(config: Config) -> StreamLimits:
    """What one stream may cost."""
    server = config.server
    return StreamLimits(
        header_hold_s=server.header_hold_s,
        heartbeat_s=server.heartbeat_s,
        write_timeout_s=server.write_timeout_s,
        max_pending_events=server.max_pending_events,
        queue_timeout_s=config.engine.queue_timeout_s,
    )


def make_log_limits(config: Config) -> LogLimits:
    """What resumable streams may cost."""
    s = config.streams
    return LogLimits(grace_s=s.grace_s, keep_s=s.keep_s, max_bytes=s.max_bytes, total_bytes=s.total_bytes)


def make_pool(config: Config, prepare: Prepare | None = None) -> Pool:
    """All that is declared, not loaded yet. Raises StartupError."""
    prepare = prepare or (lambda spec: _from_store(config, spec))

    def build(spec: EngineSpec) -> Starting:
        if spec.kind == "openai":
            return Upstream(
                spec.name,
                spec.url,
                spec.model,
                time.monotonic,
                key=spec.key,
                flavour=spec.flavour,
            )  # `max_concurrency` is kept by the pool, which knows requests from copies of some
        if not config.engines and spec.name == config.model.alias:
            # Nobody is answered before it is there, unless it comes back: then others answer, and it may take its time.
            return OwnEngine(lambda: Kit(config), exercise=bool(pool.backends))
        return OwnEngine(lambda: Kit(prepare(spec)), exercise=True)

    pool = Pool(build, time.monotonic)
    fleet.declare(pool, config)
    return pool


def _from_store(config: Config, spec: EngineSpec) -> Config:
    own = for_engine(config, spec)
    if script_rate(spec.model) is not None:
        return own
    path = Store(cache_home() / "models").resolve(spec.model)
    return replace(own, model=replace(own.model, path=str(path)))
