from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import tuned
from headrace.config import load
from headrace.core.errors import StartupError
from headrace.engines.machine import machine
from headrace.settings import Config, Value
from headrace.tuned import (
    SCHEMA,
    SERVE,
    Applied,
    Profile,
    apply_profile,
    describe,
    forget,
    is_known,
    load_profile,
    profile_file,
    replace_profile,
    save_profile,
    unusable,
)

NOWHERE = {"XDG_CONFIG_HOME": "/nonexistent"}


class Place:
    """A cache with a model, its profile and the weights that were made for it."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "headrace"
        self.model = folder / "Tiny.Q4_1.gguf"
        self.model.write_bytes(b"GGUF" * 100)
        self.weights = self.cache / "models" / "tuned" / "Tiny-x.F16.gguf"
        self.weights.parent.mkdir(parents=True)
        self.weights.write_bytes(b"GGUF" * 200)
        self.file = profile_file(self.cache, self.model)

    def profile(self, **options: Any) -> Profile:
        given = {
            "settings": {"engine.threads": 1, "engine.threads_batch": 1},
            "weights": "f16",
            "converted": describe(self.weights),
            "source": describe(self.model),
            **options,
        }
        return Profile(
            schema=SCHEMA,
            made="2026-01-01T00:00:00+0000",
            model="tiny",
            machine=machine(),
            cores=tuned.cores(),
            library=tuned.library(),
            slo="chat",
            itl_ms=100.0,
            **given,
        )

    def applied(self, flags: dict[str, Value] | None = None) -> Applied:
        def again(settings: Any) -> Config:
            return load(flags=flags, environ=NOWHERE, tuned=settings)

        return apply_profile(load(flags=flags, environ=NOWHERE), self.cache, self.model, again)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_without_a_profile_nothing_changes_and_nothing_is_said(place: Place) -> None:
    assert place.applied() == Applied(load(environ=NOWHERE), place.model)


def test_a_profile_changes_weights_and_settings_and_is_told(place: Place) -> None:
    save_profile(place.file, place.profile())
    applied = place.applied()
    assert applied.path == place.weights
    assert (applied.config.engine.threads, applied.config.engine.threads_batch) == (1, 1)
    assert applied.note == (
        f"tuned ({place.file}): f16 weights, engine.threads=1, engine.threads_batch=1; "
        "--set model.tuned=false for the file as it is"
    )


def test_what_the_user_set_wins(place: Place) -> None:
    save_profile(place.file, place.profile())
    applied = place.applied({"engine.threads": "3"})
    assert (applied.config.engine.threads, applied.config.engine.threads_batch) == (3, 1)
    assert "engine.threads=1" not in applied.note


def test_it_can_be_turned_off(place: Place) -> None:
    save_profile(place.file, place.profile())
    applied = place.applied({"model.tuned": "false"})
    assert (applied.path, applied.config.engine.threads, applied.note) == (place.model, 0, "")


def test_a_profile_that_changes_nothing_says_nothing(place: Place) -> None:
    save_profile(place.file, place.profile(settings={}, converted=None, weights="source"))
    assert place.applied() == Applied(load(environ=NOWHERE), place.model)


def refused(place: Place) -> str:
    applied = place.applied()
    assert (applied.path, applied.config) == (place.model, load(environ=NOWHERE))
    assert "\n" not in applied.note
    return applied.note


def test_another_file_under_the_same_name_is_never_served_the_old_profile(place: Place) -> None:
    save_profile(place.file, place.profile())
    size = place.model.stat().st_size
    place.model.write_bytes(b"x" * size)
    os.utime(place.model, ns=(1, 1))
    assert refused(place) == "the tuned profile is for another file: it is not used; run `headrace tune` again"
    place.model.write_bytes(b"GGUF")
    assert "another file" in refused(place)


def test_a_file_that_was_only_touched_is_the_same(place: Place) -> None:
    save_profile(place.file, place.profile())
    os.utime(place.model, ns=(1, 1))
    assert place.applied().path == place.weights


def test_another_machine_has_another_profile(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(place.file, place.profile())
    monkeypatch.setattr(tuned, "machine", lambda: ("another", 64, "x86_64", "avx2"))
    assert profile_file(place.cache, place.model) != place.file
    assert place.applied().note == ""


def test_a_profile_that_was_copied_from_elsewhere_is_not_used(place: Place) -> None:
    save_profile(place.file, place.profile())
    known = load_profile(place.file)
    assert known is not None
    save_profile(place.file, msgspec.structs.replace(known, machine=("another", 64, "x86_64", "avx2")))
    assert "another machine" in refused(place)
    save_profile(place.file, msgspec.structs.replace(known, cores=1000))
    assert "another machine" in refused(place)
    save_profile(place.file, msgspec.structs.replace(known, library="0.0.1"))
    assert "for llama-cpp-python 0.0.1" in refused(place)


def test_weights_that_are_gone_or_altered_are_not_served(place: Place) -> None:
    save_profile(place.file, place.profile())
    place.weights.write_bytes(b"GGUF" * 199)
    assert "gone or altered" in refused(place)
    place.weights.unlink()
    assert "gone or altered" in refused(place)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 1}', b"\xff\xfe", b'{"made": "\xff"}'])
def test_a_profile_that_cannot_be_read_is_told_and_never_stops_the_start(place: Place, data: bytes) -> None:
    place.file.parent.mkdir(parents=True)
    place.file.write_bytes(data)
    assert "no tuned profile" in refused(place)


def test_a_profile_sets_what_it_may_and_nothing_else(place: Place) -> None:
    for settings in ({"server.host": "0.0.0.0"}, {"engine.none": 1}):
        save_profile(place.file, place.profile(settings=settings))
        assert "another version of Headrace" in refused(place)
    save_profile(place.file, place.profile(settings={"engine.threads": -1}))
    assert "engine.threads: -1 is outside" in refused(place)
    save_profile(place.file, msgspec.structs.replace(place.profile(), schema=SCHEMA + 1))
    assert "another version" in refused(place)


def test_a_profile_that_contradicts_the_users_settings_is_left_out(place: Place) -> None:
    save_profile(place.file, place.profile(settings={"engine.flash_attention": False}))
    applied = place.applied({"engine.kv_type": "q8_0"})
    assert applied.path == place.model
    assert "needs engine.flash_attention" in applied.note
    assert "not used" in applied.note


def test_it_is_written_as_a_whole(place: Place) -> None:
    save_profile(place.file, place.profile())
    save_profile(place.file, place.profile(settings={}))
    assert list(place.file.parent.iterdir()) == [place.file]
    known = load_profile(place.file)
    assert known is not None
    assert known.settings == {}
    assert unusable(known, place.model, place.file) == ""


def test_a_cache_that_cannot_be_written_is_one_line(place: Place) -> None:
    (place.cache / "tuned").write_bytes(b"in the way")
    with pytest.raises(StartupError, match="cannot write"):
        save_profile(place.file, place.profile())
    with pytest.raises(StartupError):
        load_profile(place.file)


def test_forgetting_removes_the_profile_and_what_was_made_for_it(place: Place) -> None:
    save_profile(place.file, place.profile())
    assert forget(place.file) == [place.file, place.weights]
    assert place.model.exists()
    assert not place.weights.exists()
    assert forget(place.file) == []


def test_forgetting_never_removes_a_file_that_is_not_ours(place: Place) -> None:
    save_profile(place.file, place.profile(converted=describe(place.model)))
    assert forget(place.file) == [place.file]
    assert place.model.exists()
    place.file.write_bytes(b"{")
    assert forget(place.file) == [place.file], "one that is broken as well"


def test_the_weights_of_the_profile_before_are_removed(place: Place) -> None:
    save_profile(place.file, place.profile())
    replace_profile(place.file, place.profile(), keep=False)
    assert place.weights.exists(), "still in use"
    replace_profile(place.file, place.profile(converted=None), keep=True)
    assert place.weights.exists()
    save_profile(place.file, place.profile())
    replace_profile(place.file, place.profile(converted=None))
    assert not place.weights.exists()


def test_weights_elsewhere_are_not_served(place: Place, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.gguf"
    elsewhere.write_bytes(b"GGUF" * 200)
    for path in (elsewhere, place.weights.parent / ".." / "tuned" / place.weights.name):
        save_profile(place.file, place.profile(converted=msgspec.structs.replace(describe(path), path=str(path))))
        note = refused(place)
        assert f"are not in {place.weights.parent}" in note
        assert str(path) in note


def another(place: Place, folder: Path) -> Path:
    """The profile of a copy of the model, which is served with the same weights."""
    copy = folder / "copy" / place.model.name
    copy.parent.mkdir()
    copy.write_bytes(place.model.read_bytes())
    file = profile_file(place.cache, copy)
    save_profile(file, place.profile(source=describe(copy)))
    return file


def test_weights_that_another_profile_uses_stay(place: Place, tmp_path: Path) -> None:
    save_profile(place.file, place.profile())
    other = another(place, tmp_path)
    replace_profile(place.file, place.profile(converted=None))
    assert place.weights.exists()
    save_profile(place.file, place.profile())
    assert forget(place.file) == [place.file]
    assert place.weights.exists()
    assert forget(other) == [other, place.weights], "the last one takes them along"


def test_weights_that_a_profile_of_another_version_uses_stay(place: Place, tmp_path: Path) -> None:
    save_profile(place.file, place.profile())
    other = another(place, tmp_path)
    other.write_bytes(other.read_bytes().replace(b'"schema": 1', b'"schema": 0'))
    assert forget(place.file) == [place.file]
    assert place.weights.exists()


def test_forgetting_an_older_profile_removes_what_it_names(place: Place) -> None:
    bystander = place.weights.with_name("Other-y.F16.gguf")
    bystander.write_bytes(b"GGUF")
    save_profile(place.file, msgspec.structs.replace(place.profile(), schema=SCHEMA + 1))
    assert forget(place.file) == [place.file, place.weights]
    assert bystander.exists()
    assert place.model.exists()


def test_forgetting_never_removes_the_model_itself(place: Place) -> None:
    place.file = profile_file(place.cache, place.weights)
    save_profile(place.file, place.profile(source=describe(place.weights), converted=None, settings={"engine.none": 1}))
    assert forget(place.file) == [place.file]
    assert place.weights.exists()


def test_a_model_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read"):
        describe(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(StartupError, match="cannot read"):
        describe(tmp_path / "empty.gguf")


def test_a_profile_of_the_first_start_says_so(place: Place) -> None:
    save_profile(place.file, place.profile(by=SERVE, settings={"engine.extra_buffers": False}))
    applied = place.applied()
    assert applied.note.startswith(f"measured at the first start ({place.file}): f16 weights")
    assert not applied.config.engine.extra_buffers


def test_a_file_is_known_while_its_profile_holds(place: Place) -> None:
    assert not is_known(place.cache, place.model)
    save_profile(place.file, place.profile())
    assert is_known(place.cache, place.model)
    place.weights.unlink()
    assert not is_known(place.cache, place.model)
    place.file.write_text("{")
    assert not is_known(place.cache, place.model)
