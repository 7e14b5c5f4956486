from __future__ import annotations

import pytest

from headrace.core.errors import Forbidden, HeadraceError, RouteNotFound, Unauthorized
from headrace.server.exchange import Exchange, Message
from headrace.server.operators import Operators


async def _receive() -> Message:
    raise AssertionError


async def _send(message: Message) -> None:
    raise AssertionError


def asked(**headers: str) -> Exchange:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"method": "GET", "path": "/", "headers": pairs}
    return Exchange(scope, _receive, _send, first_byte=0.0, new_id=lambda: "id")


def refusal(operators: Operators, **headers: str) -> type[HeadraceError] | None:
    try:
        operators(asked(**headers))
    except HeadraceError as error:
        return type(error)
    return None


@pytest.mark.parametrize("local", [False, True])
def test_with_a_key_it_is_that_key_and_no_other(local: bool) -> None:
    operators = Operators("secret", local=lambda: local)
    assert refusal(operators, authorization="Bearer secret") is None
    assert refusal(operators, authorization="bearer secret", origin="https://a.page", host="any") is None
    for wrong in ("", "secret", "Bearer", "Bearer  secret", "Basic secret", "Bearer secre", "Bearer \xd0\xba"):
        assert refusal(operators, authorization=wrong) is Unauthorized
    assert refusal(operators) is Unauthorized
    assert "secret" not in repr(operators)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.9.9.9"])
def test_without_one_programs_of_this_machine_may_ask(host: str) -> None:
    assert refusal(Operators("", local=lambda: True), host=host) is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "[", "127.0.0.1.evil.example", "", "10.0.0.1"])
def test_but_no_page_that_found_another_name_for_us(host: str) -> None:
    assert refusal(Operators("", local=lambda: True), host=host) is Forbidden


def test_nor_any_page_at_all() -> None:
    assert refusal(Operators("", local=lambda: True), host="127.0.0.1", origin="http://127.0.0.1:8000") is Forbidden
    assert refusal(Operators("", local=lambda: True), host="127.0.0.1", origin="null") is Forbidden


def test_elsewhere_it_is_off() -> None:
    operators = Operators("", local=lambda: False)
    assert refusal(operators, host="127.0.0.1") is RouteNotFound
    assert refusal(operators, authorization="Bearer secret") is RouteNotFound
