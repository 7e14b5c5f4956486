from __future__ import annotations

from headrace.core.request import Told
from headrace.server.account import Account


def test_tokens_are_known_if_all_are() -> None:
    account = Account()
    account.add("a", (1,), 1)
    account.add("b", (2, 3), 2)
    assert account.told() == Told("ab", (1, 2, 3), 3, exact=True)
    assert account.since(1) == ((2, 3), True, True, 3, 2)
    account.add("c", (), 1)
    assert account.told() == Told("abc", None, 4)


def test_tokens_that_hold_more_than_the_text_are_not_exact_until_it_is_shown() -> None:
    account = Account()
    account.add("a", (1, 2), 2, holds=True)
    account.add("", (), 0)  # a piece of the same text: it brings no tokens
    assert account.told() == Told("a", (1, 2), 2)
    account.add("bc", (3,), 1)
    assert account.told() == Told("abc", (1, 2, 3), 3, exact=True)


def test_what_is_more_than_text_cannot_be_told() -> None:
    account = Account()
    account.add("a", (1,), 1)
    account.spoil()
    assert account.told() is None
    assert account.text == "a"
