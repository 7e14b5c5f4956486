"""scripts/install as it is, in a copy of the repository's few files that it needs, with a Python, a pip and a compiler
that only say what they were asked; and what scripts/engine.py makes of a CPU."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "native" / "amx_tileconfig.h"
REQUIRED = "llama-cpp-python==0.3.36"

PYTHON = """#!/bin/bash
# A Python whose pip and venv are told in calls.log; what else it is asked, the real one does.
case "$*" in
"-m venv --clear "*)
    rm -rf "$4"; mkdir -p "$4/bin" "$4/lib"; ln -s lib "$4/lib64"
    cp "$0" "$4/bin/python"; echo "version = VERSION.0" >"$4/pyvenv.cfg" ;;
"-m pip --version") ;;
"-m pip wheel "*)
    echo "wheel CMAKE_ARGS=${CMAKE_ARGS:-} $*" >>LOG
    [[ -z ${BROKEN:-} ]] || { mkdir -p "${@: -2:1}"; echo half >"${@: -2:1}/half.whl"; exit 1; }
    mkdir -p "${@: -2:1}"; echo whole >"${@: -2:1}/llama_cpp_python-0.3.36-py3-none-any.whl" ;;
"-m pip install --editable"*)
    echo "editable $*" >>LOG; touch .venv/bin/headrace; chmod +x .venv/bin/headrace ;;
"-m pip install "*)
    echo "engine $*" >>LOG
    folder=.venv/lib/python3/site-packages/llama_cpp_python-0.3.36.dist-info
    mkdir -p "$folder"; echo "{\\"url\\": \\"file://${@: -1}\\"}" >"$folder/direct_url.json" ;;
"-m headrace.engines.selftest") echo selftest >>LOG; exit "${SELFTEST:-0}" ;;
*) exec REAL "$@" ;;
esac
"""


class Checkout:
    """A folder with a space in its name, where scripts/install can be run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        self.cache = folder / "cache"
        self.bin = folder / "bin"
        self.log = folder / "calls.log"
        for name in ("scripts/install", "scripts/engine.py", "pyproject.toml", "native"):
            source, target = ROOT / name, self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        self.bin.mkdir(exist_ok=True)
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        stub = PYTHON.replace("REAL", sys.executable).replace("LOG", str(self.log)).replace("VERSION", version)
        self.program("python3", stub)
        self.compiler("12.2.0")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def compiler(self, version: str) -> None:
        self.program("c++", f"#!/bin/sh\necho 'c++ (stub) {version}'\n")

    def install(self, code: int = 0, **more: str) -> tuple[list[str], str]:
        """(first words of what pip and the self-test were asked, what the script said)."""
        self.log.write_text("")
        kept = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.cache), "XDG_CACHE_HOME": str(self.cache)}
        done = subprocess.run(
            [self.root / "scripts" / "install"], env=kept | more, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return [line.split()[0] for line in self.log.read_text().splitlines()], done.stdout + done.stderr

    @property
    def stamp(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.root / ".venv" / ".engine").read_text())
        return found

    def rewrite(self, **facts: str) -> None:
        """As if the engine had been built when this was so."""
        (self.root / ".venv" / ".engine").write_text(json.dumps(self.stamp | facts))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def installed(checkout: Checkout) -> Checkout:
    assert checkout.install()[0] == ["wheel", "engine", "editable", "selftest"]
    return checkout


def test_the_first_run_builds_with_the_header_and_past_pip_s_cache(checkout: Checkout) -> None:
    _, said = checkout.install()
    assert f"The engine ({REQUIRED}): compiling it" in said
    wheel = checkout.log.read_text().splitlines()[0]
    assert f"CMAKE_PROJECT_ggml_INCLUDE={checkout.root}/native/llama_cpp.cmake" in wheel
    assert "--no-cache-dir" in wheel
    assert "--no-binary llama-cpp-python" in wheel
    assert "build.targets=llama;llama-common" in wheel
    assert checkout.stamp["compiler"] == f"{os.path.realpath(checkout.bin / 'c++')}: c++ (stub) 12.2.0"


