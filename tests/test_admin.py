from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gateway.hand_backend import Works
from headrace.admin import Admin, operators
from headrace.core.errors import StartupError
from headrace.gateway.spec import EngineSpec
from headrace.observe.accesslog import AccessLog
from headrace.observe.metrics import Metrics
from headrace.server.app import App
from headrace.server.launch import listen
from headrace.server.route import Route
from headrace.settings import Config, Server
from server.asgi_driver import on_loop


def settings(**server: object) -> Config:
    return replace(Config(), server=Server(**server))  # type: ignore[arg-type]


@contextlib.contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[socket.socket]:
    with listen(host, 0, guarded=True) as sock:
        yield sock


def free_port() -> int:
    with listening() as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "guarded", "key", "who"),
    [
        ("127.0.0.1", False, "", "local"),
        ("127.0.0.1", True, "", "nobody"),
        ("0.0.0.0", False, "", "nobody"),
        ("0.0.0.0", True, "", "nobody"),
        ("127.0.0.1", True, "a", "key"),
        ("0.0.0.0", False, "a", "key"),
    ],
)
def test_who_may_use_it(host: str, guarded: bool, key: str, who: str) -> None:
    with listening(host) as sock:
        made = operators(key, sock, guarded=lambda: guarded)
    assert repr(made) == f"<Operators [{who}]>"


@pytest.mark.parametrize("own", [False, True])
def test_the_first_client_key_closes_it_where_clients_come_too(own: bool) -> None:
    keys: list[str] = []
    server = settings(admin_port=free_port()) if own else settings()
    with listening() as sock:
        admin = Admin(server, Works("a").pool, sock, guarded=lambda: bool(keys))
        assert repr(admin.check) == "<Operators [local]>"
        keys.append("k")
        assert repr(admin.check) == ("<Operators [local]>" if own else "<Operators [nobody]>")
    for other in admin.beside(app_of(Works("a"))):
        other.close()


def app_of(works: Works) -> App:
    return App(works.pool, Metrics({}), AccessLog(lambda: 0.0))


@on_loop
async def test_without_an_address_of_its_own_its_rows_are_on_the_main_one() -> None:
    works = Works("a")
    with listening() as sock:
        admin = Admin(settings(), works.pool, sock, guarded=lambda: False, more=(Route("/admin/v1/x", {}),))
    assert admin.beside(app_of(works)) == {}
    assert "/admin/v1/x" in {row.path for row in admin.rows}
    await admin.close()


@on_loop
async def test_with_one_they_are_there_and_only_there() -> None:
    works = Works("a")
    port = free_port()
    with listening() as sock:
        admin = Admin(settings(admin_port=port, host="127.0.0.1"), works.pool, sock, guarded=lambda: False)
    ((own, routes),) = admin.beside(app_of(works)).items()
    with own:
        assert own.getsockname()[1] == port
        assert admin.rows == ()
        paths = {row.path for row in routes}
        assert {"/admin/v1/engines", "/metrics", "/health"} <= paths
        assert not {"/v1/models", "/"} & paths
    await admin.close()


def test_a_declaration_gets_only_keys_that_the_file_gives_to_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_KEY", "sesame")
    monkeypatch.setenv("OTHER_KEY", "tulip")
    table = {"kind": "openai", "model": "m", "url": "http://h"}
    declared = replace(settings(), engines=(EngineSpec("gpu", "openai", "m", "m", key_env="GPU_KEY"),))
    with listening() as sock:
        admin = Admin(declared, Works("a").pool, sock, guarded=lambda: False)
        assert admin._parse("x", {**table, "key_env": "GPU_KEY"}).key == "sesame"
        for variable in ("OTHER_KEY", "HEADRACE_SERVER_ADMIN_KEY"):
            with pytest.raises(StartupError, match="key_env") as caught:
                admin._parse("x", {**table, "key_env": variable})
            assert "tulip" not in caught.value.message


def test_an_address_that_others_can_reach_needs_the_key() -> None:
    port = free_port()
    with listening() as sock, pytest.raises(StartupError, match=r"server\.admin_host: .* set server\.admin_key"):
        Admin(settings(admin_host="0.0.0.0", admin_port=port, key="k"), Works("a").pool, sock, guarded=lambda: True)
    with listening() as sock, pytest.raises(StartupError, match=r"server\.admin_host: ::1 needs a port of its own"):
        Admin(settings(admin_host="::1"), Works("a").pool, sock, guarded=lambda: True)
    with listening() as sock, pytest.raises(StartupError, match=r"server\.admin_port: \d+ on 127.0.0.1 is in use"):
        Admin(settings(admin_port=sock.getsockname()[1]), Works("a").pool, sock, guarded=lambda: True)
