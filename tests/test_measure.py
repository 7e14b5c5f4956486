from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import StartupError
from headrace.core.quantisation import SOURCE, Format
from headrace.core.timings import Timing
from headrace.core.tuning import Candidate
from headrace.engines.timing import Report
from headrace.measure import LIMIT_S, PREFIX, Cutter, Measurer, Plan
from headrace.testing import ManualClock
from headrace.tuner import Source
from recorded_timings import EPYC, OWN, XEON, XEON_PLAIN, Timings

Q4_1 = 3
SIGSEGV = "ended by SIGSEGV"


def plan(**options: Any) -> Plan:
    return Plan(OWN, 2, 0.1, **options)


class Machine:
    """Answers by recorded timings, a trial in `takes` seconds; what was not recorded fails."""

    def __init__(
        self,
        tmp_path: Path,
        extra: Mapping[tuple[str, bool], Timings] | str,
        plain: Mapping[tuple[str, bool], Timings] | str,
        *,
        takes: float = 1.5,
    ) -> None:
        self.extra, self.plain, self.takes = extra, plain, takes
        self.waited = 0.0
        self.clock = ManualClock()
        self.asked: list[Candidate] = []
        self.made: list[Path] = []
        self.stop_at: int | None = None
        self.cannot_make = ""
        model = tmp_path / "Tiny.Q4_1.gguf"
        model.write_bytes(b"GGUF" * 2500)
        self.source = Source(model, "ab" * 16, Q4_1)
        self.folder = tmp_path / "models" / "tuned"
        self.scale = 1.0
        self.free = 10**12

    def measure(self, candidate: Candidate, path: Path, depth: int, seconds: float, limit: float) -> Report:
        assert path.is_file()
        self.asked.append(candidate)
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        if self.takes > limit:
            self.clock.advance(limit)
            return Report(failure=f"took longer than {limit:.0f} s")
        self.clock.advance(self.takes)
        table = self.extra if candidate.extra_buffers else self.plain
        if isinstance(table, str):
            return Report(failure=table)
        timings = table.get((candidate.weights, candidate.flash_attention)) if candidate.threads == 2 else None
        if timings is None:
            return Report(failure="was not recorded")
        shorter = tuple(msgspec.structs.replace(t, seconds=t.seconds / self.scale) for t in timings)
        return Report(shorter, 8192, 10**8, self.waited)

    def make(self, source: Path, path: Path, target: Format) -> None:
        if self.cannot_make and path.parent == self.folder:
            raise StartupError(self.cannot_make)
        self.clock.advance(0.5)
        self.made.append(path)
        path.write_bytes(source.read_bytes() * 2)

    def measurer(self, cutter: Cutter | None = None, folder: Path | None = None) -> Measurer:
        return Measurer(
            self.source,
            folder or self.folder,
            self.measure,
            self.make,
            lambda what: None,
            cutter,
            self.clock,
            lambda: self.free,
        )

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def epyc(tmp_path: Path) -> Machine:
    """Its kernels lay nothing of this file out anew, so plain ones are as fast."""
    return Machine(tmp_path, EPYC, EPYC)


@pytest.fixture
def xeon(tmp_path: Path) -> Machine:
    return Machine(tmp_path, XEON, XEON_PLAIN)


def test_without_amx_it_chooses_bf16(epyc: Machine) -> None:
    found = epyc.measurer().run(plan())
    assert found.outcome is not None
    assert found.outcome.decision.chosen.candidate == msgspec.structs.replace(OWN, weights="bf16")
    assert found.outcome.path == epyc.folder / "Tiny-abababab.BF16.gguf"
    assert found.gain == pytest.approx(1 - 1189 / 2541, abs=0.01)
    assert epyc.kept() == ["Tiny-abababab.BF16.gguf"]
    assert epyc.clock() <= LIMIT_S


def test_with_amx_it_leaves_the_file_as_it_is(xeon: Machine) -> None:
    found = xeon.measurer().run(plan())
    assert found.outcome is not None
    assert found.outcome.decision.chosen.candidate == OWN
    assert {one.weights for one in xeon.asked} == {SOURCE, "bf16", "q8_0", "f16"}
    assert xeon.kept() == []


def test_with_amx_that_crashes_it_does_without(tmp_path: Path) -> None:
    machine = Machine(tmp_path, SIGSEGV, XEON_PLAIN)
    found = machine.measurer().run(plan())
    assert found.outcome is not None
    assert found.outcome.decision.chosen.candidate == msgspec.structs.replace(OWN, extra_buffers=False)
    assert found.gain == 0.0, "there is nothing that it could be compared with"
    assert all(not one.extra_buffers for one in machine.asked[1:]), "what follows is tried with what runs"


