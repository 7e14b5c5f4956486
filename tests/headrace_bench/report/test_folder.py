from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from bench_runs import health, records, schedule
from headrace_bench.fault import Fault, Misuse
from headrace_bench.figures.histogram import Histogram
from headrace_bench.figures.slo import PROFILES
from headrace_bench.figures.summary import summarise
from headrace_bench.load.schedule import Schedule
from headrace_bench.record import Health, Record
from headrace_bench.report import folder
from headrace_bench.report.folder import Config, Journal, config, masked, read, without_keys, write


@dataclass(frozen=True)
class Ended:
    schedule: Schedule
    records: tuple[Record, ...]
    health: Health


def made(seed: int = 7) -> Config:
    return config(
        verb="run", command=["headrace-bench", "run", "--key", "secret", "--url=http://me:pw@h:1/v1"],
        url="http://me:pw@h:1/v1", model="demo", seed=seed, wall="2026-01-02T03:04:05+00:00",
        flags={"key": "secret", "duration": 30.0, "out": Path("runs/a"), "slo": ("chat",)},
    )  # fmt: skip


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    plan, ends = schedule(30), records(30)
    summary = summarise(plan, ends, health(), PROFILES["chat"])
    with Journal(tmp_path / "run", made(), plan) as journal:
        for record in reversed(ends):
            journal(record)
        journal.finish(ends, health(), summary)
    found = read(tmp_path / "run")
    assert found.schedule == plan
    assert list(found.records) == ends
    assert found.health == health()
    assert found.config == made()
    assert found.summary == summary
    assert not found.torn
    assert not list((tmp_path / "run").rglob(".*"))


def test_the_table_has_a_line_a_figure_and_blanks(tmp_path: Path) -> None:
    plan, ends = schedule(30), records(30)
    run = Ended(plan, tuple(ends), health())
    write(tmp_path / "run", made(), run, summarise(plan, ends, health(), PROFILES["chat"]))
    lines = {line["figure"]: line for line in csv.DictReader((tmp_path / "run/summary.csv").read_text().splitlines())}
    assert lines["ttft_ms"]["count"] == str(sum(record.outcome == "ok" for record in ends))
    assert float(lines["ttft_ms"]["p50_low"]) < float(lines["ttft_ms"]["p50"]) < float(lines["ttft_ms"]["p50_high"])
    assert lines["ttft_ms"]["p99"] == ""
    assert "prefill" in lines


def test_histograms_of_two_runs_add_up(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        ends = records(20, seed=seed)
        summary = summarise(schedule(20), ends, health(), PROFILES["chat"])
        write(tmp_path / name, made(), Ended(schedule(20), tuple(ends), health()), summary)
    both = [Histogram.decode((tmp_path / name / "hist/gap.hdr").read_text().strip()) for name in "ab"]
    sizes = [len(one) for one in both]
    both[0].merge(both[1])
    assert len(both[0]) == sum(sizes)
    assert min(sizes) > 0


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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--set a=1 --key SECRET --port 1", "--set a=1 --key … --port 1"),
        ("--key=SECRET", "--key=…"),
        ("llama-server --api-key 'SECRET SECRET' -m x", "llama-server --api-key … -m x"),
        ("python -m llama_cpp.server --api_key SECRET", "python -m llama_cpp.server --api_key …"),
        ("serve --ke SECRET", "serve --ke …"),
        ("HEADRACE_SERVER_KEY=SECRET headrace serve", "HEADRACE_SERVER_KEY=… headrace serve"),
        ("--set server.key=SECRET", "--set server.key=…"),
        ("Authorization: Bearer SECRET", "Authorization: Bearer …"),
        ("--key 'SECRET", "--key …"),
        ("--set tiers.redis_url=redis://me:SECRET@h:1/0", "--set tiers.redis_url=redis://h:1/0"),
        ("--set tiers.min_tokens=64 --ssl-keyfile f --a-cmd x", "--set tiers.min_tokens=64 --ssl-keyfile f --a-cmd x"),
    ],
)
def test_keys_inside_a_text_are_dots(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert masked(shown) == shown


def test_no_key_of_a_flag_that_holds_flags_is_written(tmp_path: Path) -> None:
    made = config(
        verb="ablate", command=["x", "--headrace-args=--key SECRET", "--a-cmd", "KEY=SECRET serve --key SECRET"],
        url="http://h", model="m", seed=1, wall="2026-01-02T03:04:05+00:00",
        flags={"headrace_args": "--key SECRET", "a_cmd": ["serve --api-key=SECRET"], "number": 3},
    )  # fmt: skip
    assert b"SECRET" not in msgspec.json.encode(made)
    assert made.command == ("x", "--headrace-args=--key …", "--a-cmd", "KEY=… serve --key …")
    assert made.flags["number"] == 3


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, ends = schedule(3), records(3)
    journal = Journal(tmp_path, made(), plan)
    whole = journal._requests.write

    class Slow:
        """Takes seven bytes at a time."""

        def write(self, data: bytes) -> int:
            return whole(data[:7])

    with monkeypatch.context() as patch:
        patch.setattr(journal, "_requests", Slow())
        for record in ends:
            journal(record)
    journal.close()
    found = read(tmp_path)
    assert list(found.records) == ends
    assert not found.torn


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


def test_the_reference_names_every_file_and_histogram() -> None:
    text = (Path(__file__).parents[3] / "docs/reference/bench_folder.md").read_text()
    names = [folder.CONFIG, folder.SCHEDULE, folder.REQUESTS, folder.HEALTH, folder.SUMMARY, folder.TABLE, folder.PAGE]
    assert [name for name in (*names, *folder.histograms([])) if f"`{name}`" not in text] == []
    assert f"`schema` of `config.json` is {folder.SCHEMA}" in text
