from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from headrace import tuned
from headrace.cli import tune
from headrace.cli.entry import main
from headrace.cli.tune import Wish, formats, table
from headrace.config import load
from headrace.core.errors import StartupError
from headrace.core.quantisation import SOURCE, TARGETS
from headrace.core.tuning import MIXTURE, Figures
from headrace.engines.trial import Job, Report
from headrace.settings import Config

SECONDS = {SOURCE: 1.0, "q8_0": 0.8, "q4_0": 0.3, "f16": 0.5, "bf16": 0.9}


class Fake:
    """Trials and conversions by a table; the model is a file that no engine ever opens."""

    def __init__(self, tmp_path: Path) -> None:
        self.cache = tmp_path / "cache" / "headrace"
        self.model = tmp_path / "Tiny.Q4_1.gguf"
        self.model.write_bytes(b"GGUF" * 100)
        self.jobs: list[Job] = []
        self.failing: set[str] = set()
        self.stop_at: int | None = None

    def run_trial(self, job: Job, environ: dict[str, str]) -> Report:
        self.jobs.append(job)
        if len(self.jobs) == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        name = next((name for name in TARGETS if f".{name.upper()}." in job.settings["path"]), SOURCE)
        if name in self.failing:
            return Report(failure="the process was ended by SIGABRT")
        seconds = SECONDS[name] * (0.7 if job.settings["threads_batch"] == 1 else 1.0)
        known = tuple((tokens, seconds) for tokens, _ in MIXTURE)
        return Report(Figures(known, 0.01, 0.06, 10**8, 100, 0.0))

    def make_file(self, source: Path, target: Path, number: int, threads: int, environ: dict[str, str]) -> None:
        assert source == self.model
        target.write_bytes(b"GGUF%d" % number)

    def config(self, **flags: str) -> Config:
        return load(flags={"model.path": str(self.model), **flags}, environ={"XDG_CONFIG_HOME": "/nonexistent"})

    @property
    def profile(self) -> tuned.Profile:
        found = tuned.load_profile(tuned.profile_file(self.cache, self.model))
        assert found is not None
        return found

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "models" / "tuned").iterdir())


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(tune, "run_trial", fake.run_trial)
    monkeypatch.setattr(tune, "make_file", fake.make_file)
    monkeypatch.setattr(tune, "file_type", lambda path: 3)
    monkeypatch.setattr(tune, "fetch", lambda name: fake.model)
    return fake


