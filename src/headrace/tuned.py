"""The tuned profile: what was found for one model file on this machine, and how `serve` comes to use it.

    defaults  <  tuned profile  <  TOML file  <  environment  <  flags

Rules: a file of its own for each model file (by its path) and machine, in the cache; it says of which bytes and of
which machine and library it is, and is not used for any other; what makes it unusable is told in one line and is never
a reason not to start. It may set the few settings below and nothing else. `headrace tune` makes it, or, in short, the
first `headrace serve` of the file: that measures again when it is unusable, and `tune` replaces it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path

import msgspec

from headrace.core.errors import StartupError
from headrace.engines.machine import Machine, build, machine
from headrace.engines.snapshot import file_digest
from headrace.settings import SECTIONS, Config, Value

SCHEMA = 3
TUNABLE = (
    "engine.threads",
    "engine.threads_batch",
    "engine.flash_attention",
    "engine.extra_buffers",
    "engine.step_tokens",
)
"""Settings that a profile may hold."""

TUNE, SERVE = "tune", "serve"
"""Who measures: `headrace tune`, thoroughly, or the first `headrace serve` of a file."""

AGAIN = "run `headrace tune` again"


class Bytes(msgspec.Struct, frozen=True):
    """A file as it was: `digest` is believed while size and modification time hold."""

    path: str
    size: int
    mtime_ns: int
    digest: str


class Row(msgspec.Struct, frozen=True):
    """A line of the table that was decided on; milliseconds, medians over the rounds. None: not measured."""

    weights: str
    threads: int
    flash_attention: bool
    step_tokens: int
    size_bytes: int
    loses: str
    rounds: int
    ttft_ms: float | None = None
    ttft_low_ms: float | None = None
    ttft_high_ms: float | None = None
    ttft_by_tokens_ms: dict[str, float] = {}
    one_ms: float | None = None
    many_ms: float | None = None
    memory_bytes: int | None = None
    save_ms: float | None = None
    """To copy 256 tokens of KV out of the pool."""
    chosen: bool = False
    failure: str = ""
    extra_buffers: bool = True


class Profile(msgspec.Struct, frozen=True):
    """The file."""

    schema: int
    made: str
    """ISO 8601, local time."""
    model: str
    """As it was named on the command line."""
    source: Bytes
    machine: Machine
    cores: int
    """That the process may use."""
    library: str
    """Version and build of llama-cpp-python."""
    slo: str
    itl_ms: float
    settings: dict[str, bool | int | float | str]
    weights: str = "source"
    converted: Bytes | None = None
    """The file that is served instead; None: the model's own."""
    reasons: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    by: str = TUNE


@dataclass(frozen=True, slots=True)
class Applied:
    """How to serve a model: `note` is the line that says so, "" where there is nothing to say."""

    config: Config
    path: Path
    note: str = ""


def describe(path: Path) -> Bytes:
    """Reads the whole file. Raises StartupError."""
    try:
        status = path.stat()
        return Bytes(str(path.absolute()), status.st_size, status.st_mtime_ns, file_digest(path))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from None


def is_unchanged(known: Bytes, path: Path) -> bool:
    """Does the file at `path` hold those bytes? It is read only if it was touched."""
    try:
        status = path.stat()
        if status.st_size != known.size:
            return False
        return status.st_mtime_ns == known.mtime_ns or file_digest(path) == known.digest
    except (OSError, ValueError):
        return False


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def library() -> str:
    """The version of what computes."""
    return build()


def profile_file(cache: Path, model: Path) -> Path:
    """Where the profile of a model file is kept, if there is one."""
    key = repr((str(model.resolve()), machine())).encode("utf-8", "surrogateescape")
    return cache / "tuned" / f"{model.stem}.{blake2b(key, digest_size=8).hexdigest()}.json"


def load_profile(file: Path) -> Profile | None:
    """None if there is none. Raises StartupError if it cannot be used."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StartupError(f"{file}: {(error.strerror or 'cannot be read').lower()}") from None
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{file}: is no tuned profile ({error}): {AGAIN}") from None
    if profile.schema != SCHEMA or not set(profile.settings) <= set(TUNABLE):
        raise StartupError(f"{file}: is a tuned profile of another version of Headrace: {AGAIN}")
    return profile


def save_profile(file: Path, profile: Profile) -> None:
    """Replace it as a whole. Raises StartupError."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
        part.replace(file)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise StartupError(f"cannot write {file}: {error.strerror or error}") from None


def replace_profile(file: Path, profile: Profile, *, keep: bool = False) -> None:
    """Save it; unless `keep`, or another profile uses them, the old one's weights are removed. Raises StartupError."""
    try:
        before = load_profile(file)
    except StartupError:
        before = None
    save_profile(file, profile)
    old = _converted(file, before)
    if old is not None and not keep and old != _converted(file, profile) and not _is_shared(old, file):
        with suppress(OSError):
            old.unlink(missing_ok=True)


