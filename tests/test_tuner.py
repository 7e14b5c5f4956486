from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import tuner
from headrace.core.errors import StartupError
from headrace.core.quantisation import SOURCE, TARGETS, Format
from headrace.core.tuning import MIXTURE, Candidate, Figures
from headrace.engines.trial import Report
from headrace.tuner import Lengths, Plan, Source, Tuner, available_memory, lengths

OWN = Candidate(SOURCE, 2, True, 512)
Q4_1 = 3


class Machine:
    """Measures by a table: weights → seconds to the first token; what else is changed multiplies them."""

    def __init__(self, tmp_path: Path, **ttft: float) -> None:
        self.ttft = ttft
        self.factor: dict[tuple[str, object], float] = {}
        self.failing: set[str] = set()
        self.waited = 0.0
        self.many = 0.06
        self.asked: list[tuple[Candidate, Path, Lengths]] = []
        self.told: list[tuple[str, bool]] = []
        self.stop_at: int | None = None
        model = tmp_path / "Tiny.Q4_1.gguf"
        model.write_bytes(b"GGUF" * 250)
        self.source = Source(model, "ab" * 16, Q4_1)
        self.folder = tmp_path / "models" / "tuned"

    def measure(self, candidate: Candidate, path: Path, long: Lengths) -> Report:
        assert path.is_file()
        self.asked.append((candidate, path, long))
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        if candidate.weights in self.failing:
            return Report(failure="ended by SIGABRT")
        seconds = self.ttft[candidate.weights]
        for name in ("threads", "flash_attention", "step_tokens"):
            seconds *= self.factor.get((name, getattr(candidate, name)), 1.0)
        known = tuple((tokens, seconds) for tokens, _ in MIXTURE)
        return Report(Figures(known, 0.01, self.many, 10**6, 100, self.waited))

    def make(self, path: Path, target: Format) -> None:
        path.write_bytes(target.name.encode())

    def tuner(self, make: Callable[[Path, Format], None] | None = None) -> Tuner:
        return Tuner(
            self.source,
            self.folder,
            self.measure,
            make or self.make,
            lambda what, over: self.told.append((what, over)),
            lambda: 10**9,
        )

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


FORMATS = tuple(TARGETS[name] for name in ("q8_0", "q4_0", "f16"))


def plan(**options: Any) -> Plan:
    return Plan(OWN, 2, 0.1, **{"formats": FORMATS, **options})


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, source=1.0, q8_0=0.8, q4_0=0.4, f16=0.5)


def test_the_best_is_chosen_and_only_its_file_stays(machine: Machine) -> None:
    outcome = machine.tuner().run(plan())
    assert outcome.decision.chosen.candidate == msgspec.structs.replace(OWN, weights="f16")
    assert outcome.path == machine.folder / "Tiny-abababab.F16.gguf"
    assert machine.files() == [outcome.path.name]
    assert any("q4_0" in reason and "--allow-loss" in reason for reason in outcome.decision.reasons)
    assert any("50% less" in reason for reason in outcome.decision.reasons)


def test_all_files_stay_if_asked(machine: Machine) -> None:
    machine.tuner().run(plan(keep=True))
    assert len(machine.files()) == 3


def test_a_file_that_was_there_is_used_and_left(machine: Machine) -> None:
    machine.folder.mkdir(parents=True)
    kept = machine.folder / "Tiny-abababab.Q8_0.gguf"
    kept.write_bytes(b"kept before")
    machine.tuner().run(plan())
    assert kept.read_bytes() == b"kept before"


def test_candidates_are_measured_in_turn_and_the_slow_end_only_once(machine: Machine) -> None:
    machine.tuner().run(plan())
    weights = [candidate.weights for candidate, _, _ in machine.asked[1:] if candidate.changes(OWN) < 2]
    assert weights[:4] == [SOURCE, "q8_0", "q4_0", "f16"]
    assert weights[4:7] == [SOURCE, "q4_0", "f16"], "q8_0 was clearly slower than f16; the user's own stays"


def test_what_helps_alone_is_tried_together(machine: Machine) -> None:
    machine.factor = {("threads", 1): 0.8, ("flash_attention", False): 0.9}
    outcome = machine.tuner().run(plan(formats=()))
    assert outcome.decision.chosen.candidate == Candidate(SOURCE, 1, False, 512)
    assert outcome.decision.chosen.ttft == pytest.approx(0.72)
    assert outcome.path == machine.source.path


def test_what_is_fixed_is_not_varied(machine: Machine) -> None:
    machine.tuner().run(plan(fixed=frozenset({"threads", "flash_attention"})))
    assert {(candidate.threads, candidate.flash_attention) for candidate, _, _ in machine.asked} == {(2, True)}


