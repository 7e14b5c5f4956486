from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.hand_backend import Works, ask
from headrace.core.errors import StartupError
from headrace.gateway.spec import AliasSpec, MirrorSpec, parse_engine
from headrace.gateway.switch import Switcher
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server.admin import admin_routes
from headrace.server.app import App
from headrace.server.exchange import Exchange
from headrace.server.operators import Operators
from headrace.server.route import Route, Routes
from server.asgi_driver import Client, on_loop, settle

ADMIN = ((b"authorization", b"Bearer admin"),)
CLIENT = ((b"authorization", b"Bearer client"),)


class Desk:
    """An App over a pool of doubles, with the admin API beside its own."""

    def __init__(self, works: Works, *, operators: Operators | None = None) -> None:
        self.works = works
        self.switcher = Switcher(works.pool, works.clock, drain_s=30.0)
        self.rows = admin_routes(
            works.pool,
            self.switcher,
            works.clock,
            check=operators or Operators("admin", local=lambda: False),
            parse=functools.partial(parse_engine, secret={"KEY": "hidden"}.get),
            more=(Route("/admin/v1/usage", {"GET": _usage}),),
        )
        self.app = App(
            works.pool,
            Metrics({}),
            AccessLog(lambda: 1000.0),
            key="client",
            rows=self.rows,
            clock=works.clock,
            wall=lambda: 1000.0,
            new_id=lambda: "id",
        )
        self.client = Client(self.app, headers=ADMIN)

    async def ask(self, method: str, path: str, fields: Any = None) -> tuple[int, Any]:
        made = Client(self.app, headers=ADMIN)
        call = made.post(path, fields) if method == "POST" else made.call(method, path, chunks=(_json(fields),))
        async with call:
            return call.status or 0, call.json()

    async def get(self, path: str) -> Any:
        status, body = await self.ask("GET", path)
        assert status == 200, body
        return body

    async def engine(self, name: str) -> Any:
        return await self.get(f"/admin/v1/engines/{name}")

    def refused(self, answer: tuple[int, Any]) -> tuple[int, str, str | None]:
        status, body = answer
        assert body["error"].keys() == {"message", "type", "param", "code"}
        return status, body["error"]["message"], body["error"]["param"]


def _json(fields: Any) -> bytes:
    return b"" if fields is None else msgspec.json.encode(fields)


async def _usage(exchange: Exchange) -> None:
    await exchange.answer(200, b'{"usage":[]}')


@asynccontextmanager
async def desk(works: Works, *loaded: str, operators: Operators | None = None) -> AsyncIterator[Desk]:
    for name in loaded:
        await works.pool.load(name)
    desk = Desk(works, operators=operators)
    try:
        yield desk
    finally:
        for backend in works.made.values():
            backend.closes.set()
        await desk.switcher.close()
        await works.pool.close()
        desk.app.close()


# Who may ask ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_oc_53_every_row_wants_the_admin_key_and_no_other() -> None:
    works = Works("a", chat={"a": 1.0})
    keys: list[tuple[bytes, ...]] = [(), (b"Bearer client",), (b"Bearer",), (b"Bearer  admin",), (b"Basic admin",),
                                     (b"Bearer \xd0\xba",), (b"Bearer admin", b"Bearer admin")]  # fmt: skip
    async with desk(works, "a") as d:
        assert {row.path for row in d.rows} == {
            "/admin/v1/engines", "/admin/v1/engines/{name}", "/admin/v1/aliases", "/admin/v1/aliases/{name}",
            "/admin/v1/switch", "/admin/v1/usage",
        }  # fmt: skip
        for row in d.rows:
            path = row.path.replace("{name}", "a")
            for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"):
                for key in keys:
                    headers = [(b"authorization", value) for value in key]
                    async with Client(d.app).call(method, path, headers=headers) as call:
                        assert call.status == 401, (method, path, key)
                        assert call.headers["www-authenticate"] == "Bearer"
        assert works.state("a") == "ready"
        for path in ("/admin/v1/engines/", "//admin/v1/engines", "/admin/v1/%2e/engines", "/admin", "/admin/v1/x"):
            async with Client(d.app).get(path) as call:
                assert call.status == 401, path
        assert await d.get("/admin/v1/usage") == {"usage": []}


