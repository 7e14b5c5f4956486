from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.gateway.keys import hash_of, read_records
from redis_server import RedisServer


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "headrace" / "keys.toml"


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["keys", *arguments])
    return caught.value.code if isinstance(caught.value.code, int) else 0


def test_add_list_show_and_revoke(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rights = ("--models", "m,n", "--rpm", "60", "--tpm", "0", "--streams", "2", "--priority", "batch")
    assert status_of("add", "alice", *rights, "--tenant", "acme", "--expires", "30") == 0
    said = capsys.readouterr()
    secret = said.out.strip()
    assert re.fullmatch(r"hr-[A-Za-z0-9]{32}", secret), "the key alone, so that it can be piped"
    assert "shown this once" in said.err
    assert secret not in said.err
    assert status_of("add", "bob") == 0
    other = capsys.readouterr().out.strip()
    text = file.read_text()
    assert secret not in text
    assert other not in text
    assert file.stat().st_mode & 0o777 == 0o600
    keys = read_records(text)
    assert keys["alice"].record.hash == hash_of(secret)
    assert keys["alice"].record.expires - keys["alice"].record.created == 30 * 86_400
    assert status_of("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "alice  models m n, 60 requests/min, no limit of tokens/min, 2 at once, batch, tenant acme, expires 20"
    )
    assert lines[1:] == ["bob    all models"]
    assert status_of("show", "bob") == 0
    shown = capsys.readouterr().out
    assert "requests a minute the server's default" in shown
    assert "expires           never" in shown
    assert hash_of(other) in shown
    assert other not in shown
    assert status_of("revoke", "alice") == 0
    assert capsys.readouterr().out == "alice is revoked; running servers refuse it within seconds\n"
    assert list(tomllib.loads(file.read_text())["keys"]) == ["bob"]
    assert status_of("revoke", "bob") == 0
    assert file.exists(), "a server that finds no file would think that there was never a key"
    capsys.readouterr()
    assert status_of("list") == 0
    assert capsys.readouterr().out == "There are no keys\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "old"), "keys.old: is there already: revoke it first, or choose another name"),
        (("add", "a b"), "keys.'a b': a name is 1 to 64 letters"),
        (("add", "server.key"), "keys.server.key: is the name of the key in the setting"),
        (("add", "a", "--rpm", "-1"), "keys.a.rpm: is -1; give 0 (no limit) to 100000000"),
        (("add", "a", "--models", "m,,n"), "--models: should read A,B"),
        (("add", "a", "--tenant", "é"), "keys.a.tenant: is 1 to 128 printable ASCII"),
        (("add", "a", "--priority", "high"), "'high' is not one of"),
        (("add", "a", "--expires", "0"), "0 is not in the range"),
        (("revoke", "none"), "keys.none: there is no such key; there are: old"),
        (("show", "none"), "keys.none: there is no such key; there are: old"),
        (("--store", "redis", "list"), "keys.store: redis needs shared.redis_url"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_the_file_stays(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert status_of("add", "old") == 0
    text = file.read_text()
    capsys.readouterr()
    assert status_of(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
    assert file.read_text() == text


def test_another_file_can_be_named(tmp_path: Path, file: Path) -> None:
    assert status_of("--file", str(tmp_path / "other.toml"), "add", "a") == 0
    assert "[keys.a]" in (tmp_path / "other.toml").read_text()
    assert not file.exists()


def test_keys_may_be_in_redis(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_SHARED_REDIS_URL", redis_server.url)
    monkeypatch.setenv("HEADRACE_KEYS_STORE", "redis")
    assert status_of("add", "a", "--rpm", "5") == 0
    capsys.readouterr()
    assert status_of("list") == 0
    assert capsys.readouterr().out == "a  all models, 5 requests/min\n"
    assert status_of("revoke", "a") == 0
    redis_server.stop()
    for arguments in (("list",), ("add", "b")):
        assert status_of(*arguments) == 2
        assert "shared.redis_url: no answer" in capsys.readouterr().err


def test_an_expired_key_is_listed_as_one(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.parent.mkdir()
    file.write_text(f'[keys.a]\nhash = "{hash_of("x")}"\nexpires = 86400\n')
    assert status_of("list") == 0
    assert capsys.readouterr().out == "a  all models, expired 1970-01-02\n"
