from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.assembly import (
    batch_size,
    make_blueprint,
    make_bounds,
    make_candidate,
    make_engine,
    make_job,
    make_limits,
    make_model,
    make_sampling,
    make_timing,
)
from headrace.core.admission import Bounds
from headrace.core.errors import StartupError
from headrace.core.request import Sampling, SamplingDefaults
from headrace.core.tuning import Candidate
from headrace.engines.base import ModelInfo
from headrace.engines.local import LocalEngine
from headrace.engines.supervisor import WorkerEngine
from headrace.engines.vocab import Vocabulary
from headrace.settings import Config, Engine, Model, Optimizations, Server

SCRIPTED = Model(path="scripted:1000", alias="scripted")


def config(**engine: Any) -> Config:
    return Config(server=Server(port=0), model=SCRIPTED, engine=Engine(**engine))


def test_a_batch_is_whole_tiles_and_holds_what_a_step_may_need() -> None:
    assert [batch_size(n) for n in (1, 64, 65, 528)] == [64, 64, 128, 576]
    limits = make_limits(config(step_tokens=600, max_running=16))
    assert limits.step_tokens >= 616
    assert limits.step_tokens % 64 == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_who_tells_readers_is_as_configured(overlap: bool) -> None:
    given = dataclasses.replace(config(), optimizations=Optimizations(overlap=overlap))
    assert make_limits(given).overlap is overlap
    assert make_blueprint(given).limits["overlap"] is overlap


def test_what_may_wait_is_as_the_settings_say() -> None:
    given = config(max_waiting=3, max_waiting_tokens=500, queue_timeout_s=7.0, max_running=5)
    assert make_bounds(given) == Bounds(3, 500, 7.0, places=5, predict=True)
    assert not make_bounds(dataclasses.replace(given, optimizations=Optimizations(admission=False))).predict
    for in_process in (True, False):
        engine = make_engine(config(max_waiting=3, in_process=in_process))
        assert isinstance(engine, LocalEngine | WorkerEngine)
        assert engine._streams._backlog.bounds == make_bounds(config(max_waiting=3))


def test_the_blueprint_carries_the_settings_of_the_engine(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    given = dataclasses.replace(config(threads=3, kv_type="q8_0", cells=1024), model=Model(path=str(model), alias="m"))
    blueprint = make_blueprint(given)
    assert blueprint.factory == "headrace.engines.llama:worker"
    assert blueprint.settings["threads"] == 3
    assert blueprint.settings["threads_batch"] == len(os.sched_getaffinity(0)), "0 takes all cores"
    assert (blueprint.settings["kv_type"], blueprint.settings["cells"]) == ("q8_0", 1024)
    assert blueprint.settings["created"] == int(model.stat().st_mtime)
    assert blueprint.limits["step_tokens"] == blueprint.settings["batch"]


def test_a_trial_is_run_like_the_server_s_engine(tmp_path: Path) -> None:
    given = dataclasses.replace(config(cells=16384), model=Model(path="m.gguf", alias="m"))
    own, fixed = make_candidate(given, ())
    cores = len(os.sched_getaffinity(0))
    assert (own, fixed) == (Candidate("source", cores, True, 512), frozenset())
    other = Candidate("f16", 1, False, 1024, False)
    job = make_job(given, other, tmp_path / "f16.gguf", 512, 256)
    assert job.settings["path"] == str(tmp_path / "f16.gguf")
    assert (job.settings["threads"], job.settings["threads_batch"]) == (1, 1)
    assert (job.settings["flash_attention"], job.step_tokens) == (False, 1024)
    assert job.settings["batch"] >= 1024
    assert job.settings["extra_buffers"] is False
    assert job.guard_s == 0.25
    assert job.settings["cells"] < 16384, "a trial takes no more memory than it needs"
    plain = dataclasses.replace(given, optimizations=Optimizations(adaptive_chunks=False))
    assert make_job(plain, other, tmp_path / "x", 512, 256).guard_s == 0.0


def test_steps_of_every_length_that_is_timed_fit_the_batch(tmp_path: Path) -> None:
    given = dataclasses.replace(config(step_tokens=64), model=Model(path="m.gguf", alias="m"))
    own, _ = make_candidate(given, ())
    job = make_timing(given, msgspec.structs.replace(own, extra_buffers=False), tmp_path / "s.gguf", 1024, 2.5)
    assert job.settings["batch"] > 512
    assert (job.settings["path"], job.settings["extra_buffers"]) == (str(tmp_path / "s.gguf"), False)
    assert (job.depth, job.seconds) == (1024, 2.5)


def test_what_the_user_set_is_no_candidate() -> None:
    given = ("engine.threads", "engine.step_tokens", "engine.kv_type")
    own, fixed = make_candidate(config(threads=3, step_tokens=128, kv_type="q8_0"), given)
    assert fixed == {"threads", "step_tokens", "flash_attention"}
    assert own.step_tokens == 128
    model = Model(path="m.gguf", alias="m")
    job = make_job(
        dataclasses.replace(config(threads=3), model=model),
        msgspec.structs.replace(own, threads=1),
        Path("x.gguf"),
        1,
        1,
    )
    assert job.settings["threads"] == 3


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("engine.threads", "threads"),
        ("engine.threads_batch", "threads"),
        ("engine.flash_attention", "flash_attention"),
        ("engine.step_tokens", "step_tokens"),
    ],
)
def test_what_the_user_set_to_its_default_is_no_candidate_either(name: str, field: str) -> None:
    assert make_candidate(config(), [name])[1] == {field}
    assert make_candidate(config(), ["engine.slots", "slo.profile"])[1] == set()


