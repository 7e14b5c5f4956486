from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from headrace_bench.__main__ import Parser
from headrace_bench.fault import Fault, Misuse
from headrace_bench.verbs import flags


def asked(*argv: str) -> argparse.Namespace:
    parser = Parser(prog="x")
    flags.add_target(parser)
    flags.add_load(parser)
    flags.add_slo(parser)
    flags.add_out(parser)
    found = parser.parse_args(["--url", "http://127.0.0.1:9", *argv])
    found.verb = "run"
    return found


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flags.KEY, raising=False)
    target = flags.plain_target_of(asked())
    assert (target.url, target.model, target.key) == ("http://127.0.0.1:9", "", None)
    assert (target.http2, target.keep_alive, target.timeout_s, target.timings) == (False, True, 60.0, True)
    assert flags.slo_of(asked()).name == "chat"
    schedule = flags.schedule_of(asked())
    assert (schedule.kind, schedule.duration, schedule.warmup, schedule.seed) == ("poisson:2", 60.0, 10.0, 1)
    assert flags.out_of(asked()).parent == Path("results")
    assert flags.out_of(asked()).name.endswith("-run")


def test_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flags.KEY, "from-the-environment")
    assert flags.plain_target_of(asked()).key == "from-the-environment"
    given = asked(
        *"--model m --key k --http2 --new-connections --timeout 5 --no-timings --slo ttft=300 --out o".split(),
        *"--arrivals closed:2 --workload code --duration 7 --warmup 0 --seed 4 --requests 9 --ignore-eos".split(),
    )
    target = flags.plain_target_of(given, url="http://127.0.0.1:10")
    assert (target.url, target.model, target.key) == ("http://127.0.0.1:10", "m", "k")
    assert (target.http2, target.keep_alive, target.timeout_s, target.timings) == (True, False, 5.0, False)
    assert flags.slo_of(given).ttft == 0.3
    assert flags.out_of(given) == Path("o")
    schedule = flags.schedule_of(given)
    assert (schedule.users, schedule.duration, schedule.warmup, schedule.seed) == (2, 7.0, 0.0, 4)
    assert len(schedule.requests) == 9
    assert schedule.requests[0].extra["ignore_eos"]


def test_another_seed_draws_anew() -> None:
    given = asked("--duration", "5", "--warmup", "0", "--arrivals", "poisson:50")
    first, other = flags.schedule_of(given), flags.schedule_of(given, seed=9)
    assert (first.seed, other.seed, other.kind) == (1, 9, "poisson:50")
    assert first.requests != other.requests


def test_a_soak_is_long_and_a_trace_has_its_own_lengths(tmp_path: Path) -> None:
    assert flags.schedule_of(asked("--arrivals", "soak:0.5")).duration == flags.SOAK_S
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,context_tokens,generated_tokens\n0,80,160\n1,80,160\n")
    schedule = flags.schedule_of(asked("--arrivals", f"trace:{trace}", "--warmup", "0"))
    assert [(planned.at, planned.prompt_tokens, planned.max_tokens) for planned in schedule.requests] == [
        (0.0, 10, 20),
        (1.0, 10, 20),
    ]
    chat = flags.schedule_of(asked("--arrivals", f"trace:{trace}", "--warmup", "0", "--workload", "chat,scale=1"))
    assert [planned.at for planned in chat.requests] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--duration", "0"], "'0' is not a number above 0"),
        (["--duration", "nan"], "'nan' is not a number"),
        (["--warmup", "-1"], "of at least 0"),
        (["--hang-ups", "1.5"], "at most 1"),
        (["--requests", "0"], "whole number above 0"),
        (["--timeout", "x"], "'x' is not a number"),
        (["--seed", "x"], "'x' is not a whole number of at least 0"),
        (["--seed", "-1"], "'-1' is not a whole number of at least 0"),
    ],
)
def test_a_number_that_cannot_be(argv: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        asked(*argv)
    assert why in capsys.readouterr().err


def test_a_url_or_a_server_that_is_not() -> None:
    given = asked()
    given.url = "nonsense"
    with pytest.raises(Misuse):
        flags.plain_target_of(given)
    with pytest.raises(Fault, match="no server answers there"):
        flags.target_of(asked())