def test_one_that_fails_is_shown_and_the_others_go_on(machine: Machine) -> None:
    machine.failing = {"f16"}
    outcome = machine.tuner().run(plan())
    assert outcome.decision.chosen.candidate.weights == "q8_0"
    failed = [trial for trial in outcome.trials if trial.failure]
    assert [(trial.candidate.weights, trial.failure) for trial in failed] == [("f16", "ended by SIGABRT")]
    assert any("failed, ended by SIGABRT" in what for what, over in machine.told if over)


def test_a_file_that_cannot_be_made_is_shown_and_the_others_go_on(machine: Machine) -> None:
    def make(path: Path, target: Format) -> None:
        if target.name == "f16":
            raise StartupError("the quantiser ended with status -6")
        machine.make(path, target)

    outcome = machine.tuner(make).run(plan())
    assert outcome.decision.chosen.candidate.weights == "q8_0"
    assert [trial.failure for trial in outcome.trials if trial.failure] == ["the quantiser ended with status -6"]


def test_a_model_that_cannot_be_measured_is_one_line(machine: Machine) -> None:
    machine.failing = {SOURCE}
    with pytest.raises(StartupError, match=r"Tiny.Q4_1.gguf cannot be measured: ended by SIGABRT"):
        machine.tuner().run(plan())


@pytest.mark.parametrize("at", [1, 2, 5, 12])
def test_an_interrupt_leaves_no_file(machine: Machine, at: int) -> None:
    machine.stop_at = at
    with pytest.raises(KeyboardInterrupt):
        machine.tuner().run(plan(keep=True))
    assert not machine.folder.exists() or machine.files() == []


def test_an_interrupt_while_a_file_is_made_leaves_none(machine: Machine) -> None:
    def make(path: Path, target: Format) -> None:
        machine.make(path, target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.tuner(make).run(plan())
    assert machine.files() == []


def test_a_busy_machine_decides_nothing(machine: Machine) -> None:
    machine.waited = 0.6
    with pytest.raises(StartupError, match=r"waited for a core 60% of the time.*--anyway"):
        machine.tuner().run(plan())
    assert len(machine.asked) == 1, "that is seen at once"
    assert machine.tuner().run(plan(anyway=True)).decision.chosen.candidate.weights == "f16"


def test_too_little_disk_is_said_before_anything_is_made(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10))
    with pytest.raises(StartupError, match=r"MB are free: make room, set XDG_CACHE_HOME"):
        machine.tuner().run(plan())
    assert machine.files() == []


def test_what_does_not_fit_the_memory_is_not_tried(machine: Machine) -> None:
    small = machine.tuner()
    small.memory = lambda: 2500
    outcome = small.run(plan())
    assert outcome.decision.chosen.candidate.weights == "q8_0"
    assert ["GB of memory" in trial.failure for trial in outcome.trials if trial.candidate.weights == "f16"] == [True]


def test_an_abandoned_part_is_swept_and_a_young_one_is_not(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.folder.mkdir(parents=True)
    (machine.folder / ".x.gguf.12.part").write_bytes(b"half")
    machine.tuner().run(plan())
    assert ".x.gguf.12.part" in machine.files()
    monkeypatch.setattr(tuner, "ABANDONED_S", -10)
    machine.tuner().run(plan())
    assert ".x.gguf.12.part" not in machine.files()


def test_a_format_that_the_file_has_already_is_not_made(machine: Machine) -> None:
    machine.source = replace(machine.source, number=7)
    machine.tuner().run(plan())
    assert {candidate.weights for candidate, _, _ in machine.asked} == {SOURCE, "q4_0", "f16"}


def test_a_model_of_several_files_is_not_converted(machine: Machine, tmp_path: Path) -> None:
    part = tmp_path / "big-00001-of-00002.gguf"
    part.write_bytes(b"GGUF")
    machine.source = Source(part, "ab" * 16, Q4_1)
    machine.tuner().run(plan())
    assert {candidate.weights for candidate, _, _ in machine.asked} == {SOURCE}


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("SmolLM2.Q4_1.gguf", "SmolLM2-abababab.Q8_0.gguf"),
        ("llama-q4_k_m.gguf", "llama-abababab.Q8_0.gguf"),
        ("model-f16.gguf", "model-abababab.Q8_0.gguf"),
        ("model.gguf", "model-abababab.Q8_0.gguf"),
        ("q8.gguf", "q8-abababab.Q8_0.gguf"),
    ],
)
def test_a_converted_file_is_named_after_model_bytes_and_format(tmp_path: Path, name: str, made: str) -> None:
    assert Source(Path(name), "ab" * 16, Q4_1).converted(tmp_path, TARGETS["q8_0"]) == tmp_path / made


def test_a_slow_model_gets_shorter_prompts() -> None:
    assert lengths(400.0, quick=False) == Lengths(1024, 1536)
    assert lengths(400.0, quick=True) == Lengths(512, 1024)
    slow = lengths(5.0, quick=False)
    assert slow.long == 128


def test_the_memory_that_is_there() -> None:
    have = available_memory()
    assert have is None or have > 10**6