def test_what_loses_precision_is_tried_only_if_that_is_allowed(epyc: Machine) -> None:
    epyc.measurer().run(plan())
    assert "q4_0" not in {one.weights for one in epyc.asked}
    again = Machine(epyc.source.path.parent, EPYC, EPYC)
    found = again.measurer().run(plan(allow_loss=True))
    assert found.outcome is not None
    assert found.outcome.decision.chosen.candidate.weights == "q4_0"


def test_what_may_bring_most_is_tried_first(epyc: Machine) -> None:
    epyc.measurer().run(plan())
    ways = [(one.weights, one.extra_buffers, one.flash_attention) for one in epyc.asked[:6]]
    assert ways == [
        (SOURCE, True, True),
        (SOURCE, False, True),
        (SOURCE, True, False),
        ("bf16", True, True),
        ("q8_0", True, True),
        ("f16", True, True),
    ]


def test_two_that_tie_are_measured_again(epyc: Machine) -> None:
    epyc.measurer().run(plan())
    assert [epyc.asked.count(msgspec.structs.replace(OWN, weights=name)) for name in ("bf16", "q8_0", "f16")] == [
        2,
        2,
        1,
    ]


def test_what_the_user_set_is_not_varied(epyc: Machine) -> None:
    epyc.measurer().run(plan(fixed=frozenset({"threads", "flash_attention", "extra_buffers"})))
    assert {(one.threads, one.flash_attention, one.extra_buffers) for one in epyc.asked} == {(2, True, True)}


@pytest.mark.parametrize("takes", [4.0, 7.0, 19.0])
def test_the_best_so_far_holds_when_the_time_is_over(tmp_path: Path, takes: float) -> None:
    machine = Machine(tmp_path, EPYC, EPYC, takes=takes)
    found = machine.measurer().run(plan())
    assert machine.clock() <= LIMIT_S + 1.0
    assert found.outcome is not None
    expected = "bf16" if takes == 4.0 else SOURCE
    assert found.outcome.decision.chosen.candidate.weights == expected


def test_a_file_that_cannot_be_measured_in_time_is_known_as_such(tmp_path: Path) -> None:
    machine = Machine(tmp_path, EPYC, EPYC, takes=30.0)
    found = machine.measurer().run(plan())
    assert found.outcome is not None
    assert found.outcome.decision.chosen.candidate == OWN
    assert "could not be measured within 17 s" in found.outcome.decision.reasons[0]
    assert len(machine.asked) == 1


def test_where_nothing_runs_there_is_no_outcome(tmp_path: Path) -> None:
    found = Machine(tmp_path, SIGSEGV, SIGSEGV).measurer().run(plan())
    assert (found.outcome, found.failure) == (None, SIGSEGV)


def test_on_a_busy_machine_only_what_crashes_counts(tmp_path: Path) -> None:
    busy = Machine(tmp_path, EPYC, EPYC)
    busy.waited = 0.5
    found = busy.measurer().run(plan())
    assert found.busy
    assert found.outcome is not None
    assert found.outcome.decision.chosen.candidate == OWN
    assert len(busy.asked) == 2
    crashing = Machine(tmp_path, SIGSEGV, XEON_PLAIN)
    crashing.waited = 0.5
    found = crashing.measurer().run(plan())
    assert found.outcome is not None
    assert (found.busy, found.outcome.decision.chosen.candidate.extra_buffers) == (True, False)