def test_nothing_changed_nothing_done(installed: Checkout) -> None:
    assert installed.install() == ([], "")


def test_a_second_checkout_takes_the_same_wheel(installed: Checkout) -> None:
    shutil.move(installed.root, installed.root.with_name("first"))
    calls, said = Checkout(installed.root.parent).install()
    assert calls == ["engine", "editable", "selftest"]
    assert "installing the one that was compiled before" in said


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="what a CPU can do is read from /proc/cpuinfo")
def test_another_cpu_is_told_by_what_it_has_and_lacks(installed: Checkout) -> None:
    known = installed.stamp["cpu"].split()
    installed.rewrite(cpu=" ".join([*known[1:], "amx_other"]))
    calls, said = installed.install()
    assert calls == ["engine", "selftest"], "the one that was built for this CPU is still there"
    assert f"was built for another CPU (this one has {known[0]} and lacks amx_other): installing the one" in said
    assert installed.install() == ([], "")


def test_another_compiler_builds_again_and_says_which(installed: Checkout) -> None:
    installed.compiler("14.2.0")
    calls, said = installed.install()
    assert calls == ["wheel", "engine", "selftest"]
    assert "built by another compiler" in said
    assert "14.2.0" in said
    installed.compiler("12.2.0")
    assert installed.install()[0] == ["engine", "selftest"]


def test_the_user_s_cmake_args_replace_ours_keep_the_header_and_stay(installed: Checkout) -> None:
    calls, said = installed.install(CMAKE_ARGS="-DGGML_CUDA=on")
    assert calls == ["wheel", "engine", "selftest"]
    assert "built with another CMAKE_ARGS" in said
    wheel = installed.log.read_text().splitlines()[0]
    assert wheel.startswith("wheel CMAKE_ARGS=-DGGML_CUDA=on ")
    assert "CMAKE_PROJECT_ggml_INCLUDE=" in wheel
    assert "build.targets" not in wheel
    assert installed.install() == ([], ""), "what is not set is as it was"
    assert installed.install(CMAKE_ARGS="")[0] == ["engine", "selftest"], "set to nothing, it is ours again"


def test_an_engine_without_a_stamp_is_built_once(installed: Checkout) -> None:
    (installed.root / ".venv" / ".engine").unlink()
    shutil.rmtree(installed.cache / "headrace" / "wheels")
    calls, said = installed.install()
    assert calls == ["wheel", "engine", "selftest"]
    assert "was not built by scripts/install" in said
    assert installed.install() == ([], "")


def test_what_pip_put_in_its_place_is_replaced(installed: Checkout) -> None:
    next(installed.root.glob(".venv/lib/*/*/*/direct_url.json")).unlink()  # as after pip install from an index
    calls, said = installed.install()
    assert calls == ["engine", "selftest"]
    assert "is not the one that scripts/install put there" in said


def test_a_build_that_fails_leaves_no_wheel(checkout: Checkout) -> None:
    calls, said = checkout.install(code=2, BROKEN="yes")
    assert calls == ["wheel"]
    assert said.splitlines()[-1].startswith(f"scripts/install: {REQUIRED} could not be built")
    assert [path.name for path in (checkout.cache / "headrace" / "wheels").iterdir() if path.is_dir()] == []
    assert checkout.install()[0] == ["wheel", "engine", "editable", "selftest"]


def test_what_a_killed_build_left_is_swept_away(installed: Checkout) -> None:
    wheels = installed.cache / "headrace" / "wheels"
    folder = next(path for path in wheels.iterdir() if path.is_dir())
    folder.rename(folder.with_name(f"{folder.name}.part"))
    (installed.root / ".venv" / ".engine").unlink()
    assert installed.install()[0] == ["wheel", "engine", "selftest"]
    assert not list(wheels.glob("*.part"))


def test_without_a_compiler_it_says_what_to_install(checkout: Checkout) -> None:
    assert "no C++ compiler found" in checkout.install(code=2, CXX="no-such-compiler")[1]


