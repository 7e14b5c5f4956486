"""How long prompts and answers are in the world, and draws from it. Numbers only: nothing here acts.

Each table has four buckets by the length of the prompt (< 64, 64 to 256, 257 to 1,024, more tokens), and in each the
quantiles of prompts and of answers. A draw takes a bucket by its share, then one length of each kind from it: lengths
of prompt and answer are all but uncorrelated within a bucket (-0.1 to 0.0 over all), while what depends on the bucket
is kept.

Sources. Azure LLM inference traces 2023, conversation and code, first 2,000 rows of each: P. Patel et al., "Splitwise:
Efficient generative LLM inference using phase splitting", ISCA 2024, CC-BY-4.0; quantiles computed from them.
ShareGPT: lengths of 2,000 conversations, cut at 8k tokens, from project-etalon/etalon, Apache-2.0. DeepSeek-R1: length
distributions of alibaba/ServeGen, Apache-2.0, weighted by requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
QUANTILES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests whose prompts are of about one size."""

    share: float
    prompt: tuple[int, ...]
    """Tokens at `QUANTILES`."""
    answer: tuple[int, ...]


Table = tuple[Bucket, ...]

AZURE_CONV: Table = (
    Bucket(
        0.0155,
        (2, 2, 7, 10, 12, 17, 21, 26, 28, 30, 42, 51, 60, 62),
        (93, 93, 120, 130, 136, 139, 146, 152, 164, 175, 183, 234, 256, 265),
    ),
    Bucket(
        0.117,
        (64, 91, 91, 127, 167, 181, 181, 200, 203, 206, 209, 237, 243, 247),
        (12, 14, 16, 89, 153, 164, 178, 183, 202, 217, 217, 217, 325, 1000),
    ),
    Bucket(
        0.3445,
        (298, 372, 378, 389, 396, 405, 429, 890, 978, 1000, 1010, 1018, 1024, 1024),
        (18, 52, 61, 83, 91, 98, 110, 152, 393, 403, 427, 453, 577, 739),
    ),
    Bucket(
        0.523,
        (1025, 1033, 1039, 1060, 1085, 1116, 1146, 1195, 1311, 1786, 4078, 4088, 4122, 7930),
        (15, 45, 57, 98, 204, 385, 395, 401, 413, 426, 455, 522, 654, 1000),
    ),
)
AZURE_CODE: Table = (
    Bucket(
        0.054,
        (6, 10, 11, 15, 18, 25, 35, 41, 45, 50, 56, 60, 62, 63),
        (6, 7, 8, 9, 12, 14, 16, 19, 21, 33, 55, 87, 245, 777),
    ),
    Bucket(
        0.1165,
        (64, 74, 82, 94, 113, 135, 148, 162, 175, 196, 222, 244, 253, 255),
        (6, 6, 6, 8, 9, 11, 13, 15, 18, 25, 51, 66, 194, 1899),
    ),
    Bucket(
        0.2265,
        (257, 298, 334, 389, 463, 522, 675, 749, 828, 881, 928, 986, 1019, 1023),
        (6, 6, 7, 8, 10, 11, 14, 16, 23, 34, 65, 126, 286, 841),
    ),
    Bucket(
        0.603,
        (1026, 1103, 1164, 1429, 1747, 2130, 2433, 2786, 3480, 4530, 6047, 7433, 7436, 7437),
        (6, 6, 7, 8, 9, 11, 13, 15, 19, 26, 52, 87, 286, 871),
    ),
)
SHAREGPT: Table = (
    Bucket(
        0.08,
        (2, 9, 12, 16, 20, 24, 28, 33, 38, 44, 51, 55, 58, 60),
        (11, 40, 91, 198, 264, 354, 477, 539, 632, 730, 861, 894, 958, 1021),
    ),
    Bucket(
        0.0795,
        (64, 68, 73, 82, 97, 111, 129, 146, 174, 203, 225, 242, 253, 256),
        (15, 32, 64, 97, 181, 303, 463, 534, 606, 654, 766, 876, 965, 1015),
    ),
    Bucket(
        0.195,
        (260, 292, 339, 420, 482, 561, 642, 709, 796, 879, 949, 989, 1016, 1023),
        (2, 50, 69, 147, 227, 305, 384, 455, 542, 620, 776, 868, 999, 1019),
    ),
    Bucket(
        0.6455,
        (1033, 1193, 1345, 1689, 2106, 2557, 3060, 3739, 4352, 5257, 6392, 7014, 7568, 7952),
        (2, 51, 110, 214, 288, 347, 412, 487, 576, 682, 857, 932, 993, 1021),
    ),
)
R1_QUANTILES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99, 0.999)
R1_PROMPT = (9, 13, 18, 29, 57, 113, 208, 266, 406, 748, 1165, 2092, 6714, 23423, 33783)
R1_ANSWER = (141, 225, 287, 387, 470, 582, 792, 1104, 1367, 1680, 2196, 3432, 5701, 12607, 20833)
"""Reasoning included: 70 % of it on average."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What real lengths are made into, for a small model: divided by `scale`, then cut."""

    scale: float = 8.0
    max_in: int = 512
    max_out: int = 128

    def fit(self, prompts: Tokens, answers: Tokens, least_in: int = 4, least_out: int = 2) -> tuple[Tokens, Tokens]:
        """Lengths to be asked for. At least four words, that no two prompts need be the same, and two tokens."""
        small_in = np.rint(prompts / self.scale).astype(np.int64)
        small_out = np.rint(answers / self.scale).astype(np.int64)
        return np.clip(small_in, least_in, self.max_in), np.clip(small_out, least_out, self.max_out)

    def note(self, what: str) -> str:
        """A line for the report."""
        return f"{what}: lengths {self._scaled()}, prompts cut at {self.max_in} tokens, answers at {self.max_out}"

    def note_answers(self, what: str) -> str:
        """The same where only answers are made to fit."""
        return f"{what}: lengths {self._scaled()}, cut at {self.max_out} tokens"

    def _scaled(self) -> str:
        return "not scaled" if self.scale == 1 else f"divided by {self.scale:g}"


