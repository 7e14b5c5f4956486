"""Builds the engine, llama-cpp-python with the llama.cpp in it, for this machine and puts it into .venv.

    facts of now ── those of .venv/.engine, and its wheel installed? ──► nothing to do
        │ no: one line says what is different
        ▼
    wheels/<digest of the facts>/ ── a wheel there? ──► installed from there, in seconds
        │ no
        ▼
    pip wheel into <digest>.part, which takes the folder's name when it is whole

scripts/install runs it with .venv's Python; `CMAKE_ARGS` and the compiler's variables are the user's. What is not set
is as it was in the last build, so a plain `scripts/serve` does not undo `CMAKE_ARGS=-DGGML_CUDA=on scripts/install`.

Rules: the standard library alone, since nothing is installed yet; pip's own cache is left out both ways, because a
build belongs to a CPU and a compiler, and pip knows neither; one build of a kind at a time on a machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "llama-cpp-python"
FLAGS = ("CMAKE_ARGS", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX")
FEATURES = re.compile(
    r"(avx|amx|sse|ssse|fma|f16c|bmi|abm|popcnt|movbe|cx16|gfni|vaes|vpclmul|asimd|sve|sme|i8mm|bf16|fphp|dotprod).*"
)
"""Instruction sets that `-march=native` may compile for, as Linux names them; what else a CPU says of itself changes
with the kernel. Of Apple's CPUs the name is taken."""
OURS = ("build.targets=llama;llama-common", "cmake.define.LLAVA_BUILD=OFF")
"""Only what is used here, without the multimodal library and the tools; not with CMAKE_ARGS of the user's."""
KEPT = 8
"""Wheels in the cache, the last ones used; 20 MB at most each."""

Facts = dict[str, str]


class Refusal(Exception):
    """One line for the user."""


def facts_of(before: Mapping[str, str], environ: Mapping[str, str], cpuinfo: Path = Path("/proc/cpuinfo")) -> Facts:
    """What a build depends on. `before`: the facts of the last one, which say what is not set or not there now."""
    flags = {name: " ".join(environ.get(name, before.get(name, "")).split()) for name in FLAGS}
    native = b"".join(file.read_bytes() for file in sorted((ROOT / "native").iterdir()))
    return {
        "package": _required(ROOT / "pyproject.toml"),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": "any" if re.search(r"GGML_NATIVE(:BOOL)?=(OFF|0|FALSE)\b", flags["CMAKE_ARGS"], re.I) else _cpu(cpuinfo),
        "compiler": _compiler(flags["CXX"] or "c++") or before.get("compiler", ""),
        "recipe": hashlib.sha256(native + repr(OURS).encode()).hexdigest()[:8],
        **flags,
    }


def _required(project: Path) -> str:
    """`llama-cpp-python==VERSION`, from the dependencies."""
    found = re.search(rf"{PACKAGE}==[0-9.]+", project.read_text())
    if not found:
        raise Refusal(f"{project.name} does not say which {PACKAGE}")
    return found[0]


def _cpu(cpuinfo: Path) -> str:
    """Its instruction sets, sorted; where Linux does not tell, its name."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        brand = ["sysctl", "-n", "machdep.cpu.brand_string"]
        with suppress(OSError):
            return subprocess.run(brand, capture_output=True, text=True, check=False).stdout.strip()
        return platform.processor()
    said = next((line for line in lines if line.partition(":")[0].strip() in ("flags", "Features")), "")
    return " ".join(sorted({name for name in said.partition(":")[2].split() if FEATURES.fullmatch(name)}))


def _compiler(command: str) -> str:
    """Path and version of the C++ compiler; "" if there is none."""
    try:
        words = shlex.split(command)
        path = shutil.which(words[0])
        if path is None:
            return ""
        done = subprocess.run([path, *words[1:], "--version"], capture_output=True, text=True, check=False)
    except (OSError, ValueError, IndexError):
        return ""
    return f"{os.path.realpath(path)}: {(done.stdout.splitlines() or ['?'])[0].strip()}"


def digest_of(facts: Facts) -> str:
    """Names a build: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def difference(before: Facts, now: Facts) -> str:
    """What stands in the way of a build with the facts `before`, for people; "" if nothing does."""
    if before.get("cpu") != now["cpu"]:
        gained, lost = features(before, now)
        words = [f"has {' '.join(gained)}"] * bool(gained) + [f"lacks {' '.join(lost)}"] * bool(lost)
        return f"was built for another CPU (this one {' and '.join(words)})"
    if before.get("package") != now["package"]:
        return f"is {before.get('package')}, and {now['package']} is wanted"
    if before.get("compiler") != now["compiler"]:
        return f"was built by another compiler ({before.get('compiler')}; now {now['compiler']})"
    changed = [name for name in FLAGS if before.get(name, "") != now[name]]
    if changed:
        return f"was built with another {', '.join(changed)}"
    for name, words in (("python", "for another Python"), ("system", "for another system")):
        if before.get(name) != now[name]:
            return f"was built {words} ({before.get(name)}; now {now[name]})"
    return "" if before == now else "was built in another way than this version of Headrace does"