@on_loop
async def test_the_admin_key_opens_nothing_that_is_a_client_s() -> None:
    async with desk(Works("a", chat={"a": 1.0}), "a") as d:
        for path in ("/v1/models", "/metrics"):
            async with d.client.get(path) as call:
                assert call.status == 401
            async with Client(d.app, headers=CLIENT).get(path) as call:
                assert call.status == 200


@on_loop
async def test_where_nobody_may_it_says_how_to_turn_it_on() -> None:
    async with desk(Works("a", chat={"a": 1.0}), "a", operators=Operators("", local=lambda: False)) as d:
        status, message, _ = d.refused(await d.ask("GET", "/admin/v1/engines"))
        assert (status, "set server.admin_key" in message) == (404, True)


@on_loop
async def test_an_address_of_its_own_has_these_rows_and_no_others() -> None:
    async with desk(Works("a", chat={"a": 1.0}), "a") as d:
        check = Operators("admin", local=lambda: False)
        routes = Routes(*d.rows, *d.app.operating, check=check)

        async def side(scope: Any, receive: Any, send: Any) -> None:
            await d.app.serve(routes, scope, receive, send)

        for path, status in (("/admin/v1/engines", 200), ("/metrics", 200), ("/health", 200), ("/v1/models", 404)):
            async with Client(side, headers=ADMIN).get(path) as call:
                assert call.status == status, path
        for path, status in (("/admin/v1/engines", 401), ("/metrics", 401), ("/health", 200), ("/v1/models", 401)):
            async with Client(side, headers=CLIENT).get(path) as call:
                assert call.status == status, path


# Engines ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_what_is_told_of_an_engine() -> None:
    works = Works("a", "b", chat={"a": 3.0, "b": 1.0}, fast={"a": 1.0})
    async with desk(works, "a") as d:
        works.made["a"].pid = os.getpid()  # type: ignore[attr-defined]
        works.clock.now += 5.0
        works.pool.lease(ask("chat"))
        told = (await d.get("/admin/v1/engines"))["engines"]
        assert [row["name"] for row in told] == ["a", "b"]
        alone = await d.engine("a")
        assert told[0].pop("memory_bytes") > 1_000_000
        assert alone.pop("memory_bytes") > 1_000_000
        assert alone == told[0]
        assert told[0] == {
            "name": "a", "kind": "llama", "model": "m", "family": "m", "url": None, "state": "ready", "seconds": 5.0,
            "healthy": True, "reason": "", "weights": {"chat": 0.75, "fast": 1.0}, "leases": 1, "running": 0,
            "waiting": 0, "predicted_ttft_ms": None, "rung": "as-configured", "rung_note": "",
        }  # fmt: skip
        assert (told[1]["state"], told[1]["healthy"], told[1]["reason"]) == ("gone", False, "not loaded")
        assert told[1]["memory_bytes"] is None


@on_loop
async def test_one_is_declared_at_run_time_and_loaded_behind_the_answer() -> None:
    works = Works("a", chat={"a": 1.0})
    works.shut["org/b:1"] = "loads"
    async with desk(works, "a") as d:
        status, body = await d.ask("POST", "/admin/v1/engines", {"name": "org/b:1", "kind": "llama", "model": "x.gguf"})
        assert (status, body["name"]) == (201, "org/b:1")
        assert (await d.engine("org/b:1"))["state"] == "loading"
        works.made["org/b:1"].loads.set()
        await settle()
        assert (await d.engine("org/b:1"))["state"] == "ready"
        works.faults["c"] = {"warm": StartupError("not warm")}
        await d.ask("POST", "/admin/v1/engines", {"name": "c", "kind": "llama", "model": "x.gguf"})
        await settle()
        assert (await d.engine("c"))["reason"] == "not warm"


