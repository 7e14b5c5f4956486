from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.settings import SETTINGS
from headrace_bench.exhibits import EXHIBITS, SWITCHES, Exhibit, everything_off, exhibit


def on_by_default() -> list[str]:
    """Every optimisation that can be turned off, and is not."""
    return [name for name, row in SETTINGS.items() if name.startswith("optimizations.") and row.default is True]


def test_each_optimisation_that_is_on_by_default_has_its_exhibit() -> None:
    assert set(on_by_default()) <= SWITCHES.keys()


@pytest.mark.parametrize("one", EXHIBITS, ids=lambda one: one.switch)
def test_an_exhibit_names_settings_that_there_are(one: Exhibit) -> None:
    assert isinstance(SETTINGS[one.switch].default, bool)
    assert one.settings.keys() <= SETTINGS.keys()


@pytest.mark.parametrize("one", [*EXHIBITS, exhibit("engine.unheard_of")], ids=lambda one: one.switch)
def test_a_seed_makes_the_same_load_and_another_one_other_text(one: Exhibit) -> None:
    first = one.schedule(3)
    assert one.schedule(3) == first
    texts = {message["content"] for planned in first.requests for message in planned.messages}
    other = {message["content"] for planned in one.schedule(4).requests for message in planned.messages}
    assert all(len(text.split()) < 10 for text in texts & other)  # only what everybody says


@pytest.mark.parametrize("one", EXHIBITS, ids=lambda one: one.switch)
def test_the_schedule_is_one_that_can_be_driven(one: Exhibit) -> None:
    made = one.schedule(1)
    assert [planned.index for planned in made.requests] == list(range(len(made.requests)))
    assert [planned.phase for planned in made.requests].count("warmup") == 1
    assert made.requests[0].phase == "warmup"
    tags: Mapping[str, int] = {planned.tag: 1 for planned in made.requests}
    assert one.primary.tag in tags
    times = [planned.at for planned in made.requests]
    if made.users is None:
        known = [at for at in times if at is not None]
        assert len(known) == len(times)
        assert known == sorted(known)
        assert known[1] >= made.warmup
        assert known[-1] <= made.warmup + made.duration
    else:
        assert made.finite
        assert times == [None] * len(times)
    assert sum(planned.prompt_tokens + planned.max_tokens for planned in made.requests) < 16_000


def test_everything_off_is_all_that_can_be_turned_off() -> None:
    flags = everything_off()
    assert flags[::2] == ["--set"] * (len(flags) // 2)
    off = {flag.removesuffix("=false") for flag in flags[1::2]}
    switches = {
        name for name, row in SETTINGS.items() if name.startswith("optimizations.") and row.default in (True, False)
    }
    assert off == switches | {"engine.prefix_cache"}


def test_what_decides_is_told_in_words() -> None:
    assert str(SWITCHES["optimizations.tiers"].primary) == "ttft p50 of second"
    assert str(SWITCHES["optimizations.admission"].primary) == "share in time of user"
    assert SWITCHES["optimizations.admission"].primary.more_is_better
    assert not SWITCHES["optimizations.tiers"].primary.more_is_better


def test_a_switch_without_an_exhibit_gets_plain_chats() -> None:
    assert exhibit("engine.new_idea").switch == "engine.new_idea"
    assert exhibit("optimizations.tiers") is SWITCHES["optimizations.tiers"]
