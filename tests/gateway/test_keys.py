from __future__ import annotations

import hashlib
import tomllib

import msgspec
import pytest

from headrace.core.errors import StartupError
from headrace.core.request import BATCH, INTERACTIVE
from headrace.gateway.keys import (
    LETTERS,
    MARK,
    SERVER_KEY,
    Key,
    Keyring,
    Record,
    checked,
    digest_of,
    hash_of,
    new_secret,
    read_records,
    write_records,
)

HASH = hash_of("hr-a")


def test_a_key_is_long_random_and_can_stand_in_a_header() -> None:
    made = {new_secret() for _ in range(200)}
    assert len(made) == 200
    assert all(len(key) == len(MARK) + LETTERS and key.startswith(MARK) and key.isascii() for key in made)
    assert all(key.removeprefix(MARK).isalnum() for key in made)
    assert 62**LETTERS > 2**128


def test_its_hash_is_a_plain_one() -> None:
    assert hash_of("hr-a") == f"sha256:{hashlib.sha256(b'hr-a').hexdigest()}"
    assert Key("a", Record(HASH)).digest == digest_of(b"hr-a")


def test_who_shares_with_whom() -> None:
    assert Key("a", Record(HASH)).salt != Key("b", Record(HASH)).salt
    assert Key("a", Record(HASH, tenant="t")).salt == Key("b", Record(HASH, tenant="t")).salt
    assert Key("a", Record(HASH)).salt != Key("b", Record(HASH, tenant="a")).salt, "a tenant called as a key is"
    assert Key("a", Record(HASH)).salt


def test_a_name_given_anew_is_somebody_else() -> None:
    old, new = Key("a", Record(HASH)), Key("a", Record(hash_of("hr-b")))
    assert old.owner != new.owner
    assert old.salt != new.salt
    assert old.owner != Key("b", Record(HASH)).owner
    assert Key("a", Record(HASH, 1, 2, rpm=3)).salt == old.salt, "its rights may change"


def test_classes_and_ends() -> None:
    assert Key("a", Record(HASH)).priority == INTERACTIVE
    assert Key("a", Record(HASH, priority="batch")).priority == BATCH
    assert not Key("a", Record(HASH)).over(1e12)
    assert [Key("a", Record(HASH, expires=100)).over(now) for now in (99.9, 100.0)] == [False, True]


RECORDS = {
    "plain": Record(HASH),
    "every-thing_1": Record(hash_of("b"), 1, 2, ("m", 'o"r\\g/é\x7f:1'), 0, 5, 7, "batch", 'te"nant \\ [x] #'),
    "with.dots": Record(hash_of("c"), models=()),
    "123": Record(hash_of("d")),
}


def test_what_is_written_is_read_again() -> None:
    keys = {name: checked(name, record) for name, record in RECORDS.items()}
    text = write_records(keys.values())
    assert read_records(text) == keys
    assert text.startswith("# Written by")
    assert set(tomllib.loads(text)["keys"]) == set(RECORDS)
    assert read_records(write_records([])) == {}
    assert read_records("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[keys.a", "not valid TOML"),
        ("x = 1", "should hold tables [keys.NAME] and nothing else"),
        ("keys = 3", "should hold tables"),
        ("[keys]\na = 3", "keys.a: Expected `object`"),
        ("[keys.a]", "keys.a: Object missing required field `hash`"),
        (f'[keys.a]\nhash = "{HASH}"\nrmp = 3', "keys.a: Object contains unknown field `rmp`"),
        (f'[keys.a]\nhash = "{HASH}"\nrpm = "3"', "keys.a: Expected `int | null`"),
        ('[keys.a]\nhash = "secret"', "keys.a.hash: should be sha256: and 64"),
        (f'[keys.a]\nhash = "{HASH}"\nrpm = -1', "keys.a.rpm: is -1; give 0 (no limit) to 100000000"),
        (f'[keys.a]\nhash = "{HASH}"\ntpm = 100000001', "keys.a.tpm: is 100000001"),
        (f'[keys.a]\nhash = "{HASH}"\nstreams = 100001', "keys.a.streams: is 100001"),
        (f'[keys.a]\nhash = "{HASH}"\npriority = "high"', "keys.a.priority: 'high' is not one of"),
        (f'[keys.a]\nhash = "{HASH}"\ntenant = "é"', "keys.a.tenant: is 1 to 128 printable ASCII"),
        (f'[keys.a]\nhash = "{HASH}"\nmodels = [""]', "keys.a.models: names a model without a name"),
        (f'[keys."a b"]\nhash = "{HASH}"', "keys.'a b': a name is 1 to 64 letters"),
        (f'[keys."server.key"]\nhash = "{HASH}"', "is the name of the key in the setting"),
    ],
)
def test_nonsense_is_one_line_with_the_field(text: str, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        read_records(text)
    assert message in caught.value.message
    assert HASH not in caught.value.message


def test_the_ring_finds_what_it_holds_and_nothing_else() -> None:
    ring = Keyring({"a": Key("a", Record(hash_of("hr-a"))), "b": Key("b", Record(hash_of("hr-b")))}, "s3cret")
    for secret, name in ((b"hr-a", "a"), (b"hr-b", "b"), (b"s3cret", SERVER_KEY)):
        found = ring.find(secret)
        assert found is not None
        assert found.name == name
        assert ring.named(name) == found
    for wrong in (b"", b"hr-", b"hr-a ", b" hr-a", b"HR-A", hash_of("hr-a").encode(), digest_of(b"hr-a"), b"\xd0\xba"):
        assert ring.find(wrong) is None
    assert ring.named("c") is None
    assert (len(ring), repr(ring)) == (3, "<Keyring [3 keys]>")
    assert Keyring({}).find(b"") is None


def test_the_server_s_own_key_has_no_limits_whatever_the_defaults() -> None:
    key = Keyring({}, "s").find(b"s")
    assert key is not None
    assert (key.record.rpm, key.record.tpm, key.record.streams, key.record.models) == (0, 0, 0, None)


def test_a_record_fits_into_json() -> None:
    for record in RECORDS.values():
        assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