def test_another_python_makes_the_environment_anew(installed: Checkout) -> None:
    python = str(installed.bin / "python3")
    assert installed.install(PYTHON=python) == ([], "")
    (installed.root / ".venv" / "pyvenv.cfg").write_text("version = 3.9.1\n")
    calls, said = installed.install(PYTHON=python)
    assert calls == ["engine", "editable", "selftest"]
    assert "Making .venv with Python" in said


def test_a_second_installation_waits_for_the_build_of_the_first(installed: Checkout) -> None:
    shutil.rmtree(installed.root / ".venv")
    lock = next((installed.cache / "headrace" / "wheels").glob("*.lock"))
    environ = {"PATH": f"{installed.bin}:/usr/bin:/bin", "XDG_CACHE_HOME": str(installed.cache)}
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        words = [installed.root / "scripts" / "install"]
        with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert any("waiting for it" in line for line in second.stdout)
            assert not (installed.root / ".venv" / ".engine").exists()
            fcntl.flock(held, fcntl.LOCK_UN)
            assert "Installed" in second.stdout.read()
    assert second.returncode == 0


@pytest.mark.parametrize(("status", "code"), [(3, 0), (2, 2), (1, 2)])
def test_kernels_that_fail_end_the_installation_only_if_it_cannot_do_without(
    checkout: Checkout, status: int, code: int
) -> None:
    assert checkout.install(code=code, SELFTEST=str(status))[0][-1] == "selftest"
    again = checkout.install()[0]
    assert again == ([] if code == 0 else ["selftest"]), "tested once, and again where it failed"


def engine_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine", ROOT / "scripts" / "engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cpu_is_its_instruction_sets(tmp_path: Path) -> None:
    """Not its name, nor what a kernel's update adds."""
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: X\nflags\t\t: fpu sse2 avx2 amx_int8 md_clear ibrs\n")
    engine = engine_module()
    assert engine.facts_of({}, {}, file)["cpu"] == "amx_int8 avx2 sse2"
    assert engine.facts_of({}, {"CMAKE_ARGS": "-DGGML_NATIVE=OFF"}, file)["cpu"] == "any"


def test_only_the_wheels_used_last_are_kept(tmp_path: Path) -> None:
    for at in range(5):
        (tmp_path / f"{at}").mkdir()
        os.utime(tmp_path / f"{at}", (at, at))
    engine_module().prune(tmp_path, kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


# --- the header

CONFIGURED = """#include <immintrin.h>
typedef unsigned char Byte;
struct alignas(64) Config { Byte palette, start, reserved[14]; unsigned short bytes[16]; Byte rows[16]; };
void configure() { Config c = {}; c.palette = 1; c.rows[0] = 77; c.bytes[0] = 64; _tile_loadconfig(&c); }
"""


def assembly(folder: Path, *options: str) -> str:
    """Of CONFIGURED. Skips where no GCC compiles for x86-64."""
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs g++ on x86-64")
    if b"clang" in subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout:
        pytest.skip("g++ is Clang here")
    (folder / "x.cpp").write_text(CONFIGURED)
    words = [compiler, "-O3", *options, "-S", "-o", "-", "x.cpp"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode and "amx" in done.stderr:
        pytest.skip("this g++ does not know AMX")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_with_the_header_the_whole_configuration_is_stored(tmp_path: Path) -> None:
    """77, the rows of the first tile, is 48 bytes behind the start: GCC before 14 drops it without the header."""
    text = assembly(tmp_path, "-mamx-tile", "-include", str(HEADER))
    assert "ldtilecfg" in text
    assert "$77" in text


def test_without_amx_the_header_is_empty(tmp_path: Path) -> None:
    assembly(tmp_path, "-mamx-tile")
    (tmp_path / "x.cpp").write_text("int x;\n")
    words = ["g++", "-E", "-P", "-include", str(HEADER), "x.cpp"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip() == "int x;"
