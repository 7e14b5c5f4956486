from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_bench.fault import Misuse
from headrace_bench.load import traces
from headrace_bench.load.traces import Row

PUBLISHED = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.6805900,374,44
2023-11-17 00:00:00.9951690,396,109
"""


def test_azure_as_published(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(PUBLISHED)
    first, second = traces.requests(str(tmp_path / "a.csv"))
    assert (first.at, first.prompt, first.answer) == (0.0, 374, 44)
    assert second.at == pytest.approx(1.314579, abs=1e-6)


def test_azure_with_a_zone_and_windows_lines(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00.5+00:00,3,4", "2024-05-10 00:00:02Z,5,6"]
    (tmp_path / "a.csv").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert traces.requests(str(tmp_path / "a.csv")) == (Row(0.0, 3, 4), Row(1.5, 5, 6))


def test_azure_reduced(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("arrival_s,context_tokens,generated_tokens\n3.5,1,2\n4.25,3,4\n")
    assert traces.requests(str(tmp_path / "a.csv")) == (Row(0.0, 1, 2), Row(0.75, 3, 4))


def test_mooncake(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 600, "output_length": 7, "hash_ids": [0, %d], "more": 1}'
    (tmp_path / "m.jsonl").write_text(f"{line % (3000, 1)}\n\n{line % (6000, 2)}\n")
    assert traces.requests(str(tmp_path / "m.jsonl")) == (Row(0.0, 600, 7, (0, 1)), Row(3.0, 600, 7, (0, 2)))


def test_rates(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("window_start_s,rate_rps,active_clients\n0,1.5,3\n600,0,0\n")
    assert traces.rates(str(tmp_path / "r.csv")) == ((0.0, 1.5), (600.0, 0.0))


def test_lengths_by_any_of_their_names(tmp_path: Path) -> None:
    for names in ("num_prefill_tokens,num_decode_tokens", "ContextTokens,GeneratedTokens"):
        (tmp_path / "l.csv").write_text(f"{names}\n10,20\n")
        assert traces.lengths(str(tmp_path / "l.csv")) == ((10, 20),)


def test_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": 1, "turns": ["a", "b"]}\n{"turns": ["c"]}\n')
    assert traces.prompts(str(tmp_path / "p.jsonl")) == (("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("read", "content", "why"),
    [
        (traces.requests, "", "it is empty"),
        (traces.requests, "arrival_s,context_tokens,generated_tokens\n", "nothing below its column names"),
        (traces.requests, "a,b\n1,2\n", "no column is called arrival_s or TIMESTAMP; there are a, b"),
        (traces.requests, "arrival_s,context_tokens,generated_tokens\n1,2,3\nx,2,3\n", "line 3: arrival_s is 'x'"),
        (traces.requests, "arrival_s,context_tokens,generated_tokens\n1,2\n", "line 2: generated_tokens is None"),
        (traces.requests, "arrival_s,context_tokens,generated_tokens\n5,2,3\n1,2,3\n", "request 2 came before"),
        (traces.requests, '{"timestamp": 1}\n', "line 1: Object missing required field `input_length`"),
        (traces.rates, "window_start_s,rate_rps\n0,1\n", "two windows or more"),
        (traces.rates, "window_start_s,rate_rps\n0,1\n0,2\n", "two windows or more"),
        (traces.rates, "window_start_s,rate_rps\n0,-1\n1,2\n", "rates are 0 or more"),
        (traces.rates, "window_start_s,rate_rps\n0,0\n1,0\n", "one of them has to be"),
        (traces.lengths, "input_tokens,output_tokens\n0,2\n", "prompts of 1 token and more"),
        (traces.prompts, '{"turns": []}\n', "a message or more"),
        (traces.prompts, "[]\n", "line 1"),
        (traces.prompts, "\n", "a message or more"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(
    read: Callable[[str], object], content: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    with pytest.raises(Misuse) as told:
        read(str(path))
    assert str(path) in str(told.value)
    assert why in str(told.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="No such file"):
        traces.requests(str(tmp_path / "none.csv"))
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Misuse, match="not UTF-8"):
        traces.requests(str(tmp_path / "b"))
