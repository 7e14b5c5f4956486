from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import StartupError
from headrace.entrance import asks_for_keys, make_entrance, make_key_store, make_shared, make_usage, new_name
from headrace.gateway.buckets import Allowance
from headrace.gateway.key_store import FileKeys, RedisKeys
from headrace.gateway.usage import RedisUsage
from headrace.settings import Config, Keys, Server, Shared
from server.asgi_driver import on_loop

URL = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def config(*, key: str = "", url: str = "", **keys: Any) -> Config:
    return dataclasses.replace(Config(), keys=Keys(**keys), server=Server(key=key), shared=Shared(redis_url=url))


@pytest.mark.parametrize(
    ("options", "guarded"),
    [({}, False), ({"key": "x"}, True), ({"file": "/none/keys.toml"}, True), ({"store": "redis", "url": URL}, True)],
)
@on_loop
async def test_when_a_key_is_asked_for(options: dict[str, Any], guarded: bool) -> None:
    given = config(**options)
    entrance = make_entrance(given, make_shared(given))
    assert entrance.guard.guarded is asks_for_keys(given) is guarded
    await entrance.close()


def test_with_a_file_of_keys_one_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config" / "headrace").mkdir(parents=True)
    assert not asks_for_keys(config())
    (tmp_path / "config" / "headrace" / "keys.toml").touch()
    assert asks_for_keys(config())


@on_loop
async def test_keys_that_are_there_already_are_asked_for_from_the_start(tmp_path: Path) -> None:
    file = tmp_path / "config" / "headrace" / "keys.toml"
    file.parent.mkdir(parents=True)
    file.write_text("")
    entrance = make_entrance(config(), None)
    assert not entrance.guard.guarded
    await entrance.start()
    assert entrance.guard.guarded
    file.write_text("[keys")
    with pytest.raises(StartupError, match="not valid TOML"):
        await make_entrance(config(), None).start()
    await entrance.close()


def test_where_things_are_kept(tmp_path: Path) -> None:
    store = make_key_store(config(), None)
    assert isinstance(store, FileKeys)
    assert store.file == tmp_path / "config" / "headrace" / "keys.toml"
    named = make_key_store(config(file="/x/y"), None)
    assert isinstance(named, FileKeys)
    assert named.file == Path("/x/y")
    given = config(store="redis", url=URL)
    assert isinstance(make_key_store(given, make_shared(given)), RedisKeys)
    usage = make_usage(given, make_shared(given))
    assert usage is not None
    assert isinstance(usage._store, RedisUsage)
    for options, folder in (({}, tmp_path / "state" / "headrace" / "usage"), ({"usage_path": "/u"}, Path("/u"))):
        usage = make_usage(config(**options), None)
        assert usage is not None
        assert usage._store._folder == folder  # type: ignore[attr-defined]
    assert make_usage(config(usage_days=0), None) is None


def test_redis_must_be_named() -> None:
    for make in (make_key_store, make_usage):
        with pytest.raises(StartupError, match=r"keys\.store: redis needs shared\.redis_url"):
            make(config(store="redis"), None)
    assert make_shared(config()) is None


def test_without_a_home_there_are_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)

    def none() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", none)
    assert make_key_store(config(), None) is None
    assert make_usage(config(), None) is None
    assert not make_entrance(config(), None).guard.guarded


def test_defaults_and_names() -> None:
    given = config(requests_per_minute=1, tokens_per_minute=2, streams=3, isolate=False)
    guard = make_entrance(given, None).guard
    assert (guard._defaults, guard._isolate) == (Allowance(1, 2, 3), False)
    assert new_name() != new_name()