def features(before: Facts, now: Facts) -> tuple[list[str], list[str]]:
    """(instruction sets that this CPU has and the build did not count on, those that it counted on and are missing)."""
    old, new = set(before.get("cpu", "").split()), set(now["cpu"].split())
    return sorted(new - old), sorted(old - new)


def read_stamp(file: Path) -> Facts:
    """The facts of the build in an environment; empty if it was not built by this program."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def origins(environment: Path) -> list[str]:
    """Where each installed copy came from, as pip noted it; "" for a package index. (lib64 is a link to lib.)"""
    found = []
    for folder in environment.glob("lib/python*/site-packages/llama_cpp_python-*.dist-info"):
        file = folder / "direct_url.json"
        found.append(file.read_text() if file.is_file() else "")
    return found


@contextmanager
def alone(file: Path, say_waiting: str) -> Iterator[None]:
    """No other process is in here with the same file. The lock ends with the process, however that ends."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(say_waiting, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(python: Path, facts: Facts, folder: Path) -> None:
    """Compile the wheel into `folder`, whole or not at all. Raises Refusal."""
    if not facts["compiler"] or not _compiler(facts["CXX"] or "c++"):
        raise Refusal(f"no C++ compiler found ({facts['CXX'] or 'c++'}; on Debian: apt-get install gcc g++)")
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a build that was killed
    settings = [f"cmake.define.CMAKE_PROJECT_ggml_INCLUDE={ROOT / 'native' / 'llama_cpp.cmake'}"]
    if not facts["CMAKE_ARGS"]:
        settings += OURS
    words = [str(python), "-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--no-binary", PACKAGE]
    words += [f"--config-settings={setting}" for setting in settings]
    flags = {name: facts[name] for name in FLAGS if facts[name]}
    environ = {name: value for name, value in os.environ.items() if name not in FLAGS} | flags
    try:
        code = subprocess.run([*words, "--wheel-dir", str(part), facts["package"]], env=environ, check=False).returncode
        if code != 0 or not list(part.glob("*.whl")):
            raise Refusal(f"{facts['package']} could not be built: what pip and the compiler say stands above")
        (part / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def prune(wheels: Path, kept: int = KEPT) -> None:
    """Forget the builds that were not used for longest. Locks stay: somebody may wait for one."""
    folders = [folder for folder in wheels.iterdir() if folder.is_dir() and not folder.name.endswith(".part")]
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime)[:-kept]:
        shutil.rmtree(folder, ignore_errors=True)


def ensure(environment: Path, wheels: Path, environ: Mapping[str, str]) -> None:
    """The engine in `environment` is right for this machine afterwards. Raises Refusal."""
    stamp = environment / ".engine"
    before = read_stamp(stamp)
    facts = facts_of(before, environ)
    digest, installed = digest_of(facts), origins(environment)
    folder = wheels / digest
    if before == facts and len(installed) == 1 and f"/{digest}/" in installed[0]:
        return
    if not before:
        why = f"The engine in {environment.name} was not built by scripts/install" if installed else ""
    elif before == facts:
        why = f"The engine in {environment.name} is not the one that scripts/install put there"
    else:
        why = f"The engine {difference(before, facts)}"
    have = list(folder.glob("*.whl"))
    more = before | {"cpu": facts["cpu"]} == facts and not features(before, facts)[1]
    if more and installed and not have and not _compiler(facts["CXX"] or "c++"):
        print(f"==> {why}: no C++ compiler found to build it again, so it stays as it is")
        return
    action = "installing the one that was compiled before" if have else "compiling it, about five minutes on two cores"
    opening = why or f"The engine ({facts['package']})"
    print(f"==> {opening}: {action}", flush=True)
    wheels.mkdir(parents=True, exist_ok=True)
    with alone(wheels / f"{digest}.lock", "==> Another installation is compiling the same engine: waiting for it"):
        if not list(folder.glob("*.whl")):
            build(environment / "bin" / "python", facts, folder)
        os.utime(folder)
        for name in (".engine", ".engine-tested"):  # an installation that breaks off is none, and a new one is untested
            (environment / name).unlink(missing_ok=True)
        wheel = next(folder.glob("*.whl"))
        words = ["install", "--no-deps", "--force-reinstall", "--no-index", "--quiet", str(wheel)]
        if subprocess.run([str(environment / "bin" / "python"), "-m", "pip", *words], check=False).returncode:
            raise Refusal(f"{wheel} could not be installed: what pip says stands above")
        stamp.write_text(json.dumps(facts, indent=1) + "\n")
    prune(wheels)


def main() -> int:
    """The exit status: 0, or 2 with one line on stderr."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        ensure(ROOT / ".venv", cache / "headrace" / "wheels", os.environ)
    except Refusal as error:
        print(f"scripts/install: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"scripts/install: {error.filename or cache}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