def forget(file: Path) -> list[Path]:
    """Remove a profile and the weights that were made for it alone; what was removed. Raises StartupError."""
    try:
        made = _converted(file, load_profile(file))
        weights = [] if made is None else [made]
    except StartupError:
        weights = _named_in(file)
    doomed = [path for path in (file, *weights) if path.exists() and not _is_shared(path, file)]
    try:
        for path in doomed:
            path.unlink()
    except OSError as error:
        raise StartupError(f"cannot remove {error.filename}: {error.strerror or error}") from None
    return doomed


def _converted(file: Path, profile: Profile | None) -> Path | None:
    """The weights that were made for a profile: never a file that is not one of ours, whatever the profile says."""
    if profile is None or profile.converted is None:
        return None
    made = Path(profile.converted.path)
    return made if made.parent == weights_folder(file) and made.suffix == ".gguf" else None


def weights_folder(file: Path) -> Path:
    """Where the files are kept that were made for the profile `file` and those beside it."""
    return file.parent.parent / "models" / "tuned"


def _named_in(file: Path) -> list[Path]:
    """What a profile that cannot be understood was made with: the files of ours whose names stand in it."""
    try:
        data = file.read_bytes()
    except OSError:
        return []
    own = file.name.rpartition(".")[0].rpartition(".")[0]  # that of the model, which may be one of ours itself
    return [path for path in sorted(weights_folder(file).glob("*.gguf")) if path.stem != own and _names(data, path)]


def _is_shared(path: Path, file: Path) -> bool:
    """Does another profile than `file` name it? Two copies of a model are converted once, as the bytes are the same."""
    if path == file:
        return False
    for other in file.parent.glob("*.json"):
        if other != file:
            try:
                if _names(other.read_bytes(), path):
                    return True
            except OSError:
                return True  # nobody knows
    return False


def _names(data: bytes, path: Path) -> bool:
    """Also in a profile of another version, or half of one."""
    name = path.name.encode("utf-8", "surrogateescape").replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    return b"/" + name + b'"' in data


def unusable(profile: Profile, model: Path, file: Path) -> str:
    """Why the profile in `file` is not for this model file here and now; "" if it is."""
    if not is_unchanged(profile.source, model):
        return "the tuned profile is for another file"
    if (profile.machine, profile.cores) != (machine(), cores()):
        return "the tuned profile is for another machine"
    if profile.library != library():
        return f"the tuned profile is for llama-cpp-python {profile.library}"
    if profile.converted is not None and _converted(file, profile) is None:
        return f"the weights of the tuned profile are not in {weights_folder(file)} ({profile.converted.path})"
    if profile.converted is not None and not is_unchanged(profile.converted, Path(profile.converted.path)):
        return f"the weights of the tuned profile are gone or altered ({profile.converted.path})"
    return ""


def apply_profile(config: Config, cache: Path, model: Path, load: Callable[[Mapping[str, Value]], Config]) -> Applied:
    """What to serve for the file `model`. `load` gives the settings with those of the profile below the user's own."""
    untuned = Applied(config, model)
    if not config.model.tuned:
        return untuned
    file = profile_file(cache, model)
    try:
        profile = load_profile(file)
        if profile is None:
            return untuned
        if why := unusable(profile, model, file):
            return replace(untuned, note=f"{why}: it is not used; {AGAIN}")
        tuned, changed = use(untuned, profile, load)
    except StartupError as error:
        return replace(untuned, note=f"{error.message}; the tuned profile is not used")
    if not changed:
        return tuned
    how = "tuned" if profile.by == TUNE else "measured at the first start"
    note = f"{how} ({file}): {', '.join(changed)}; --set model.tuned=false for the file as it is"
    return replace(tuned, note=note)


def use(untuned: Applied, profile: Profile, load: Callable[[Mapping[str, Value]], Config]) -> tuple[Applied, list[str]]:
    """A profile's weights and settings, below the user's own, and what they change. Raises StartupError."""
    config = load(profile.settings)
    path = untuned.path if profile.converted is None else Path(profile.converted.path)
    changed = differences(untuned.config, config)
    if path != untuned.path:
        changed.insert(0, f"{profile.weights} weights")
    return Applied(config, path), changed


def is_known(cache: Path, model: Path) -> bool:
    """Is there a profile for this model file here and now?"""
    file = profile_file(cache, model)
    try:
        profile = load_profile(file)
    except StartupError:
        return False
    return profile is not None and not unusable(profile, model, file)


def differences(before: Config, after: Config) -> list[str]:
    """`name=value` of each setting that changed."""
    return [
        f"{section}.{part.name}={shown(new)}"
        for section, kind in SECTIONS.items()
        for part in fields(kind)
        if (new := getattr(getattr(after, section), part.name)) != getattr(getattr(before, section), part.name)
    ]


def shown(value: Value) -> str:
    """As it is written in a file or flag."""
    return str(value).lower() if isinstance(value, bool) else str(value)
