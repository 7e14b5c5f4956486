"""The documents say what is true: links lead somewhere, named functions exist, generated pages are fresh."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.observe.metrics import Metrics
from headrace.protocol import openai
from headrace.protocol.fields import Field
from headrace.settings import SETTINGS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"`([\w/.]+\.py):([A-Za-z_][\w.]*)`")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """The fragment ids that a forge gives to headings."""
    headings = re.findall(r"^#+ +(.+?) *$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(without_code(text)):
        target, _, fragment = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = path.parent / target if target else path
        if not file.exists():
            yield link
        elif fragment and file.suffix == ".md" and fragment not in anchors(text if file == path else file.read_text()):
            yield link


def defined(tree: ast.Module) -> set[str]:
    """Functions and classes of a module: `f`, `C`, `C.method`, and what is assigned at its top."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            )
        if isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return found


def unknown_references(text: str) -> Iterator[str]:
    """`path.py:function` that is not there; paths count from the package or from the repository."""
    for path, function in REFERENCE.findall(text):
        files = [file for file in (ROOT / "src/headrace" / path, ROOT / path) if file.is_file()]
        if not files or function not in defined(ast.parse(files[0].read_text())):
            yield f"{path}:{function}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    assert list(dead_links(path, path.read_text())) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_compile(path: Path) -> None:
    for language, code in FENCE.findall(path.read_text()):
        if language in ("python", "py"):
            compile(code, name(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_named_functions_exist(path: Path) -> None:
    assert list(unknown_references(path.read_text())) == []


def test_generated_pages_are_fresh() -> None:
    pages: dict[Path, str] = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["pages"]()
    stale = [name(path) for path, text in pages.items() if not path.is_file() or path.read_text() != text]
    assert stale == [], "run scripts/docs"


def test_every_setting_is_documented() -> None:
    everything = "\n".join(path.read_text() for path in DOCUMENTS)
    assert [row.name for row in SETTINGS.values() if f"`{row.name}`" not in everything] == []


def test_every_field_of_our_own_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    rows = [row for row in vars(openai).values() if isinstance(row, Field)]
    names = [row.name.removeprefix("headrace.") for row in rows if row.name.startswith("headrace.")]
    assert len(names) >= 5
    assert [name for name in names if f'`"headrace": {{"{name}": ' not in page] == []


def test_every_metric_is_documented() -> None:
    everything = "\n".join(path.read_text() for path in DOCUMENTS)
    assert [family.name for family in Metrics({}).collect() if f"`{family.name}" not in everything] == []


def test_the_scripts_that_the_documents_name_can_be_run() -> None:
    for path in DOCUMENTS:
        for script in re.findall(r"(?<![\w/])(?:scripts/\w+|\.ci/run)(?![\w./])", path.read_text()):
            assert (ROOT / script).stat().st_mode & 0o111, f"{name(path)} names {script}"


# --- the checks themselves


def test_the_link_check_sees() -> None:
    text = "# A b\n[x](#a-b) [x](#c) [x](none.md) [x](https://x/y)\n```\n[x](code.md)\n```\n"
    assert list(dead_links(ROOT / "README.md", text)) == ["#c", "none.md"]


def test_the_reference_check_sees() -> None:
    text = "`core/clock.py:offset` `core/clock.py:none` `core/none.py:x` `src/headrace/core/clock.py:Clock`"
    text += " `core/timeline.py:Timeline.stages` `core/timeline.py:Timeline.none`"
    assert list(unknown_references(text)) == [
        "core/clock.py:none",
        "core/none.py:x",
        "core/timeline.py:Timeline.none",
    ]
