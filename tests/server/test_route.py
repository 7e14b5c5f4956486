from __future__ import annotations

import pytest

from headrace.core.errors import MethodNotAllowed, RouteNotFound
from headrace.server.exchange import Exchange
from headrace.server.route import Route, Routes, not_found


async def get(exchange: Exchange) -> None: ...
async def post(exchange: Exchange) -> None: ...


ROUTES = Routes(
    Route("/", {"GET": get}, public=True),
    Route("/models", {"GET": get}),
    Route("/models/{name}", {"GET": get}),
    Route("/chat", {"POST": post}),
)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/", "/"),
        ("/models", "/models"),
        ("/models/a", "/models/{name}"),
        ("/models/org/a", "/models/{name}"),
        ("/models/", None),
        ("/chat", "/chat"),
        ("/chat/", None),
        ("//chat", None),
        ("/chat/../chat", None),
        ("", None),
    ],
)
def test_finds_rows_by_the_whole_path(path: str, found: str | None) -> None:
    row = ROUTES.find(path)
    assert (None if row is None else row.path) == found


def test_head_is_where_get_is() -> None:
    assert Route("/", {"GET": get}).handler("HEAD") is get
    with pytest.raises(MethodNotAllowed) as caught:
        Route("/", {"POST": post}).handler("HEAD")
    assert caught.value.allow == ("POST",)


def test_a_wrong_method_says_which_there_are() -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        Route("/", {"GET": get}).handler("BREW")
    assert caught.value.allow == ("GET", "HEAD")
    assert "BREW" not in caught.value.message


def test_lists_all_rows() -> None:
    assert {row.path for row in ROUTES} == {"/", "/models", "/models/{name}", "/chat"}


def test_an_unknown_path_is_a_404() -> None:
    assert isinstance(not_found(), RouteNotFound)


def test_a_row_may_have_a_check_of_its_own_and_a_table_one_for_all() -> None:
    def of_row(exchange: Exchange) -> None: ...

    def of_table(exchange: Exchange) -> None: ...

    plain, checked = Route("/a", {}), Route("/b", {}, check=of_row)
    open_table, table = Routes(plain, checked), Routes(plain, checked, check=of_table)
    assert [open_table.check(row) for row in (plain, checked, None)] == [None, of_row, None]
    assert [table.check(row) for row in (plain, checked, None)] == [of_table, of_row, of_table]
