from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace import tuned
from headrace.cli import measure, tune
from headrace.config import load, named
from headrace.core.tuning import Candidate, Decision, Figures, Trial
from headrace.engines.timing import Job, Report
from headrace.measure import Found
from headrace.settings import Config, Value
from headrace.tuner import Outcome
from recorded_timings import EPYC, OWN

NOWHERE = {"XDG_CONFIG_HOME": "/nonexistent"}


class Fake:
    """Trials by recorded timings; the model is a file that no engine ever opens."""

    def __init__(self, tmp_path: Path) -> None:
        self.cache = tmp_path / "cache" / "headrace"
        self.model = tmp_path / "Tiny.Q4_1.gguf"
        self.model.write_bytes(b"GGUF" * 100)
        self.jobs: list[Job] = []
        self.waited = 0.0
        self.crashing = False
        self.stop_at: int | None = None

    def run_timing(self, job: Job, environ: Mapping[str, str], limit: float) -> Report:
        self.jobs.append(job)
        if len(self.jobs) == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        s = job.settings
        if self.crashing and s["extra_buffers"]:
            return Report(failure="ended by SIGSEGV")
        name = Path(s["path"]).stem
        timings = EPYC.get((name if name in ("bf16", "q8_0", "f16") else "source", s["flash_attention"]))
        if timings is None or s["threads"] != 2:
            return Report(failure="was not recorded")
        return Report(timings, 8192, 10**8, self.waited)

    def make_file(self, source: Path, target: Path, number: int, threads: int, environ: Mapping[str, str]) -> None:
        target.write_bytes(b"GGUF%d" % number)

    def run(self, *, allow_loss: bool = False, **flags: Value) -> tuned.Applied | None:
        given: dict[str, Value] = {"model.path": str(self.model), "model.measure": "true"}
        given |= {name.replace("_", ".", 1): value for name, value in flags.items()}

        def again(settings: Mapping[str, Value]) -> Config:
            return load(flags=given, environ=NOWHERE, tuned=settings)

        config = load(flags=given, environ=NOWHERE)
        return measure.run(config, named(flags=given, environ=NOWHERE), self.model, again, allow_loss=allow_loss)

    @property
    def profile(self) -> tuned.Profile | None:
        return tuned.load_profile(tuned.profile_file(self.cache, self.model))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(measure, "run_timing", fake.run_timing)
    monkeypatch.setattr(measure, "make_file", fake.make_file)
    monkeypatch.setattr(measure, "file_type", lambda path: 3)
    monkeypatch.setattr(measure, "CUTTER", None)
    monkeypatch.setattr(tune, "fetch", lambda name: fake.model)
    return fake