def mixed(rng: np.random.Generator, tables: Sequence[Table], count: int) -> tuple[Tokens, Tokens]:
    """`count` pairs (prompt, answer) in tokens, each from one of `tables`, all as likely."""
    which = rng.integers(0, len(tables), count)
    buckets = [bucket for table in tables for bucket in table]
    first = np.cumsum([0, *(len(table) for table in tables)])
    place = np.empty(count, dtype=np.int64)
    for number, table in enumerate(tables):
        mine = which == number
        shares = np.array([bucket.share for bucket in table])
        place[mine] = first[number] + rng.choice(len(table), size=int(mine.sum()), p=shares / shares.sum())
    return _within(rng, buckets, place)


def reasoning(rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
    """`count` pairs of DeepSeek-R1's, drawn apart: the source has no pairs."""
    prompts = np.interp(rng.random(count), R1_QUANTILES, R1_PROMPT)
    answers = np.interp(rng.random(count), R1_QUANTILES, R1_ANSWER)
    return np.rint(prompts).astype(np.int64), np.rint(answers).astype(np.int64)


def resampled(
    rng: np.random.Generator, pairs: Sequence[tuple[int, int]], count: int
) -> tuple[Tokens, Tokens]:  # fmt: skip
    """`count` of the given pairs, with replacement."""
    found = np.asarray(pairs, dtype=np.int64)[rng.integers(0, len(pairs), count)]
    return found[:, 0], found[:, 1]


def only(table: Table, *places: int) -> Table:
    """Some of its buckets; a share counts among those that are left."""
    return tuple(table[place] for place in places)


def _within(rng: np.random.Generator, buckets: Sequence[Bucket], place: Tokens) -> tuple[Tokens, Tokens]:
    """A pair from the bucket at each of `place`, by the inverse of its distribution, straight between quantiles."""
    at_prompt, at_answer = rng.random(place.size), rng.random(place.size)
    prompts, answers = np.empty(place.size), np.empty(place.size)
    for number, bucket in enumerate(buckets):
        mine = place == number
        prompts[mine] = np.interp(at_prompt[mine], QUANTILES, bucket.prompt)
        answers[mine] = np.interp(at_answer[mine], QUANTILES, bucket.answer)
    return np.rint(prompts).astype(np.int64), np.rint(answers).astype(np.int64)
