from __future__ import annotations

import signal
from itertools import pairwise
from typing import Any

import pytest

from headrace.engines.ladder import Ending, Kept, descends, first_rung, given_up, llama_rungs, stepped_down, told

SETTINGS: dict[str, Any] = {
    "extra_buffers": True,
    "flash_attention": True,
    "kv_type": "f16",
    "threads": 4,
    "threads_batch": 8,
}
CRASHES = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT")
OTHERS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGXCPU")


def names(**changes: Any) -> list[str]:
    return [rung.name for rung in llama_rungs({**SETTINGS, **changes})]


def test_each_rung_does_without_what_the_ones_above_did() -> None:
    rungs = llama_rungs(SETTINGS)
    assert names() == ["as-configured", "no-extra-buffers", "no-flash-attention", "one-thread"]
    assert [rung.settings for rung in rungs] == [
        {},
        {"extra_buffers": False},
        {"extra_buffers": False, "flash_attention": False},
        {"extra_buffers": False, "flash_attention": False, "threads": 1, "threads_batch": 1},
    ]
    for above, below in pairwise(rungs):
        assert above.settings.items() <= below.settings.items()
        assert below.without
        assert below.cost


def test_what_the_user_does_without_already_is_no_rung() -> None:
    assert names(extra_buffers=False) == ["as-configured", "no-flash-attention", "one-thread"]
    assert names(flash_attention=False, kv_type="bf16") == ["as-configured", "no-extra-buffers", "one-thread"]
    assert names(threads=1) == names(), "a step of several tokens has more threads"
    assert names(threads=1, threads_batch=1)[-1] == "no-flash-attention"
    assert names(extra_buffers=False, flash_attention=False, threads=1, threads_batch=1) == ["as-configured"]


def test_a_small_kv_cache_goes_with_flash_attention() -> None:
    rung = llama_rungs({**SETTINGS, "kv_type": "q8_0"})[2]
    assert (rung.settings["flash_attention"], rung.settings["kv_type"]) == (False, "f16")
    assert "engine.kv_type" in rung.without


def test_a_start_begins_where_the_last_one_came_up() -> None:
    rungs = llama_rungs(SETTINGS)
    assert first_rung(rungs, None, SETTINGS) == 0
    for at, rung in enumerate(rungs):
        assert first_rung(rungs, Kept(rung.settings, "x"), SETTINGS) == at


def test_a_kept_rung_means_nothing_more_where_the_user_does_without() -> None:
    own = {**SETTINGS, "extra_buffers": False}
    assert first_rung(llama_rungs(own), Kept({"extra_buffers": False}, "x"), own) == 0
    lower = Kept({"extra_buffers": False, "flash_attention": False}, "x")
    assert first_rung(llama_rungs(own), lower, own) == 1
    assert first_rung(llama_rungs(own), Kept({"no_such": 1}, "x"), own) == 0


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_leads_down_and_is_told_by_its_name(name: str) -> None:
    ending = Ending(-signal.Signals[name], "ggml.c:1: GGML_ASSERT(a) failed")
    assert descends(ending)
    assert told(ending) == f"the process was ended by {name}: ggml.c:1: GGML_ASSERT(a) failed"


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_fault_of_kernels_does_not(name: str) -> None:
    assert not descends(Ending(-signal.Signals[name]))
    assert name in given_up(Ending(-signal.Signals[name]), 1)


def test_what_a_worker_says_itself_does_not_lead_down() -> None:
    for code in (0, 1, 2, 9):
        assert not descends(Ending(code, "ValueError: no"))
    assert not descends(Ending(-signal.SIGABRT, "std::bad_alloc: std::bad_alloc"))
    assert "memory" in given_up(Ending(-signal.SIGABRT, "std::bad_alloc: std::bad_alloc"), 1)


def test_numbers_that_are_none_lead_down_like_a_crash() -> None:
    ending = Ending(2, "", "x.gguf computes NaN")
    assert descends(ending)
    assert told(ending) == "x.gguf computes NaN"
    assert "all 4 sorts of kernels" in given_up(ending, 4)
    assert "sorts" not in given_up(ending, 1)


def test_a_kill_is_taken_for_a_lack_of_memory() -> None:
    text = given_up(Ending(-signal.SIGKILL), 1)
    assert "memory" in text
    assert "engine.cells" in text


def test_the_last_line_names_signal_assertion_and_remedy() -> None:
    text = given_up(Ending(-signal.SIGABRT, "llama-model.cpp:9: GGML_ASSERT(n > 0) failed"), 4)
    assert "SIGABRT" in text
    assert "GGML_ASSERT(n > 0) failed" in text
    assert "the file" in text
    assert "scripts/install" in given_up(Ending(-signal.SIGSEGV), 4)
    for line in (text, given_up(Ending(-signal.SIGSEGV), 4), given_up(Ending(1, "E: x"), 1)):
        assert "\n" not in line


def test_what_an_engine_below_the_top_says() -> None:
    rung = llama_rungs(SETTINGS)[1]
    line = stepped_down(rung, "the process was ended by SIGSEGV", 1)
    for part in (rung.without, rung.cost, "SIGSEGV", "scripts/install", "pip install"):
        assert part in line


def test_a_signal_without_a_name_has_a_number() -> None:
    assert "signal 63" in told(Ending(-63)) or "SIGRT" in told(Ending(-63))