def test_it_measures_decides_writes_and_says_why(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.run(fake.config(), Wish()) == 0
    captured = capsys.readouterr()
    assert "Tiny.Q4_1.gguf is q4_1" in captured.out
    assert "→  f16" in captured.out
    assert "--allow-loss" in captured.out
    assert "f16 weights, engine.threads=1, engine.threads_batch=1" in captured.out
    assert "round 1, q8_0, 2 threads" in captured.err
    assert "\x1b" not in captured.out + captured.err
    profile = fake.profile
    assert profile.settings == {"engine.threads": 1, "engine.threads_batch": 1}
    assert profile.converted is not None
    assert fake.files() == [Path(profile.converted.path).name]
    assert {row.weights for row in profile.rows} == {SOURCE, "q8_0", "q4_0", "f16", "bf16"}
    assert [row.loses for row in profile.rows if row.weights == "q4_0"] == ["precision"]
    assert sum(row.chosen for row in profile.rows) == 1


def test_serve_would_use_it(fake: Fake) -> None:
    tune.run(fake.config(), Wish())
    applied = tuned.apply_profile(
        fake.config(), fake.cache, fake.model, lambda settings: load(tuned=settings, environ={})
    )
    assert applied.path.name.endswith(".F16.gguf")
    assert applied.config.engine.threads == 1


def test_shown_again_and_forgotten(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError, match="there is no tuned profile"):
        tune.show(fake.config())
    tune.run(fake.config(), Wish())
    made = capsys.readouterr().out
    tune.show(fake.config())
    shown = capsys.readouterr().out
    assert [line for line in made.splitlines() if "→" in line] == [line for line in shown.splitlines() if "→" in line]
    fake.model.write_bytes(b"GGUF")
    tune.show(fake.config())
    assert "It is not used: the tuned profile is for another file" in capsys.readouterr().out
    tune.forget(fake.config())
    assert capsys.readouterr().out.count("removed ") == 2
    assert fake.files() == []
    tune.forget(fake.config())
    assert "there is no tuned profile" in capsys.readouterr().out


def test_one_that_crashes_is_in_the_table(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.failing = {"f16"}
    assert tune.run(fake.config(), Wish()) == 0
    out = capsys.readouterr().out
    assert "f16, 2 threads, steps of 512 failed: the process was ended by SIGABRT" in out
    assert fake.profile.weights == "q8_0"


def test_a_term_signal_leaves_no_file_and_no_profile(fake: Fake) -> None:
    fake.stop_at = 4
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        tune.run(fake.config(), Wish())
    assert signal.getsignal(signal.SIGTERM) is before
    assert fake.files() == []
    assert not tuned.profile_file(fake.cache, fake.model).exists()


def test_a_profile_that_cannot_be_written_leaves_no_file(fake: Fake) -> None:
    fake.cache.mkdir(parents=True)
    (fake.cache / "tuned").write_bytes(b"in the way")
    with pytest.raises(StartupError, match="cannot"):
        tune.run(fake.config(), Wish())
    assert fake.files() == []


def test_trials_run_as_the_server_would(fake: Fake) -> None:
    tune.run(fake.config(**{"slo.arrival_guard_ms": "120"}), Wish(formats=()))
    job = fake.jobs[0]
    assert job.guard_s == 0.12
    assert job.step_tokens == 512
    assert job.settings["batch"] >= 512
    assert {job.settings["threads_batch"] for job in fake.jobs} == {1, 2}
    assert {job.settings["flash_attention"] for job in fake.jobs} == {True, False}


def test_what_the_user_set_is_left_alone(fake: Fake) -> None:
    flags = {"engine.threads": "1", "engine.kv_type": "q8_0"}
    tune.run(fake.config(**flags), Wish(formats=()), frozenset(flags))
    assert {(job.settings["threads"], job.settings["flash_attention"]) for job in fake.jobs} == {(1, True)}


def test_what_the_user_set_to_its_default_is_left_alone(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE_THREADS_BATCH", "0")
    with pytest.raises(SystemExit) as end:
        main(["tune", str(fake.model), "--only", "source"])
    assert not end.value.code
    assert {job.settings["threads_batch"] for job in fake.jobs} == {2}


def test_a_path_that_is_not_utf_8_is_one_line(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.model = fake.model.rename(fake.model.with_name("T\udcffny.gguf"))
    for verb in ([], ["--show"], ["--forget"]):
        with pytest.raises(SystemExit) as end:
            main(["tune", str(fake.model), *verb])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert "T\\udcffny.gguf': the path is not UTF-8" in said
        assert said.count("\n") == 1
    assert not fake.jobs


def test_forgetting_a_broken_profile_says_where_to_look(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    file = tuned.profile_file(fake.cache, fake.model)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"{")
    left = fake.cache / "models" / "tuned" / "Tiny-x.F16.gguf"
    left.parent.mkdir(parents=True)
    left.touch()
    tune.forget(fake.config())
    said = " ".join(capsys.readouterr().out.split())
    assert f"removed {file}" in said
    assert f"what was made for it may be in {fake.cache / 'models' / 'tuned'}" in said
    assert tuned.AGAIN not in said
    assert left.exists(), "nobody knows whose it is"
    tune.forget(fake.config())
    assert "may be in" not in capsys.readouterr().out


def test_formats_are_named() -> None:
    assert formats(None) == tuple(TARGETS.values())
    assert formats("F16, q8_0,f16") == (TARGETS["f16"], TARGETS["q8_0"])
    assert formats("source") == ()
    for text in ("q5_1", "", "f16,,"):
        with pytest.raises(StartupError, match="--only"):
            formats(text)


def test_a_scripted_model_has_nothing_to_tune() -> None:
    config = Config()
    scripted = dataclasses.replace(config, model=dataclasses.replace(config.model, path="scripted:30"))
    with pytest.raises(StartupError, match="nothing to tune"):
        tune.run(scripted, Wish())
    for verb in (tune.show, tune.forget):
        with pytest.raises(StartupError, match="nothing to tune"):
            verb(scripted)


def test_a_narrow_terminal_gets_fewer_columns(fake: Fake) -> None:
    tune.run(fake.config(), Wish())
    assert len(table(fake.profile, wide=False).columns) < len(table(fake.profile).columns)