def test_it_is_measured_once_kept_and_told(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    applied = fake.run()
    assert applied is not None
    assert applied.path.name.endswith(".BF16.gguf")
    assert applied.note.startswith("measured this machine in 0 s: bf16 weights, first token 53% sooner; --no-measure")
    err = capsys.readouterr().err
    assert err.count("\n") == 1, "one line at the beginning, where nobody watches"
    assert "measuring Tiny.Q4_1.gguf on this machine, once, for up to 17 s" in err
    profile = fake.profile
    assert profile is not None
    assert (profile.by, profile.weights, profile.settings) == (tuned.SERVE, "bf16", {})
    assert sum(row.chosen for row in profile.rows) == 1
    asked = len(fake.jobs)
    assert fake.run() is None
    assert len(fake.jobs) == asked


def test_it_is_measured_anew_when_the_file_is_another(fake: Fake) -> None:
    fake.run()
    fake.model.write_bytes(b"GGUF" * 200)
    assert fake.run() is not None


def test_it_is_measured_anew_by_another_build(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.run()
    monkeypatch.setattr(tuned, "build", lambda: "0.3.99+00000000")
    assert fake.run() is not None
    assert fake.run() is None


def test_a_profile_of_another_version_is_measured_anew(fake: Fake) -> None:
    file = tuned.profile_file(fake.cache, fake.model)
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert fake.run() is not None
    assert fake.profile is not None


@pytest.mark.parametrize("flag", ["model_measure", "model_tuned"])
def test_it_can_be_turned_off(fake: Fake, flag: str) -> None:
    flags: dict[str, Any] = {flag: "false"}
    assert fake.run(**flags) is None
    assert fake.run(engine_in_process="true") is None
    assert (fake.jobs, fake.profile) == ([], None)


def test_what_the_user_set_is_not_varied(fake: Fake) -> None:
    fake.run(engine_extra_buffers="true", engine_flash_attention="true", engine_threads="2")
    assert {(j.settings["extra_buffers"], j.settings["flash_attention"], j.settings["threads"]) for j in fake.jobs} == {
        (True, True, 2)
    }


def test_what_crashes_is_done_without(fake: Fake) -> None:
    fake.crashing = True
    applied = fake.run()
    assert applied is not None
    assert not applied.config.engine.extra_buffers
    assert "as it is, it failed (ended by SIGSEGV)" in applied.note
    assert fake.profile is not None
    assert fake.profile.settings == {"engine.extra_buffers": False}


def test_on_a_busy_machine_nothing_is_kept(fake: Fake) -> None:
    fake.waited = 0.4
    applied = fake.run()
    assert applied is not None
    assert (applied.path, fake.profile) == (fake.model, None)
    assert "busy with something else (waited for a core 40% of the time" in applied.note
    fake.crashing = True
    applied = fake.run()
    assert applied is not None
    assert "this start uses engine.extra_buffers=false" in applied.note
    assert not applied.config.engine.extra_buffers


def test_what_cannot_be_kept_holds_for_this_start(fake: Fake) -> None:
    fake.cache.mkdir(parents=True)
    (fake.cache / "tuned").touch()
    applied = fake.run()
    assert applied is not None
    assert "it holds for this start only (cannot write" in applied.note
    assert applied.path.name.endswith(".BF16.gguf")


def test_where_nothing_can_be_measured_the_start_goes_on(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_timing", lambda job, environ, limit: Report(failure="ended by SIGILL"))
    assert fake.run() is None, "and why is told by the load"
    assert fake.profile is None


def test_a_signal_ends_it_and_leaves_nothing(fake: Fake) -> None:
    fake.stop_at = 4
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        fake.run()
    assert signal.getsignal(signal.SIGTERM) is before
    assert list((fake.cache / "models" / "tuned").iterdir()) == []
    assert fake.profile is None


def test_tune_shows_and_forgets_it(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    applied = fake.run()
    assert applied is not None
    config = load(flags={"model.path": str(fake.model)}, environ=NOWHERE)
    tune.show(config)
    out = capsys.readouterr().out
    assert "Measured by the first start on" in out
    tune.forget(config)
    assert not applied.path.exists()
    assert fake.profile is None


def test_a_name_that_no_profile_can_hold_is_not_measured(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    name = b"a\xff.gguf".decode(errors="surrogateescape")
    fake.model = fake.model.rename(fake.model.with_name(name))
    assert fake.run() is None
    assert fake.jobs == []


def trial(failure: str = "") -> Trial:
    figures = Figures(((64, 1.0),), 0.01, 0.05, 10**8)
    return Trial(OWN, 1, rounds=() if failure else (figures,), failure=failure)


def found(chosen: Trial, offer: str = "") -> Found:
    return Found(Outcome(Decision(chosen, ("it could not be measured",)), (chosen,), Path("x")), offer=offer)


def test_the_line_says_when_nothing_changes() -> None:
    assert "in 14 s: the file as it is does best; --no-measure skips" in measure.told(found(trial()), [], 13.6)


def test_the_line_offers_what_was_not_made() -> None:
    assert "does best; bf16 would bring much; --no-measure" in measure.told(
        found(trial(), "bf16 would bring much"), [], 1
    )


def test_the_line_says_that_there_was_not_enough_time() -> None:
    assert measure.told(found(trial("took longer")), [], 20).startswith("it could not be measured; the file is served")


def test_progress_is_told_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with measure.Progress("x") as progress:
        progress.tell(str(Candidate("bf16", 2, True, 512)))
    assert "bf16" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with measure.Progress("x") as progress:
        progress.tell("bf16")
    assert "measuring x" in capsys.readouterr().err