@pytest.mark.parametrize(("in_process", "kind"), [(True, LocalEngine), (False, WorkerEngine)])
def test_the_engine_lives_where_the_configuration_says(in_process: bool, kind: type[object]) -> None:
    assert isinstance(make_engine(config(in_process=in_process)), kind)


@pytest.mark.parametrize("replay", [True, False])
def test_survival_is_as_configured(replay: bool) -> None:
    given = dataclasses.replace(config(step_timeout_s=7.0), optimizations=Optimizations(replay=replay))
    engine = make_engine(given)
    assert isinstance(engine, WorkerEngine)
    assert engine._replay is replay
    assert engine._watchdog.timeout == 7.0


def test_a_template_that_is_none_is_one_line() -> None:
    async def main() -> None:
        engine = make_engine(config(in_process=True))
        await engine.start()
        broken = msgspec.structs.replace(engine.info, chat_template="{% for")
        engine._info = broken  # type: ignore[attr-defined]
        with pytest.raises(StartupError, match="template"):
            make_model(config(), engine)
        await engine.close()

    asyncio.run(main())


def test_the_demo_model_is_sampled_as_its_makers_say_whatever_its_file_is_called(demo_model: Path) -> None:
    info = Vocabulary.open(demo_model).info("any", 0, 0)
    assert make_sampling(config(), info) == Sampling(temperature=0.2, top_p=0.9)


TITLE = "Smollm2 135M 8k Lc100K Mix1 Ep2"


def test_what_is_not_said_is_asked_of_the_file_then_of_the_catalogue_then_of_openai() -> None:
    info = ModelInfo("m", 9, 9, sampling=SamplingDefaults(temperature=0.0, top_k=40))
    assert make_sampling(config(), info) == Sampling(temperature=0.0, top_k=40)
    known = msgspec.structs.replace(info, title=TITLE)
    assert make_sampling(config(), known) == Sampling(temperature=0.0, top_p=0.9, top_k=40)
    assert make_sampling(config(), ModelInfo("m", 9, 9, title=TITLE)) == Sampling(temperature=0.2, top_p=0.9)
    off = dataclasses.replace(config(), model=Model(path="m", alias="m", own_sampling=False))
    assert make_sampling(off, known) == Sampling()


def test_what_a_file_says_and_cannot_be_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert make_sampling(config(), ModelInfo("m", 9, 9, faults=("x must be y", "z must be w"))) == Sampling()
    assert [record.getMessage() for record in caplog.records] == [
        "the model file of m says what cannot be, which is ignored: x must be y; z must be w"
    ]