def test_a_large_file_is_measured_by_a_few_layers(epyc: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.measure.TARGET", 1600)
    cut: list[tuple[Path, int]] = []

    def sample(source: Path, target: Path, layers: int) -> None:
        cut.append((target, layers))
        target.write_bytes(source.read_bytes()[:1000])

    epyc.scale = (30 - 0.75) / (5 - 0.75)
    found = epyc.measurer(Cutter(sample, lambda path: 30, lambda path: 1)).run(plan())
    assert [layers for _, layers in cut] == [5]
    assert found.outcome is not None
    assert found.outcome.decision.chosen.ttft == pytest.approx(1.189, rel=0.01), "of all layers"
    assert not cut[0][0].exists()
    assert epyc.kept() == ["Tiny-abababab.BF16.gguf"]
    assert (epyc.folder / "Tiny-abababab.BF16.gguf").stat().st_size == 2 * epyc.source.path.stat().st_size


def test_a_model_that_cannot_be_cut_is_measured_whole(epyc: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(source: Path, target: Path, layers: int) -> None:
        raise StartupError("it cannot be cut")

    monkeypatch.setattr("headrace.measure.TARGET", 1600)
    monkeypatch.setattr("headrace.measure.WHOLE", 5000)
    found = epyc.measurer(Cutter(cannot, lambda path: 30, lambda path: 1)).run(plan())
    assert found.outcome is not None
    assert {one.weights for one in epyc.asked} == {SOURCE}, "to convert all of it would take too long"


def test_a_file_that_takes_too_long_to_make_is_offered(epyc: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.measure.WITHIN_S", 3.0)
    found = epyc.measurer().run(plan())
    assert found.outcome is not None
    assert found.outcome.decision.chosen.candidate.weights == SOURCE
    assert found.outcome.path == epyc.source.path
    assert "bf16 weights would bring the first token 53% sooner" in found.offer
    assert "headrace tune" in found.offer
    assert found.offer in found.outcome.decision.reasons
    assert epyc.kept() == []


def test_a_file_that_cannot_be_made_is_offered_with_the_reason(epyc: Machine) -> None:
    epyc.cannot_make = "the disk is full"
    found = epyc.measurer().run(plan())
    assert "the disk is full" in found.offer


@pytest.mark.parametrize("what", ["memory", "size", "split"])
def test_formats_that_could_not_be_served_are_not_tried(
    epyc: Machine, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "memory":
        epyc.free = 1000
    elif what == "size":
        monkeypatch.setattr("headrace.measure.WHOLE", 100)
    else:
        path = epyc.source.path.with_name("Tiny-00001-of-00002.gguf")
        shutil.copy(epyc.source.path, path)
        epyc.source = Source(path, "ab" * 16, Q4_1)
    epyc.measurer().run(plan())
    assert {one.weights for one in epyc.asked} == {SOURCE}


def test_where_nothing_can_be_kept_no_formats_are_tried(epyc: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = epyc.measurer(folder=tmp_path / "file" / "tuned").run(plan())
    assert found.outcome is not None
    assert {one.weights for one in epyc.asked} == {SOURCE}


def test_where_nothing_can_be_written_the_whole_file_is_measured(
    epyc: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    monkeypatch.setattr("headrace.measure.TARGET", 1600)
    cutter = Cutter(cut_nowhere, lambda path: 30, lambda path: 1)
    found = epyc.measurer(cutter, tmp_path / "file" / "tuned").run(plan())
    assert found.outcome is not None
    assert found.outcome.decision.chosen.ttft == pytest.approx(2.541, rel=0.01)


def cut_nowhere(source: Path, target: Path, layers: int) -> None:
    target.write_bytes(b"")


@pytest.mark.parametrize("stop_at", [1, 2, 5])
def test_an_interrupt_leaves_nothing(epyc: Machine, stop_at: int) -> None:
    epyc.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        epyc.measurer().run(plan())
    assert epyc.kept() == []


def test_what_a_killed_one_left_is_removed_when_it_is_old(epyc: Machine) -> None:
    old, new = epyc.folder / f"{PREFIX}old", epyc.folder / f"{PREFIX}new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "sample.gguf").touch()
    os.utime(old, (0, 0))
    epyc.measurer().run(plan())
    assert (old.exists(), new.exists()) == (False, True)


def test_all_are_timed_as_deep_as_the_first(epyc: Machine) -> None:
    depths: list[int] = []
    shallow = {key: tuple(t for t in timings if t.rows != 512 or t.depth == 0) for key, timings in EPYC.items()}
    machine = Machine(epyc.source.path.parent, shallow, shallow)
    measure = machine.measure

    def noted(candidate: Candidate, path: Path, depth: int, seconds: float, limit: float) -> Report:
        depths.append(depth)
        return measure(candidate, path, depth, seconds, limit)

    measurer = machine.measurer()
    measurer.measure = noted
    measurer.run(plan())
    assert depths[0] == 1536
    assert set(depths[1:]) == {512}


def test_timings_are_no_figures_if_too_few(epyc: Machine) -> None:
    few: dict[tuple[str, bool], Timings] = {(SOURCE, True): (Timing(64, 0, 1, outputs=False, seconds=1.0),)}
    found = Machine(epyc.source.path.parent, few, few).measurer().run(plan())
    assert (found.outcome, found.failure) == (None, "too little could be timed")


def test_a_trial_that_was_disturbed_is_repeated(epyc: Machine) -> None:
    measure, bf16 = epyc.measure, msgspec.structs.replace(OWN, weights="bf16")

    def disturbed(candidate: Candidate, path: Path, depth: int, seconds: float, limit: float) -> Report:
        report = measure(candidate, path, depth, seconds, limit)
        if candidate != bf16 or epyc.asked.count(bf16) > 1:
            return report
        slow = tuple(msgspec.structs.replace(t, seconds=10 * t.seconds) for t in report.timings)
        return msgspec.structs.replace(report, timings=slow, waited=0.4)

    measurer = epyc.measurer()
    measurer.measure = disturbed
    found = measurer.run(plan())
    assert found.outcome is not None
    assert found.outcome.decision.chosen.candidate == bf16


def test_nothing_is_converted_that_cannot_be_timed_any_more(tmp_path: Path) -> None:
    machine = Machine(tmp_path, EPYC, EPYC, takes=4.6)
    machine.measurer().run(plan())
    tried = {one.weights for one in machine.asked} - {SOURCE}
    assert {path.stem for path in machine.made if path.parent != machine.folder} == tried
