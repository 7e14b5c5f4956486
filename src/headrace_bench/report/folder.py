"""One run, one folder: all that is needed to read it again, or to run it again.

    config.json      the command, flags, versions, machine, target without its key, seed, wall clock    before the load
    schedule.jsonl   a line about the schedule, then one a request, prompts as they were sent           before the load
    requests.jsonl   one line a request, `record.Record`                                                as they end
    health.json      how the client and the machine did, `record.Health`                                after it
    summary.json     the figures, with a schema's number; summary.csv: the same, a line a figure
    hist/*.hdr       HDR histograms as base64: those of several runs can be added
    plots/*          PNG and SVG; report.html: one file

Rules: a folder that has something in it is never written to by a new run. Whole files come by rename; requests.jsonl is
flushed record by record, so that a run that was cut short keeps what it measured, and a torn last line is left out.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, TypeVar

import msgspec

from headrace_bench.fault import Fault, Misuse
from headrace_bench.figures.definitions import figures
from headrace_bench.figures.histogram import Histogram
from headrace_bench.figures.summary import Summary, encode
from headrace_bench.load.schedule import Planned, Schedule
from headrace_bench.record import Health, Record
from headrace_bench.report.machine import Machine, machine, versions
from headrace_bench.report.rows import table

SCHEMA = 1
"""Of config.json, and so of the folder. It rises when a reader of the last one would misread this one."""

CONFIG, SCHEDULE, REQUESTS, HEALTH = "config.json", "schedule.jsonl", "requests.jsonl", "health.json"
SUMMARY, TABLE, HISTOGRAMS, PLOTS, PAGE = "summary.json", "summary.csv", "hist", "plots", "report.html"

SECRETS = ("--key", "--api-key", "--api_key", "--admin-key")
OPEN = ("--a",)
"""A flag of its own, though a secret one begins like it."""
INSIDE = re.compile(
    r"""((?<![\w-])--(?:k|ke|ap|api|api[-_]|api[-_]ke?|[\w-]*(?:key|token|secret|password))(?:=|\s+)"""  # --key SECRET
    r"""|[\w.]*(?:key|token|secret|password)=|\bbearer\s+)"""  # SERVER_KEY=SECRET, server.key=SECRET
    r"""(?:(?:'[^']*'|"[^"]*"|[^\s'"])+|\S+)""",
    re.IGNORECASE,
)
"""A secret in the middle of a text, in group 1 what stands before it."""

T = TypeVar("T")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was asked to do, where, and with what."""

    schema: int = SCHEMA
    verb: str
    command: tuple[str, ...]
    """As typed, without keys."""
    url: str
    """Of the target, without user and password."""
    model: str
    seed: int
    wall: str
    """ISO 8601, when the load began: to join it with a server's log, never to measure with."""
    flags: dict[str, Any] = {}
    versions: dict[str, str] = {}
    machine: Machine
    server: str | None = None
    """What the target says that it is."""
    notes: tuple[str, ...] = ()


def config(
    *, verb: str, command: Sequence[str], url: str, model: str, seed: int, wall: str, flags: Mapping[str, Any],
    server: str | None = None, notes: Sequence[str] = (),
) -> Config:  # fmt: skip
    """A `Config` of this machine and these libraries. Keys in the command, the flags and the URL are left out."""
    kept = {name: _plain(value) for name, value in flags.items() if f"--{name.replace('_', '-')}" not in SECRETS}
    return Config(
        verb=verb, command=without_keys(command), url=without_user(url), model=model, seed=seed, wall=wall, flags=kept,
        versions=versions(), machine=machine(), server=server, notes=tuple(notes),
    )  # fmt: skip


def without_keys(command: Sequence[str]) -> tuple[str, ...]:
    """A command line that may be shown: the values of key flags are dots, a user in a URL is gone.

    A word may hold a command line of its own (`--headrace-args='--key SECRET'`): there as well.
    """
    out: list[str] = []
    hide = False
    for word in command:
        name, equals, _ = word.partition("=")
        begins = any(flag.startswith(name) for flag in SECRETS)  # argparse takes beginnings
        secret = len(name) > 2 and name not in OPEN and begins
        if hide:
            out.append("…")
        elif equals and secret:
            out.append(f"{name}=…")
        else:
            out.append(masked(word))
        hide = secret and not equals and not hide
    return tuple(out)


def masked(text: str) -> str:
    """`text` without the keys that are given in it, and without a URL's user."""
    return INSIDE.sub(r"\1…", without_user(text))


def without_user(text: str) -> str:
    """`text` without the `user:password@` of a URL in it."""
    return re.sub(r"(?<=//)[^/@\s]*@", "", text)


@dataclass(frozen=True, slots=True)
class Folder:
    """What was read. `health` and `summary` are None where the run was cut short."""

    path: Path
    config: Config
    schedule: Schedule
    records: tuple[Record, ...]
    health: Health | None
    summary: Summary | None
    torn: bool
    """The last line of requests.jsonl was left half-written."""


