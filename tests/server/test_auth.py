from __future__ import annotations

import pytest

from headrace.core.errors import Unauthorized
from headrace.server.auth import Key


@pytest.mark.parametrize("value", [b"Bearer s3cret", b"bearer s3cret", b"BEARER s3cret"])
def test_takes_the_key(value: bytes) -> None:
    Key("s3cret").check([value])


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer  s3cret"],
        [b"Bearer wrong"],
        [b"Basic s3cret"],
        [b"s3cret"],
        [b"Bearer \xd0\xba"],
        [b"Bearer s3cret", b"Bearer s3cret"],
        [b"Bearer " + b"x" * 1_000_000],
    ],
)
def test_refuses_everything_else(values: list[bytes]) -> None:
    with pytest.raises(Unauthorized) as caught:
        Key("s3cret").check(values)
    assert "s3cret" not in caught.value.message


def test_a_key_may_be_any_text() -> None:
    Key("ключ").check([b"Bearer " + "ключ".encode()])


def test_does_not_show_itself() -> None:
    assert "s3cret" not in repr(Key("s3cret"))
