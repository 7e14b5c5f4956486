"""Times that were recorded on two kinds of machine with two cores, as the timings of a whole model.

`EPYC`: AMD EPYC with AVX-512, VNNI and BF16, without AMX; the table of `docs/guides/tuning.md` (first tokens of 64, 512
and 2,048 tokens, a step of one reader and of eight), SmolLM2-135M.
`XEON`: Intel Xeon with AVX-512, BF16 and AMX, the same model. For each file, tokens a second over 128 new tokens at the
start of a prompt, and one decode there; with Q4_1, 1,536 tokens in steps of 512, and one decode behind them, with flash
attention (1,694 and 26 ms) and without (2,412 and 11.6 ms). What attention costs does not depend on the weights, so
the other files have Q4_1's. Of BF16 no rate was recorded, but that a server on it took 97 ms for what took it 46 with
Q4_1: its rate is taken to be that much lower. Steps of eight readers were not recorded: one reader's stands for them.
"""

from __future__ import annotations

from headrace.core.costmodel import positions
from headrace.core.quantisation import SOURCE
from headrace.core.timings import Timing
from headrace.core.tuning import READERS, Candidate

OWN = Candidate(SOURCE, 2, True, 512)
Timings = tuple[Timing, ...]


def _timings(short: float, token: float, position: float, one: float, deep: float, many: float) -> Timings:
    """Seconds: 64 tokens; a token of a long prompt, and what each earlier one adds; steps of one reader at the start of
    a prompt and deep in it, and of eight. What the head takes was not recorded: outputs cost nothing here."""
    steps = [
        Timing(512, start, 1, outputs=False, seconds=512 * token + position * positions(start, 512))
        for start in (0, 512, 1024)
    ]
    readers = [
        Timing(sequences, 0, sequences, outputs=outputs, seconds=seconds)
        for sequences, seconds in ((1, one), (READERS, many))
        for outputs in (True, False)
    ]
    return (
        Timing(64, 0, 1, outputs=False, seconds=short),
        *steps,
        Timing(1, 1536, 1, outputs=False, seconds=deep),
        *readers,
    )


def _epyc(short: float, page: float, document: float, one: float, many: float) -> Timings:
    """Milliseconds, as in the table."""
    few, most = positions(0, 512), positions(0, 2048)
    position = (document - 4 * page) / (most - 4 * few) / 1e3
    token = (page / 1e3 - position * few) / 512
    return _timings(short / 1e3, token, position, one / 1e3, one / 1e3, many / 1e3)


def _xeon(rate: float, decode: float, *, long: float = 1694.0, deep: float = 26.0) -> Timings:
    """Tokens a second, milliseconds. The position's price is what Q4_1 needed beyond its rate, at whatever rate."""
    position = (long / 1e3 - 1536 / 1890) / positions(0, 1536)
    return _timings(64 / rate, 1 / rate, position, decode / 1e3, deep / 1e3, decode / 1e3)


EPYC: dict[tuple[str, bool], Timings] = {
    (SOURCE, True): _epyc(199, 1820, 12028, 13.0, 56.7),
    ("bf16", True): _epyc(108, 872, 5529, 14.2, 49.4),
    ("bf16", False): _epyc(217, 1470, 6021, 16.8, 45.8),
    ("q8_0", True): _epyc(98.6, 927, 6675, 12.5, 49.0),
    ("f16", True): _epyc(138, 1220, 7756, 14.8, 50.9),
    ("q4_0", True): _epyc(85.3, 722, 5064, 10.7, 41.1),
}
"""(weights, flash attention) → timings."""

XEON: dict[tuple[str, bool], Timings] = {
    (SOURCE, True): _xeon(1890, 3.3),
    (SOURCE, False): _xeon(1890, 3.3, long=2412.0, deep=11.6),
    ("q4_0", True): _xeon(2132, 3.0),
    ("q8_0", True): _xeon(2067, 5.0),
    ("bf16", True): _xeon(1890 * 46 / 97, 5.0),
}
XEON_PLAIN: dict[tuple[str, bool], Timings] = {(SOURCE, True): _xeon(394, 5.9)}
"""Without extra buffers, and with that without AMX."""
