from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from bench_runs import health, records, schedule
from headrace_bench.fault import Fault, Misuse
from headrace_bench.report.folder import Config, Journal, config, read, without_keys


def made(seed: int = 7) -> Config:
    return config(
        verb="run", command=["headrace-bench", "run", "--key", "secret", "--url=http://me:pw@h:1/v1"],
        url="http://me:pw@h:1/v1", model="demo", seed=seed, wall="2026-01-02T03:04:05+00:00",
        flags={"key": "secret", "duration": 30.0, "out": Path("runs/a"), "slo": ("chat",)},
    )  # fmt: skip


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    plan, ends = schedule(30), records(30)
    with Journal(tmp_path / "run", made(), plan) as journal:
        for record in reversed(ends):
            journal(record)
        journal.finish(
            health(), {"schema": 1, "ttft": None}, [{"figure": "ttft", "p50": 1.5, "p99": None}], {"ttft": "HIST"}
        )
    found = read(tmp_path / "run")
    assert found.schedule == plan
    assert list(found.records) == ends
    assert found.health == health()
    assert found.config == made()
    assert found.summary == {"schema": 1, "ttft": None}
    assert not found.torn
    assert (tmp_path / "run/summary.csv").read_text() == "figure,p50,p99\nttft,1.5,\n"
    assert (tmp_path / "run/hist/ttft.hdr").read_text() == "HIST\n"
    assert not list((tmp_path / "run").rglob(".*"))


def test_no_key_is_written(tmp_path: Path) -> None:
    Journal(tmp_path, made(), schedule(1)).close()
    text = (tmp_path / "config.json").read_text()
    assert "secret" not in text
    assert "me:pw" not in text
    kept = json.loads(text)
    assert kept["command"] == ["headrace-bench", "run", "--key", "…", "--url=http://h:1/v1"]
    assert kept["flags"] == {"duration": 30.0, "out": "runs/a", "slo": ["chat"]}
    assert kept["machine"]["cores"] >= 1
    assert kept["versions"]["python"].startswith("3.")
    assert without_keys(["--api-key=abc", "x"]) == ("--api-key=…", "x")


def test_a_run_that_was_cut_short_keeps_what_it_measured(tmp_path: Path) -> None:
    plan, ends = schedule(5), records(5)
    journal = Journal(tmp_path, made(), plan)
    for record in ends[:3]:
        journal(record)
    # No close: what a killed process leaves. The next line was half written.
    with (tmp_path / "requests.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(ends[3])[:40])
    found = read(tmp_path)
    assert list(found.records) == ends[:3]
    assert found.torn
    assert found.health is None
    assert found.summary is None
    journal.close()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(Misuse, match="not empty"):
        Journal(tmp_path, made(), schedule(1))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(Misuse, match="is a file"):
        Journal(tmp_path / "mine.txt", made(), schedule(1))
    with pytest.raises(Misuse, match="can be written"):
        Journal(tmp_path / "mine.txt" / "below", made(), schedule(1))


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    Journal(tmp_path, made(), schedule(0)).close()
    assert read(tmp_path).records == ()


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="no such folder"):
        read(tmp_path / "absent")
    with pytest.raises(Misuse, match=r"no config\.json"):
        read(tmp_path)
    Journal(tmp_path, made(), schedule(2)).close()
    kept = (tmp_path / "config.json").read_bytes()
    (tmp_path / "config.json").write_text('{"schema": 99}')
    with pytest.raises(Misuse, match="schema 99, this headrace-bench reads 1"):
        read(tmp_path)
    (tmp_path / "config.json").write_bytes(kept)
    (tmp_path / "requests.jsonl").write_text('{"index": 0}\n')
    with pytest.raises(Misuse, match=r"requests\.jsonl, line 1"):
        read(tmp_path)
    (tmp_path / "requests.jsonl").unlink()
    with pytest.raises(Misuse, match=r"requests\.jsonl"):
        read(tmp_path)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, made(), schedule(1))
    journal.close()
    journal._requests = Path("/dev/full").open("wb", buffering=0)
    with pytest.raises(Fault, match="No space left"):
        journal(records(1)[0])
    journal.close()
