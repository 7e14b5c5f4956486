"""The house's rules about imports, read from the source, not from running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headrace"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
MAX_LINES = 400

# Imports point down this list, or stay on their line.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("compose",),
    ("config", "admin", "assembly", "entrance", "fleet", "models", "pins", "tuned", "tuner", "measure"),
    ("settings",),
    ("testing",),
    ("server",),
    ("gateway",),
    ("observe",),
    ("engines",),
    ("kv",),
    ("protocol",),
    ("core",),
    ("__init__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

PURE = (
    "core/",
    "protocol/",
    "kv/",
    # What decides in the gateway; the rest of it acts.
    "gateway/affinity.py",
    "gateway/backend.py",
    "gateway/buckets.py",
    "gateway/gate.py",
    "gateway/health.py",
    "gateway/replay.py",
    "gateway/router.py",
    "gateway/spec.py",
    "gateway/states.py",
)
IMPURE = {"time", "random", "asyncio", "threading", "socket", "os", "logging"}
NATIVE = {"ctypes", "llama_cpp"}
# The last one makes a system call that the standard library does not offer.
NATIVE_FILES = (
    "engines/llama_lib.py",
    "engines/llama.py",
    "engines/quantiser.py",
    "engines/snapshot.py",
    "engines/vocab.py",
    "server/slice.py",
)
# Where KV is kept outside the pool: what decides stands in kv/tiers.py and kv/blob.py, these three act.
ACTING = ("kv/store.py", "kv/disk.py", "kv/shared.py")
OUTPUT = {"click", "rich"}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, wherever it stands; `from a import b` counts as a and as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def layer(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def violations(file: str, source: str) -> list[str]:
    """What `file` (relative to the package) does that the rules forbid."""
    tree = ast.parse(source)
    found = [f"{line}: {reason}" for line, name in imports(tree) for reason in _import_faults(file, name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and file != "config.py":
            found.append(f"{node.lineno}: reads the environment; only config.py does")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
            and layer(file) != "cli"
        ):
            found.append(f"{node.lineno}: prints; only cli/ does")
    return found


def _import_faults(file: str, name: str) -> Iterator[str]:
    top, *rest = name.split(".")
    if name.startswith("."):
        yield f"relative import {name}: spell it out"
    if file.startswith(PURE) and file not in ACTING and top in IMPURE:
        yield f"imports {top}: {layer(file)}/ is pure"
    if top in NATIVE and file not in NATIVE_FILES:
        yield f"imports {top}: only {', '.join(NATIVE_FILES)} may"
    if top in OUTPUT and layer(file) != "cli":
        yield f"imports {top}: only cli/ writes to the terminal"
    if top == "os" and rest and rest[0] in ENVIRONMENT and file != "config.py":
        yield "reads the environment; only config.py does"
    if top == "headrace":
        # `from headrace import __version__` asks the package itself, which is below everything.
        target = rest[0] if rest and rest[0] in RANK else "__init__"
        if RANK[target] < RANK[layer(file)]:
            yield f"imports {name}: {target} is above {layer(file)}"


@pytest.mark.parametrize("file", FILES)
def test_the_file_keeps_the_rules(file: str) -> None:
    assert violations(file, (SOURCE / file).read_text()) == []


@pytest.mark.parametrize("file", FILES)
def test_the_file_is_short(file: str) -> None:
    assert len((SOURCE / file).read_text().splitlines()) <= MAX_LINES


def test_every_part_of_the_package_has_its_layer() -> None:
    assert {layer(file) for file in FILES} <= RANK.keys()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/x.py", "import time"),
        ("core/x.py", "from time import monotonic"),
        ("protocol/x.py", "import os.path"),
        ("kv/x.py", "def f():\n    import random"),
        ("kv/tiers.py", "import threading"),
        ("core/x.py", "from headrace.kv import radix"),
        ("core/x.py", "if TYPE_CHECKING:\n    from headrace.protocol.openai import read"),
        ("engines/x.py", "from headrace.server import app"),
        ("server/x.py", "from headrace import config"),
        ("server/x.py", "import headrace.config"),
        ("config.py", "from headrace.compose import serve"),
        ("server/x.py", "import llama_cpp"),
        ("engines/stepper.py", "import ctypes"),
        ("server/x.py", "import os\nos.environ['X']"),
        ("server/x.py", "from os import getenv"),
        ("server/x.py", "print('x')"),
        ("server/x.py", "from rich.console import Console"),
        ("server/x.py", "from . import app"),
    ],
)
def test_the_check_sees(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/x.py", "from headrace.core import errors\nfrom headrace import __version__"),
        ("server/x.py", "import time, os\nfrom headrace.core.errors import HeadraceError\nos.getpid()"),
        ("engines/llama_lib.py", "import ctypes, llama_cpp"),
        ("kv/store.py", "import threading"),
        ("config.py", "import os\nos.environ"),
        ("cli/x.py", "import click\nfrom headrace import compose, config\nprint('x')"),
        ("models.py", "from headrace.config import cache_home"),
        ("compose.py", "from headrace.config import Config"),
    ],
)
def test_the_check_lets_pass(file: str, source: str) -> None:
    assert violations(file, source) == []


BENCH = SOURCE.parent / "headrace_bench"
BENCH_FILES = sorted(path.relative_to(BENCH).as_posix() for path in BENCH.rglob("*.py"))
BENCH_PURE = ("load/", "figures/", "record.py", "fault.py", "client/sse.py", "client/http1.py", "client/http2.py")
# The bindings are imported in a process of their own, for what no server tells: parameters, perplexity.
BENCH_NATIVE = ("gguf.py",)


def bench_violations(file: str, source: str) -> list[str]:
    """What a file of the laboratory does that its rules forbid: it judges Headrace, so it shares nothing with it."""
    found = []
    for line, name in imports(ast.parse(source)):
        top = name.split(".")[0]
        if top == "headrace":
            found.append(f"{line}: imports {name}: the laboratory measures from outside")
        if file.startswith(BENCH_PURE) and top in IMPURE:
            found.append(f"{line}: imports {top}: {file} is pure")
        if top in NATIVE - {"ctypes"} and file not in BENCH_NATIVE:
            found.append(f"{line}: imports {top}: only {', '.join(BENCH_NATIVE)} may")
    return found


@pytest.mark.parametrize("file", BENCH_FILES)
def test_the_laboratory_keeps_its_rules(file: str) -> None:
    source = (BENCH / file).read_text()
    assert bench_violations(file, source) == []
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("verbs/x.py", "from headrace.settings import SETTINGS"),
        ("figures/x.py", "import time"),
        ("load/x.py", "from random import Random"),
        ("client/x.py", "import llama_cpp"),
    ],
)
def test_the_check_of_the_laboratory_sees(file: str, source: str) -> None:
    assert len(bench_violations(file, source)) == 1