class Ran(Protocol):
    """Of a run, what is stored: `client.run.Run` is one."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def records(self) -> tuple[Record, ...]: ...
    @property
    def health(self) -> Health: ...


class Journal:
    """Writes a run's folder while the load runs. Call it with each record; `finish` when the load has ended."""

    def __init__(self, path: Path, config: Config, schedule: Schedule) -> None:
        """Misuse where the folder has something in it or cannot be made."""
        self.path = path
        claim(path)
        save(path / CONFIG, _indented(config))
        save(path / SCHEDULE, _schedule(schedule))
        self._encoder = msgspec.json.Encoder()
        self._line = bytearray()
        self._requests: IO[bytes] = (path / REQUESTS).open("xb", buffering=0)

    def __call__(self, record: Record) -> None:
        """Append one record. Unbuffered: after this call a crash of this process does not lose it."""
        self._encoder.encode_into(record, self._line)
        self._line += b"\n"
        left = bytes(self._line)
        try:
            while left:  # unbuffered: a write may take a part
                left = left[self._requests.write(left) :]
        except OSError as error:
            raise Fault(f"{self.path / REQUESTS}: {error.strerror or error}; what was written before is kept") from None

    def finish(self, records: Sequence[Record], health: Health, summary: Summary) -> None:
        """What is known only after the load."""
        self.close()
        save(self.path / HEALTH, _indented(health))
        save(self.path / SUMMARY, encode(summary))
        save(self.path / TABLE, _csv(table(summary)))
        (self.path / HISTOGRAMS).mkdir(exist_ok=True)
        for name, histogram in histograms(records).items():
            save(self.path / HISTOGRAMS / f"{name}.hdr", histogram.encode().encode() + b"\n")

    def close(self) -> None:
        self._requests.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def write(path: Path, config: Config, run: Ran, summary: Summary) -> None:
    """The folder of a run that has ended, all at once."""
    with Journal(path, config, run.schedule) as journal:
        for record in run.records:
            journal(record)
        journal.finish(run.records, run.health, summary)


def histograms(records: Sequence[Record]) -> dict[str, Histogram]:
    """Of the requests of the window that ended well: those of several runs may be added up."""
    found = [one for record in records if record.phase == "measure" and (one := figures(record)).whole]
    return {
        "ttft": Histogram(one.ttft for one in found if one.ttft is not None),
        "ttft_service": Histogram(one.ttft_service for one in found if one.ttft_service is not None),
        "tpot": Histogram(one.tpot for one in found if one.tpot is not None),
        "gap": Histogram(gap for one in found for gap in one.gaps),
        "e2e": Histogram(one.e2e for one in found if one.e2e is not None),
    }


def read(path: Path) -> Folder:
    """All of a run's folder. Misuse for a folder that is none, another schema, or a file that does not parse."""
    if not path.is_dir():
        raise Misuse(f"{path}: no such folder; give one that `headrace-bench run --out` made")
    if not (path / CONFIG).is_file():
        raise Misuse(f"{path}: not a run's folder, it has no {CONFIG}")
    plain = _decoded(path / CONFIG, dict[str, Any])
    if plain.get("schema") != SCHEMA:
        raise Misuse(f"{path / CONFIG}: schema {plain.get('schema')}, this headrace-bench reads {SCHEMA}")
    lines = _bytes(path / SCHEDULE).splitlines()
    if not lines:
        raise Misuse(f"{path / SCHEDULE}: empty, the run's schedule is lost")
    head = _parsed(path / SCHEDULE, 1, lines[0], Schedule)
    planned = tuple(_parsed(path / SCHEDULE, number, line, Planned) for number, line in enumerate(lines[1:], 2))
    records, torn = _records(path / REQUESTS)
    return Folder(
        path,
        _decoded(path / CONFIG, Config),
        msgspec.structs.replace(head, requests=planned),
        records,
        _decoded(path / HEALTH, Health) if (path / HEALTH).is_file() else None,
        _decoded(path / SUMMARY, Summary) if (path / SUMMARY).is_file() else None,
        torn,
    )


def _records(path: Path) -> tuple[tuple[Record, ...], bool]:
    """By index. A last line without its end is half a record: left out, and told."""
    content = _bytes(path)
    whole, _, rest = content.rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    records = [_parsed(path, number, line, Record) for number, line in enumerate(lines, 1)]
    return tuple(sorted(records, key=lambda record: record.index)), bool(rest)


def claim(path: Path) -> None:
    """Makes the folder. Misuse where something is in it, or it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise Misuse(f"{path}: exists and is not empty; a run is never overwritten, give --out another folder")
    except FileExistsError:
        raise Misuse(f"{path}: is a file; give --out a folder") from None
    except OSError as error:
        raise Misuse(f"{path}: {error.strerror or error}; give --out a folder that can be written") from None


def save(path: Path, content: bytes) -> None:
    """A whole file, or the one that was there before: a reader never sees half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise Misuse(f"{path}: {error.strerror or error}") from None


def _schedule(schedule: Schedule) -> bytes:
    head = msgspec.structs.replace(schedule, requests=())
    return b"".join(msgspec.json.encode(line) + b"\n" for line in (head, *schedule.requests))


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Columns as the first row has them; None is an empty cell."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue().encode()


def _indented(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _plain(value: Any) -> Any:
    """A flag's value as JSON has it: what is not a plain type is written as its text, without keys."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float, bool, type(None))) else masked(str(value))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Misuse(f"{path}: {error.strerror or error}") from None


def _decoded(path: Path, kind: type[T]) -> T:
    return _parsed(path, None, _bytes(path), kind)


def _parsed(path: Path, line: int | None, content: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Misuse(f"{path}{'' if line is None else f', line {line}'}: {error}") from None
