from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.core.attention import Attention
from headrace.core.costmodel import TERMS, CostModel, Work
from headrace.engines.calibration import Saved, calibration_file, load_calibration, save_calibration

SLOW = (2e-3, 9e-3, 0.0, 4e-3, 1e-6, 2e-6, 1e-9)


def test_what_was_learned_is_there_at_the_next_start(tmp_path: Path) -> None:
    file = calibration_file(tmp_path / "new" / "folder", b"e" * 16, (1, 2))
    save_calibration(file, CostModel(SLOW))
    cost = load_calibration(file, Attention())
    assert cost is not None
    assert cost.coefficients == SLOW
    assert cost.predict(Work(10, 0, 45, 10)) == CostModel(SLOW).predict(Work(10, 0, 45, 10))


def test_it_is_believed_more_than_a_guess(tmp_path: Path) -> None:
    """One odd step moves what was measured little, and the prior a lot."""
    file = tmp_path / "known.json"
    save_calibration(file, CostModel(SLOW))
    known, new = load_calibration(file, Attention()), CostModel(SLOW)
    assert known is not None
    work = Work(100, 0, 4950, 100)
    right = known.predict(work)
    for cost in (known, new):
        cost.observe(work, right * 1.5)
    assert right < known.predict(work) < new.predict(work)
    assert known.predict(work) - right < (new.predict(work) - right) * 0.8


def test_each_engine_and_each_choice_of_threads_has_its_own(tmp_path: Path) -> None:
    asked = [(b"a" * 16, (1, 2)), (b"b" * 16, (1, 2)), (b"a" * 16, (2, 2)), (b"a" * 16, (1, 1))]
    files = {calibration_file(tmp_path, engine, threads) for engine, threads in asked}
    assert len(files) == len(asked)
    assert calibration_file(tmp_path, *asked[0]) in files, "and always the same"
    assert {file.parent for file in files} == {tmp_path}


def test_each_machine_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = calibration_file(tmp_path, b"a" * 16, (1, 2))
    monkeypatch.setattr("os.cpu_count", lambda: 1234)
    more = calibration_file(tmp_path, b"a" * 16, (1, 2))
    monkeypatch.setattr("headrace.engines.machine._processor", lambda: "another one")
    assert len({here, more, calibration_file(tmp_path, b"a" * 16, (1, 2))}) == 3


def test_the_processor_s_name_may_be_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert calibration_file(tmp_path, b"a" * 16, (1, 2)).parent == tmp_path


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert load_calibration(tmp_path / "none.json", Attention()) is None
    assert load_calibration(tmp_path, Attention()) is None, "a directory is none either"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"terms": 1, "coefficients": []}',
        msgspec.json.encode(Saved((*TERMS[:-1], "weather"), SLOW)),
        msgspec.json.encode(Saved(TERMS, SLOW[:-1])),
        msgspec.json.encode(Saved(TERMS, (*SLOW, 0.0))),
        msgspec.json.encode(Saved(TERMS, (-1e-3, *SLOW[1:]))),
        msgspec.json.encode(Saved(TERMS, (1e9, *SLOW[1:]))),
        msgspec.json.encode(Saved(TERMS, (1e-3, 0.0, 0.0, 0.0, *SLOW[4:]))),
        b'{"terms": ["fixed","prefill","decode","tiled","rowwise","width"], "coefficients": [null,1,1,1,1,1]}',
        b'{"terms": ["fixed","prefill","decode","tiled","rowwise","width"], "coefficients": [1e999,1,1,1,1,1]}',
    ],
)
def test_a_file_that_cannot_be_used_counts_as_none(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(data)
    assert load_calibration(file, Attention()) is None


def test_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    save_calibration(file, CostModel(SLOW))
    save_calibration(file, CostModel())
    assert list(tmp_path.iterdir()) == [file]
    again = load_calibration(file, Attention())
    assert again is not None
    assert again.coefficients == CostModel().coefficients


def test_where_nothing_can_be_written_the_start_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    save_calibration(tmp_path / "file" / "known.json", CostModel(SLOW))
    (tmp_path / "known.json").mkdir()
    save_calibration(tmp_path / "known.json", CostModel(SLOW))
    assert (tmp_path / "file").read_bytes() == b"in the way"