@on_loop
async def test_another_server_is_declared_and_its_key_never_shown() -> None:
    async with desk(Works("a", chat={"a": 1.0}), "a") as d:
        fields = {"name": "v", "kind": "openai", "url": "http://h:1", "model": "m", "key_env": "KEY", "load": False}
        status, body = await d.ask("POST", "/admin/v1/engines", fields)
        assert (status, body["url"], body["state"]) == (201, "http://h:1/v1", "gone")
        assert "hidden" not in str(body)
        assert d.works.pool.members["v"].spec.key == "hidden"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kind": "llama", "model": "m"}, "name"),
        ({"name": "", "kind": "llama", "model": "m"}, "name"),
        ({"name": 5, "kind": "llama", "model": "m"}, "name"),
        ({"name": "b", "model": "m"}, "kind"),
        ({"name": "b", "kind": "vllm", "model": "m"}, "kind"),
        ({"name": "b", "kind": "llama"}, "model"),
        ({"name": "b", "kind": "openai", "model": "m"}, "url"),
        ({"name": "b", "kind": "openai", "model": "m", "url": "ftp://x"}, "url"),
        ({"name": "b", "kind": "openai", "model": "m", "url": "http://x", "key_env": "NONE"}, "key_env"),
        ({"name": "b", "kind": "llama", "model": "m", "probes": 1}, "probes"),
    ],
)
def test_a_declaration_that_is_none_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    @on_loop
    async def run() -> None:
        async with desk(Works("a", chat={"a": 1.0}), "a") as d:
            assert d.refused(await d.ask("POST", "/admin/v1/engines", fields))[::2] == (400, param)
            assert set(d.works.pool.members) == {"a"}

    run()


@on_loop
async def test_a_name_that_is_taken_is_a_conflict() -> None:
    async with desk(Works("a", chat={"a": 1.0}), "a") as d:
        fields = {"name": "a", "kind": "llama", "model": "m"}
        assert d.refused(await d.ask("POST", "/admin/v1/engines", fields))[0] == 409


@on_loop
async def test_one_is_removed_when_it_has_finished_and_from_its_aliases_too() -> None:
    works = Works("a", "b", "c", chat={"a": 1.0, "b": 0.0}, fast={"a": 1.0})
    async with desk(works, "a", "b") as d:
        status, message, _ = d.refused(await d.ask("DELETE", "/admin/v1/engines/a"))
        assert (status, "switch its aliases" in message) == (409, True)
        assert await d.ask("DELETE", "/admin/v1/engines/c") == (200, {"name": "c", "removed": True})
        works.made["b"].closes.clear()
        assert await d.ask("DELETE", "/admin/v1/engines/b") == (202, {"name": "b", "removed": False})
        assert (await d.engine("b"))["state"] == "draining"
        works.made["b"].closes.set()
        await settle()
        assert works.weights("chat") == {"a": 1.0}
        assert d.refused(await d.ask("GET", "/admin/v1/engines/b"))[0] == 404
        assert d.refused(await d.ask("DELETE", "/admin/v1/engines/b"))[:2] == (
            404, "no such engine is declared; there are: a"
        )  # fmt: skip


@on_loop
async def test_one_that_loads_or_is_mirrored_to_is_not_removed() -> None:
    works = Works("a", "b", "c", chat={"a": 1.0})
    works.shut["c"] = "loads"
    works.pool.lead(AliasSpec("chat", {"a": 1.0}, MirrorSpec("b", share=0.5)))
    async with desk(works, "a", "b") as d:
        assert d.refused(await d.ask("DELETE", "/admin/v1/engines/b"))[0] == 409
        await d.ask("POST", "/admin/v1/switch", {"alias": "chat", "to": "c", "wait": False})
        assert d.refused(await d.ask("DELETE", "/admin/v1/engines/c"))[0] == 409
        assert (await d.get("/admin/v1/aliases/chat"))["mirror"] == {"to": "b", "share": 0.5}


# Aliases ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_weights_are_assigned_to_what_is_loaded() -> None:
    works = Works("a", "b", "c", chat={"a": 1.0})
    async with desk(works, "a", "b") as d:
        card = {"name": "chat", "engines": {"a": 1.0}, "mirror": None, "ready": True}
        assert await d.get("/admin/v1/aliases") == {"aliases": [card]}
        status, body = await d.ask("PUT", "/admin/v1/aliases/chat", {"engines": {"a": 9, "b": 1}})
        assert (status, body) == (200, {**card, "engines": {"a": 9.0, "b": 1.0}})
        for fields, wrong in (
            ({"engines": {"c": 1}}, 409),
            ({"engines": {"x": 1}}, 400),
            ({"engines": {"a": 0}}, 400),
            ({"engines": {"a": -1}}, 400),
            ({"engines": {"a": True}}, 400),
            ({"engines": []}, 400),
            ({}, 400),
            ({"engines": {"a": 1}, "mirror": {}}, 400),
        ):
            assert d.refused(await d.ask("PUT", "/admin/v1/aliases/chat", fields))[0] == wrong, fields
        assert works.weights("chat") == {"a": 9.0, "b": 1.0}
        assert d.refused(await d.ask("PUT", "/admin/v1/aliases/x", {"engines": {"a": 1}}))[0] == 404


