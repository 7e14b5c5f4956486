from __future__ import annotations

import pytest

from headrace.core.errors import Unauthorized
from headrace.gateway.guard import KeyGuard
from server.asgi_driver import on_loop


@pytest.mark.parametrize("value", [b"Bearer s3cret", b"bearer s3cret", b"BEARER s3cret"])
@on_loop
async def test_takes_the_key(value: bytes) -> None:
    await KeyGuard("s3cret").identify([value])


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
@on_loop
async def test_refuses_everything_else(values: list[bytes]) -> None:
    with pytest.raises(Unauthorized) as caught:
        await KeyGuard("s3cret").identify(values)
    assert "s3cret" not in caught.value.message


@on_loop
async def test_a_key_may_be_any_text() -> None:
    await KeyGuard("ключ").identify([b"Bearer " + "ключ".encode()])


def test_does_not_show_itself() -> None:
    assert "s3cret" not in repr(KeyGuard("s3cret"))
