from __future__ import annotations

from pathlib import Path

import pytest

from headrace_bench.fault import Misuse
from headrace_bench.figures.summary import summarise
from headrace_bench.figures.trial import ANSWERED
from headrace_bench.recorded import pair_up
from headrace_bench.report import folder
from made_runs import A, health, record, schedule


def kept(path: Path, seed: int, ttft: float, *invalid: str, whole: bool = True) -> Path:
    asked = schedule(seed, n=10)
    records = [record(one.index, one.at or 0.0, ttft) for one in asked.requests]
    config = folder.config(verb="run", command=(), url=A.url, model=A.model, seed=seed, wall="", flags={})
    with folder.Journal(path, config, asked) as journal:
        for one in records:
            journal(one)
        if whole:
            found = health(*invalid)
            journal.finish(records, found, summarise(asked, records, found, ANSWERED))
    return path


def test_runs_that_asked_the_same_are_pairs_in_any_order(tmp_path: Path) -> None:
    a = [kept(tmp_path / f"a{seed}", seed, 0.2) for seed in (1, 2, 3)]
    b = [kept(tmp_path / f"b{seed}", seed, 0.1) for seed in (3, 1, 4)]
    found = pair_up(a, b, ANSWERED)
    assert [(one.seed, other.seed) for one, other in found.pairs] == [(1, 1), (3, 3)]
    assert [one.figures["ttft_p50"] for one, _ in found.pairs] == pytest.approx([0.2, 0.2])
    assert [other.figures["ttft_p50"] for _, other in found.pairs] == pytest.approx([0.1, 0.1])
    assert found.alone == (str(tmp_path / "a2"), str(tmp_path / "b4"))


def test_a_run_is_in_one_pair_at_most(tmp_path: Path) -> None:
    a = [kept(tmp_path / name, 1, 0.2) for name in ("a", "again")]
    found = pair_up(a, [kept(tmp_path / "b", 1, 0.1)], ANSWERED)
    assert len(found.pairs) == 1
    assert found.alone == (str(tmp_path / "again"),)


def test_what_does_not_count_is_dropped_for_both(tmp_path: Path) -> None:
    a = [kept(tmp_path / "a1", 1, 0.2, "sent late"), kept(tmp_path / "a2", 2, 0.2)]
    b = [kept(tmp_path / "b1", 1, 0.1), kept(tmp_path / "b2", 2, 0.1, whole=False)]
    found = pair_up(a, b, ANSWERED)
    assert found.pairs == ()
    assert [reasons for _, _, reasons in found.dropped] == [("sent late",), (f"{tmp_path / 'b2'} was cut short",)]


def test_a_run_says_nothing_against_itself(tmp_path: Path) -> None:
    one = kept(tmp_path / "a", 1, 0.2)
    with pytest.raises(Misuse, match="is on both sides"):
        pair_up([one], [tmp_path / "." / "a"], ANSWERED)
    with pytest.raises(Misuse, match="is given twice on a side"):
        pair_up([one, tmp_path / "b" / ".." / "a"], [tmp_path / "b"], ANSWERED)
    with pytest.raises(Misuse, match="is given twice on a side"):
        pair_up([tmp_path / "b"], [one, one], ANSWERED)
    with pytest.raises(Misuse, match="no such folder"):
        pair_up([one], [tmp_path / "b"], ANSWERED)
