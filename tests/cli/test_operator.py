from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from cli.admin_double import desk, refusal
from headrace.cli.operator import Operator, address_of
from headrace.core.errors import StartupError
from headrace.settings import Config, Server


def settings(**server: object) -> Config:
    return replace(Config(), server=Server(**server))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 80}, "http://127.0.0.1:80"),
        ({"host": "::"}, "http://[::1]:8000"),
        ({"host": "0.0.0.0", "admin_port": 9000}, "http://127.0.0.1:9000"),
        ({"host": "0.0.0.0", "admin_host": "10.0.0.1", "admin_port": 9000}, "http://10.0.0.1:9000"),
    ],
)
def test_it_finds_the_server_that_the_settings_start(server: dict[str, object], url: str) -> None:
    assert address_of(settings(**server)) == url
    assert repr(Operator(settings(**server))) == f"<Operator [{url}]>"


def test_it_asks_with_the_admin_key() -> None:
    with desk([(200, {"a": 1}), (200, {})]) as server:
        operator = Operator(settings(admin_key="secret"), server.url)
        assert operator.get("engines") == {"a": 1}
        operator.ask("DELETE", "engines", "org/a b", body=None)
    assert server.asked == [
        ("GET", "/admin/v1/engines", "Bearer secret", None),
        ("DELETE", "/admin/v1/engines/org/a%20b", "Bearer secret", None),
    ]


@pytest.mark.parametrize(
    ("key", "status", "answer", "message"),
    [
        ("", 401, refusal("no"), "needs its key: set HEADRACE_SERVER_ADMIN_KEY"),
        ("k", 401, refusal("no"), "takes another key than HEADRACE_SERVER_ADMIN_KEY"),
        ("", 409, refusal("chat is being switched"), "chat is being switched"),
        ("", 500, [], "refused with status 500"),
        ("", 200, b"<html>", "what answers there is no Headrace (status 200)"),
    ],
)
def test_a_refusal_is_one_line(key: str, status: int, answer: object, message: str) -> None:
    with desk([(status, answer)]) as server, pytest.raises(StartupError) as caught:
        Operator(settings(admin_key=key), server.url).get("engines")
    assert caught.value.message.startswith(f"{server.url}: ")
    assert message in caught.value.message


def test_nobody_there_is_one_line() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"{url}: no answer from a server there .connection refused."):
            Operator(Config(), url).get("engines")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:y", "http://x?a=b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="should read http://HOST:PORT"):
        Operator(Config(), url)
