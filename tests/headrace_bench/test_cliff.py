"""What the batches of a step are; the library itself is not asked."""

from __future__ import annotations

from headrace_bench.cliff import SPARE, TILE, Row, measure, ways


def test_the_ways_compute_the_same_rows() -> None:
    for rows in (8, 64, 128):
        found = ways(3, 300, 1024, rows)
        assert ("padded" in found) == (rows < TILE)
        wanted = sorted(found["together"][0])
        assert sorted(row for batch in found["apart"] for row in batch) == wanted
        if "padded" in found:
            assert len(found["padded"][1]) == TILE
            assert sorted(row for batch in found["padded"] for row in batch if row[0] != SPARE) == wanted


class Books:
    """Steps that take a millisecond a row; keeps what each sequence holds."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def step(self, rows: list[Row]) -> float:
        for sequence, position, _ in rows:
            assert position == self.held.get(sequence, 0), "no position is left out or computed twice"
            self.held[sequence] = position + 1
        return len(rows) / 1000

    def forget(self, sequence: int, length: int) -> None:
        self.held[sequence] = min(length, self.held.get(sequence, 0))


def test_every_measurement_begins_with_the_same_kv() -> None:
    books = Books()
    lines = list(measure(books, 2, 100, [0, 300]))  # type: ignore[arg-type]
    assert lines[0] == "2 readers of 100, 8 rows at depth 0: together 10, apart 10, padded 66"
    assert len(lines) == 12
    assert books.held == {1: 100, 2: 100, 0: 300, SPARE: 0}
