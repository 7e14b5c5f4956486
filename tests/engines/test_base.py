from __future__ import annotations

import msgspec

from headrace.core.limits import Limits
from headrace.engines.base import EngineStats, ModelInfo, StepAborted, StepEngine, StepFailed, StreamEngine
from headrace.engines.llama import LlamaEngine
from headrace.engines.local import LocalEngine
from headrace.engines.supervisor import WorkerEngine
from headrace.engines.worker import Blueprint
from headrace.testing import ScriptedEngine

INFO = ModelInfo("m", 4096, 100, "{{ x }}", 1, True, 2, (2, 3), {"<eos>": 2}, 1_700_000_000)


def test_what_is_said_of_a_model_crosses_processes_unchanged() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(INFO), type=ModelInfo) == INFO
    bare = ModelInfo("m", 1, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(bare), type=ModelInfo) == bare
    assert (bare.bos, bare.eos, bare.eog, bare.control, bare.chat_template) == (None, None, (), {}, None)


def test_stats_cross_processes_unchanged() -> None:
    stats = EngineStats(*range(1, 12))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats


def test_an_aborted_step_is_not_a_failed_one() -> None:
    assert not issubclass(StepAborted, StepFailed)
    assert not issubclass(StepFailed, StepAborted)


def test_the_engines_fit_their_ports() -> None:
    scripted: StepEngine = ScriptedEngine([])
    llama: type[StepEngine] = LlamaEngine
    local: StreamEngine = LocalEngine(lambda: scripted, Limits(), lambda: 0.0)
    worker: StreamEngine = WorkerEngine(Blueprint("a:b", {}, {}), lambda: 0.0)
    assert llama is not None
    assert not local.ready
    assert not worker.ready