@on_loop
async def test_not_in_the_middle_of_a_switch() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.shut["b"] = "warms"
    async with desk(works, "a") as d:
        await d.ask("POST", "/admin/v1/switch", {"alias": "chat", "to": "b", "wait": False})
        assert d.refused(await d.ask("PUT", "/admin/v1/aliases/chat", {"engines": {"a": 2}}))[0] == 409


# Switches ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_a_switch_is_answered_at_the_change_over() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.shut["b"] = "loads"
    async with desk(works, "a") as d, d.client.post("/admin/v1/switch", {"alias": "chat", "to": "b"}) as call:
        assert not call.sent
        works.pool.lease(ask("chat"))
        works.clock.now += 3.0
        works.made["b"].loads.set()
        await settle()
        assert (call.status, call.json()) == (
            200,
            {
                "id": 1, "alias": "chat", "to": "b", "weight": 1.0, "stage": "draining", "seconds": 0.0,
                "load_ms": 3000.0, "warm_ms": 0.0, "changeover_ms": 0.0, "draining": ["a"], "error": None,
            },
        )  # fmt: skip


@on_loop
async def test_or_at_once_and_looked_at_later() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.shut["b"] = "warms"
    async with desk(works, "a") as d:
        ask = {"alias": "chat", "to": "b", "weight": 0.25, "wait": False}
        status, body = await d.ask("POST", "/admin/v1/switch", ask)
        assert (status, body["stage"], body["id"]) == (202, "loading", 1)
        table = await d.get("/admin/v1/switch")
        assert ([row["stage"] for row in table["running"]], table["last"]) == (["warming"], [])
        assert d.refused(await d.ask("POST", "/admin/v1/switch", ask))[0] == 409
        works.made["b"].warms.set()
        await settle()
        table = await d.get("/admin/v1/switch")
        assert (table["running"], [row["stage"] for row in table["last"]]) == ([], ["done"])
        assert works.weights("chat") == {"a": 0.75, "b": 0.25}


@on_loop
async def test_a_client_that_leaves_stops_nothing() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.shut["b"] = "loads"
    async with desk(works, "a") as d:
        async with d.client.post("/admin/v1/switch", {"alias": "chat", "to": "b"}) as call:
            call.hang_up()
            call.task.cancel()
        works.made["b"].loads.set()
        await settle()
        assert works.weights("chat") == {"a": 0.0, "b": 1.0}


@on_loop
async def test_a_candidate_that_fails_is_an_error_of_one_line() -> None:
    works = Works("a", "b", chat={"a": 1.0})
    works.faults["b"] = {"start": StartupError("no model")}
    async with desk(works, "a") as d:
        answer = await d.ask("POST", "/admin/v1/switch", {"alias": "chat", "to": "b"})
        assert d.refused(answer)[:2] == (502, "b: no model")
        assert answer[1]["error"]["code"] == "load_failed"
        (row,) = (await d.get("/admin/v1/switch"))["last"]
        assert (row["stage"], row["error"], row["changeover_ms"]) == ("failed", "b: no model", None)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"alias":"chat","to":"b","x":1}', b"x" * 70_000, b'{"alias":"x","to":"b"}',
             b'{"alias":"chat","to":"x"}', b'{"alias":"chat","to":"b","weight":2}']
)  # fmt: skip
def test_what_is_no_switch_is_refused(body: bytes) -> None:
    @on_loop
    async def run() -> None:
        async with desk(Works("a", "b", chat={"a": 1.0}), "a") as d:
            async with d.client.post("/admin/v1/switch", body) as call:
                assert call.status == (413 if len(body) > 65536 else 400)
                call.hang_up()
            assert d.works.state("b") == "gone"

    run()
