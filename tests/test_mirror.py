"""Every source file that does anything has its test file: src/headrace/a/b.py → tests/a/test_b.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "headrace"
EXEMPT = {"__init__.py", "__main__.py"}


def acts(source: str) -> bool:
    """Some function has a body: it is not only types and the signatures of ports."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return any(
        not (isinstance(last := node.body[-1], ast.Expr) and isinstance(last.value, ast.Constant)) for node in functions
    )


BENCH = ROOT / "src" / "headrace_bench"


def mirrors() -> list[tuple[Path, Path]]:
    """(source file, its test file), both from the root. The laboratory's tests stand in a folder of its name."""
    found = []
    for source, tests in ((SOURCE, Path("tests")), (BENCH, Path("tests", "headrace_bench"))):
        for path in sorted(source.rglob("*.py")):
            if path.name not in EXEMPT and acts(path.read_text()):
                mirror = tests / path.relative_to(source).with_name(f"test_{path.name}")
                found.append((path.relative_to(ROOT), mirror))
    return found


@pytest.mark.parametrize(("file", "test"), mirrors(), ids=str)
def test_it_is_mirrored(file: Path, test: Path) -> None:
    mirror = ROOT / test
    assert mirror.is_file(), f"{file} has no {mirror.relative_to(ROOT)}"
    assert "def test_" in mirror.read_text(), f"{mirror.relative_to(ROOT)} tests nothing"


def test_the_init_files_hold_no_logic() -> None:
    for path in SOURCE.rglob("__init__.py"):
        assert len(path.read_text().splitlines()) <= 20, (
            f"{path.relative_to(SOURCE)} is exempt, so it must stay trivial"
        )


def test_signatures_alone_do_not_act() -> None:
    assert not acts(
        'class Port(Protocol):\n    def f(self) -> int:\n        """Docs."""\n        ...\n    def g(self) -> None: ...'
    )
    assert acts("class C:\n    def f(self) -> int:\n        return 1")
