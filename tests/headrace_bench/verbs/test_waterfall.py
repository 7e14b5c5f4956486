from __future__ import annotations

import argparse
import asyncio
import json
import math

import msgspec
import pytest

from bench_runs import answered, failed
from headrace_bench.client.scripted import Scripted
from headrace_bench.client.target import Target
from headrace_bench.fault import Fault
from headrace_bench.record import Record
from headrace_bench.report.stages import split
from headrace_bench.verbs import flags, waterfall


def drawn(record: Record, width: int = 100) -> list[str]:
    parts = split(record)
    assert parts is not None
    return [line.plain for line in waterfall.chart(parts, width)]


def test_each_stage_is_a_line_and_a_bar_where_it_lies() -> None:
    lines = drawn(answered(0, 0.0, ttft=0.2))
    assert lines[0].startswith("client   lag                1.0 ms")
    assert lines[3].startswith("network")
    assert lines[4].startswith("server   receive            0.5 ms")
    assert lines[-1].split() == ["first", "token", "200.0", "ms"]
    assert len(lines) == 13
    assert all(len(line) <= 100 for line in lines)
    bars = [line[waterfall.BEFORE :] for line in lines[:-1]]
    starts = [len(bar) - len(bar.lstrip()) for bar in bars]
    assert starts == sorted(starts)
    assert bars[9].count("█") >= 50, "prefill took 170 of 200 ms"


def test_what_takes_no_time_has_no_bar_and_little_has_a_sliver() -> None:
    record = msgspec.structs.replace(answered(0, 0.0, told=False), connected=None, sent=None)
    lines = drawn(record, 40)
    assert lines[1].rstrip().endswith("ms")
    assert lines[0].rstrip().endswith("▏")
    assert all(len(line) <= 45 for line in lines)


def test_what_the_bars_do_not_say() -> None:
    def said(record: Record) -> str:
        parts = split(record)
        assert parts is not None
        return "\n".join(line.plain for line in waterfall.words(record, parts))

    told = said(answered(0, 0.0))
    assert "64 prompt tokens; 10 tokens in 290 ms, TPOT 10" in told
    assert "tells nothing" not in told
    assert "tells nothing of its own time" in said(answered(0, 0.0, told=False))
    early = msgspec.structs.replace(answered(0, 0.0, ttft=0.1), server={"prefill": 97.8})
    assert "overlap by 0.30 ms" in said(early)
    cut = msgspec.structs.replace(answered(0, 0.0), outcome="truncated", error="closed")
    assert "the request failed (truncated): closed" in said(cut)


def test_a_failure_in_words() -> None:
    assert waterfall.ended(failed(0, 0.0)) == "the request failed (http, status 503): busy"
    assert waterfall.ended(failed(0, 0.0, "timeout", None, "")) == "the request failed (timeout)"
    assert waterfall.ended(answered(0, 0.0)) is None


def test_json_is_strict_and_adds_up() -> None:
    record = answered(0, 0.0)
    told = waterfall.document(record, split(record))
    assert math.fsum(stage["ms"] for stage in told["stages"]) == pytest.approx(told["ttft_ms"])
    assert told["server_told"] is True
    nothing = json.loads(json.dumps(waterfall.document(failed(0, 0.0), None), allow_nan=False))
    assert (nothing["ttft_ms"], nothing["stages"], nothing["e2e_ms"]) == (None, [], None)


def test_prompts_differ_by_seed_and_have_the_length() -> None:
    one, two = (waterfall.planned(40, 8, seed) for seed in (1, 2))
    assert one.messages != two.messages
    assert len(one.messages[0]["content"].split()) == 40
    assert waterfall.planned(40, 8, 1) == one


def test_a_scripted_server_is_drawn() -> None:
    async def ask() -> Record:
        async with Scripted() as server:
            return await waterfall.send(Target(server.url, "a"), waterfall.planned(16, 8, 1))

    record = asyncio.run(ask())
    assert record.outcome == "ok"
    parts = split(record)
    assert parts is not None
    assert not parts.told
    assert parts.by_name()["server+network"] >= 95
    assert not record.reused


def asked(**more: object) -> argparse.Namespace:
    return argparse.Namespace(**{"prompt_tokens": 8, "max_tokens": 4, "seed": 1, "json": False, **more})


def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ends = [
        answered(0, 0.0),
        msgspec.structs.replace(answered(0, 0.0), outcome="truncated"),
        failed(0, 0.0),
        failed(0, 0.0),
    ]

    async def send(target: Target, plan: object) -> Record:
        return ends.pop(0)

    monkeypatch.setattr(flags, "target_of", lambda asked: Target("http://127.0.0.1:1", "m"))
    monkeypatch.setattr(waterfall, "send", send)
    assert waterfall.run(asked()) == 0
    assert "prefill" in capsys.readouterr().out
    assert waterfall.run(asked()) == 1
    capsys.readouterr()
    assert waterfall.run(asked(json=True)) == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "http"
    with pytest.raises(Fault, match=r"status 503\): busy"):
        waterfall.run(asked())
