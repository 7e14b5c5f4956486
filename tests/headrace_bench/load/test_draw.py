from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace_bench.fault import Misuse
from headrace_bench.load import arrivals as arriving
from headrace_bench.load import workload as working
from headrace_bench.load.draw import draw
from headrace_bench.load.schedule import Schedule


def drawn(arrivals: str = "poisson:5", workload: str = "chat", **more: Any) -> Schedule:
    given: Mapping[str, Any] = {"seed": 1, **more}
    return draw(arriving.parse(arrivals), working.parse(workload), **given)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A trace of either kind, a curve, lengths and prompts."""
    azure = "".join(f"{i * 0.5},{800 + i},{80 + i}\n" for i in range(200))
    ids = [[*range(5), 100 + i] if i % 2 else [500 + i, 900 + i] for i in range(60)]
    mooncake = [
        {
            "timestamp": 3000 * (i // 6),
            "input_length": 512 * len(ids[i]) - 256,
            "output_length": 160,
            "hash_ids": ids[i],
        }
        for i in range(60)
    ]
    contents = {
        "azure.csv": "arrival_s,context_tokens,generated_tokens\n" + azure,
        "mooncake.jsonl": "\n".join(map(json.dumps, mooncake)),
        "rates.csv": "window_start_s,rate_rps\n0,10\n100,0\n200,30\n",
        "lengths.csv": "input_tokens,output_tokens\n40,10\n80,20\n",
        "prompts.jsonl": '{"turns": ["one question", "and another"]}\n{"turns": ["two questions here"]}\n',
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return {name.partition(".")[0]: str(tmp_path / name) for name in contents}


def kinds(files: dict[str, str]) -> list[tuple[str, str]]:
    return [
        ("constant:5", "chat"),
        ("gamma:5,cv=3", "code"),
        ("burst:4,every=5", "reason"),
        ("ramp:1-9", "mixed,share=0.2"),
        ("step:2,8", "shared:50"),
        ("closed:4,think=1", "sessions:20,turns=3"),
        (f"trace:{files['azure']},rate=4", "trace"),
        (f"trace:{files['mooncake']}", "trace"),
        (f"rate:{files['rates']},time_scale=0.1", f"lengths:{files['lengths']}"),
        ("poisson:5", f"prompts:{files['prompts']},turns=all"),
    ]


def test_the_same_seed_is_the_same_schedule_byte_for_byte(files: dict[str, str]) -> None:
    for arrivals, workload in kinds(files):
        one, same, other = (
            msgspec.json.encode(drawn(arrivals, workload, duration=20.0, warmup=5.0, hang_ups=0.3, seed=seed))
            for seed in (1, 1, 2)
        )
        assert one == same, (arrivals, workload)
        assert one != other, (arrivals, workload)


def test_every_schedule_is_in_order_and_in_one_phase(files: dict[str, str]) -> None:
    for arrivals, workload in kinds(files):
        found = drawn(arrivals, workload, duration=20.0, warmup=5.0)
        assert [planned.index for planned in found.requests] == list(range(len(found.requests)))
        assert [planned.phase for planned in found.requests] == sorted(
            (planned.phase for planned in found.requests), reverse=True
        )
        times = [planned.at for planned in found.requests if planned.at is not None]
        assert times == sorted(times)
        for planned in found.requests:
            if planned.at is not None:
                assert (planned.at < 5.0) == (planned.phase == "warmup")
                assert planned.at < 5.0 + found.duration
            assert planned.max_tokens >= 2
            assert planned.prompt_tokens >= 1
        assert arriving.parse(found.kind) == arriving.parse(arrivals)
        assert found.notes


def test_no_prompt_is_sent_twice(files: dict[str, str]) -> None:
    for arrivals, workload in kinds(files):
        found = drawn(arrivals, workload, duration=20.0, warmup=5.0)
        firsts = [json.dumps(planned.messages) for planned in found.requests if planned.turn == 0]
        assert len(set(firsts)) == len(firsts), (arrivals, workload)


def test_a_warm_up_leaves_the_window_as_it_is() -> None:
    cold, warm = (drawn(duration=20.0, warmup=warmup, hang_ups=0.5) for warmup in (0.0, 7.0))
    window = [planned for planned in warm.requests if planned.phase == "measure"]
    assert [planned.messages for planned in window] == [planned.messages for planned in cold.requests]
    assert [planned.hang_up for planned in window] == [planned.hang_up for planned in cold.requests]
    assert [planned.at for planned in window] == pytest.approx([(planned.at or 0) + 7 for planned in cold.requests])


def test_hanging_up_leaves_the_prompts_and_times_as_they_are() -> None:
    all_stay, some_leave = (drawn(duration=10.0, hang_ups=share) for share in (0.0, 0.5))
    without = tuple(msgspec.structs.replace(planned, hang_up=None) for planned in some_leave.requests)
    assert without == all_stay.requests != some_leave.requests


def test_constant_has_its_rate_exactly() -> None:
    found = drawn("constant:500", duration=4.0, warmup=1.0)
    assert sum(planned.phase == "measure" for planned in found.requests) == 2000


def test_hang_ups_are_a_share_after_a_drawn_time() -> None:
    found = [planned.hang_up for planned in drawn("constant:100", duration=20.0, hang_ups=0.25).requests]
    left = [after for after in found if after is not None]
    assert len(left) / len(found) == pytest.approx(0.25, abs=0.03)
    assert np.mean(left) == pytest.approx(1.0, abs=0.15)


def test_full_answers_are_asked_for_in_the_body() -> None:
    found = drawn(duration=5.0, ignore_eos=True)
    assert all(planned.extra == {"ignore_eos": True, "min_tokens": planned.max_tokens} for planned in found.requests)
    assert not any(planned.extra for planned in drawn(duration=5.0).requests)


def test_users_begin_one_after_another_and_have_enough_to_ask() -> None:
    found = drawn("closed:4,think=2", duration=30.0, warmup=10.0)
    assert found.users == 4
    assert [planned.think for planned in found.requests[:4]] == [0.0, 2.0, 4.0, 6.0]
    thinks = [planned.think for planned in found.requests[4:]]
    assert np.mean(thinks) == pytest.approx(2.0, abs=0.4)
    assert sum(planned.phase == "measure" for planned in found.requests) >= 4 * 30 / 2
    assert {planned.at for planned in found.requests} == {None}
    cold = drawn("closed:2", duration=30.0)
    assert [planned.think for planned in cold.requests[:3]] == [0.0, 1.5, 0.0]
    assert sum(planned.phase == "measure" for planned in drawn("closed:2", duration=5.0, requests=7).requests) == 7


def test_sessions_have_turns_with_new_messages_only() -> None:
    found = drawn("constant:1", "sessions:3,turns=3,think=2", duration=10.0, warmup=2.0)
    measure = [planned for planned in found.requests if planned.phase == "measure"]
    assert len(measure) == 9
    assert [planned.turn for planned in measure] == [0, 1, 2] * 3
    assert len({planned.session for planned in found.requests}) == 5
    assert [planned.at is None for planned in measure] == [False, True, True] * 3
    assert all(len(planned.messages) == 1 for planned in measure)
    assert all(planned.think > 0 for planned in measure if planned.turn)


def test_one_system_prompt_in_common() -> None:
    found = drawn(workload="shared:50", duration=10.0)
    systems = {planned.messages[0]["content"] for planned in found.requests}
    assert len(systems) == 1
    assert len(systems.pop().split()) == 50
    assert all(planned.messages[0]["role"] == "system" and len(planned.messages) == 2 for planned in found.requests)
    other = drawn(workload="shared:50", duration=10.0, seed=2)
    assert other.requests[0].messages[0] != found.requests[0].messages[0]


def test_mixed_has_some_of_the_longest() -> None:
    found = drawn("constant:100", "mixed", duration=20.0)
    long = [planned.prompt_tokens for planned in found.requests if planned.tag == "long"]
    short = [planned.prompt_tokens for planned in found.requests if planned.tag == "short"]
    assert len(long) + len(short) == len(found.requests)
    assert len(long) / len(found.requests) == pytest.approx(0.05, abs=0.015)
    assert min(long) > max(short)


def test_prompts_have_the_words_they_say() -> None:
    for planned in drawn(duration=5.0).requests:
        assert len(planned.messages[0]["content"].split()) == planned.prompt_tokens


def test_a_trace_is_replayed_with_its_lengths(files: dict[str, str]) -> None:
    found = drawn(f"trace:{files['azure']},time_scale=0.5", "trace", warmup=10.0)
    assert [planned.at for planned in found.requests[:3]] == [0.0, 0.25, 0.5]
    assert [planned.prompt_tokens for planned in found.requests[:3]] == [100, 100, 100]
    assert [planned.max_tokens for planned in found.requests[:3]] == [10, 10, 10]
    assert found.requests[-1].prompt_tokens == round(999 / 8)
    assert found.warmup + found.duration == pytest.approx(50.0)
    assert any("multiplied by 0.5" in note for note in found.notes)
    assert any("are the warm-up" in note for note in found.notes)
    lengths = drawn(f"trace:{files['azure']}", "code", duration=10.0)
    assert [planned.at for planned in lengths.requests] == [i / 2 for i in range(20)]
    assert {planned.prompt_tokens for planned in lengths.requests} != {100}


def test_a_trace_at_a_rate_has_that_rate_in_the_part_that_is_replayed(tmp_path: Path) -> None:
    """One whose beginning is slower than its whole."""
    times = np.cumsum(np.r_[np.full(100, 5.0), np.full(900, 0.1)])
    rows = "".join(f"{at},10,10\n" for at in times.tolist())
    (tmp_path / "t.csv").write_text("arrival_s,context_tokens,generated_tokens\n" + rows)
    found = drawn(f"trace:{tmp_path / 't.csv'},rate=2", "trace", duration=20.0, warmup=5.0)
    assert len(found.requests) == 50
    whole = drawn(f"trace:{tmp_path / 't.csv'},rate=2", "trace")
    assert len(whole.requests) / whole.duration == pytest.approx(2.0)


def test_times_on_ticks_are_spread_unless_asked_not_to(files: dict[str, str]) -> None:
    spread = [planned.at or 0.0 for planned in drawn(f"trace:{files['mooncake']}", "trace").requests]
    assert len(set(spread)) == 60
    as_they_are = [planned.at or 0.0 for planned in drawn(f"trace:{files['mooncake']},jitter=0", "trace").requests]
    assert sorted(set(as_they_are)) == [3.0 * i for i in range(10)]
    counts = np.histogram(spread, bins=np.arange(0, 31, 3.0))[0]
    assert counts.sum() >= 58
    assert counts.max() <= 12


def test_shared_blocks_are_shared_text(files: dict[str, str]) -> None:
    found = drawn(f"trace:{files['mooncake']},jitter=0", "trace,block=8", duration=29.0)
    said = [planned.messages[0]["content"].split() for planned in found.requests]
    assert len(said) == 60
    for alone, shares in zip(said[::2], said[1::2], strict=True):
        assert len(alone) == 8 + 4 + 4  # a block, half a block, four words of its own
        assert shares[:40] == said[1][:40]
        assert alone[:8] not in [other[:8] for other in said if other is not alone]
        assert len(shares) == 44 + 4
    assert any("512 tokens are 8 words (divided by 64)" in note for note in found.notes)


def test_a_curve_gives_its_rates(files: dict[str, str]) -> None:
    found = drawn(f"rate:{files['rates']},scale=2,time_scale=0.5", "chat")
    counts = np.histogram([planned.at or 0.0 for planned in found.requests], bins=[0, 50, 100, 150])[0]
    assert found.duration == 150.0
    assert counts[1] == 0
    assert counts[0] == pytest.approx(1000, rel=0.12)
    assert counts[2] == pytest.approx(3000, rel=0.12)


def test_a_window_that_a_file_cannot_fill_is_shorter_and_says_so(files: dict[str, str]) -> None:
    found = drawn(f"trace:{files['azure']}", "trace", duration=1000.0, warmup=10.0)
    assert found.duration == pytest.approx(90.0)
    assert any("the window is 90.0 s, not 1000" in note for note in found.notes)
    with pytest.raises(Misuse, match="nothing would be measured"):
        drawn(f"trace:{files['azure']}", "trace", warmup=200.0)


def test_texts_that_come_again_have_words_before_them(files: dict[str, str]) -> None:
    found = drawn("constant:1", f"prompts:{files['prompts']}", duration=5.0)
    said = [planned.messages[0]["content"] for planned in found.requests]
    assert set(said[:2]) == {"one question", "two questions here"}
    assert len(set(said)) == 5
    assert all(one.endswith(("one question", "two questions here")) for one in said)
    turns = drawn("constant:1", f"prompts:{files['prompts']},turns=all", duration=2.0)
    assert sorted(planned.turn for planned in turns.requests) == [0, 0, 1]


@pytest.mark.parametrize(
    ("arrivals", "workload", "more", "why"),
    [
        ("poisson:1", "trace", {}, "--arrivals trace:FILE"),
        ("poisson:1", "chat", {"requests": 5}, "it is for --arrivals closed:N"),
        ("poisson:0.000001", "chat", {"duration": 1.0}, "no request falls into the 1 s"),
        ("trace:/none.csv", "trace", {}, "/none.csv: No such file"),
        ("poisson:1", "prompts:/none.jsonl", {}, "/none.jsonl: No such file"),
    ],
)
def test_what_cannot_be_drawn(arrivals: str, workload: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(Misuse) as told:
        drawn(arrivals, workload, **more)
    assert why in str(told.value)


@pytest.mark.parametrize(
    ("given", "more"),
    [
        ("constant:1e12", {}),
        ("poisson:1e300", {}),
        ("gamma:1e9,cv=2", {}),
        ("burst:2000000", {}),
        ("burst:1,every=1e-9", {}),
        ("ramp:1-1e9", {}),
        ("step:1,1e9", {}),
        ("closed:1e9", {}),
        ("closed:1", {"requests": 10**12}),
        ("constant:1", {"warmup": 1e9}),
        ("RATES,scale=1e9", {}),
    ],
)
def test_more_than_fits_into_memory_is_one_clear_line(given: str, more: dict[str, Any], files: dict[str, str]) -> None:
    with pytest.raises(Misuse, match=r"--arrivals .*: about .* requests, and 1,000,000 are the most"):
        drawn(given.replace("RATES", f"rate:{files['rates']}"), **more)
