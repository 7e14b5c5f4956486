"""What a model's makers say of its sampling: read from a model file, told to clients, said again to other servers.

    general.sampling.* ── read_defaults ──▶ SamplingDefaults ── Sampling ── report ──▶ `GET /v1/models`
                                                                    └────── spelt ──▶ the rest of an answer, elsewhere

Rules: a file may say what a request may say, so both are judged by the same rows; what would be refused there is not
used here, and that is said. Everywhere but in a file the names are those of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.request import Sampling, SamplingDefaults
from headrace.protocol.fields import Field, wrong
from headrace.protocol.openai import MIN_P, REPETITION_PENALTY, TEMPERATURE, TOP_K, TOP_P

_ROWS: Mapping[str, Field[float] | Field[int]] = {
    "temp": TEMPERATURE,
    "top_p": TOP_P,
    "top_k": TOP_K,
    "min_p": MIN_P,
    "penalty_repeat": REPETITION_PENALTY,
}
"""Key under `general.sampling.` → the field of a request. The rest of what llama.cpp reads there (mirostat, xtc, the
order of samplers, how far back penalties look) no request of ours can say."""
PREFIX = "general.sampling."


def read_defaults(meta: Callable[[str], str | None]) -> tuple[SamplingDefaults, tuple[str, ...]]:
    """What a file says, and a line for each thing that it says and cannot be.

    `meta`: key → the value as text, None if there is none, which is all that llama.cpp tells: a number in quotes is the
    number, as it is for llama.cpp's own programs.
    """
    said: dict[str, Any] = {}
    faults: list[str] = []
    for key, row in _ROWS.items():
        text = meta(PREFIX + key)
        if text is None:
            continue
        try:
            said[row.name] = row.parse(PREFIX + key, _number(PREFIX + key, text))
        except InvalidRequest as error:
            faults.append(error.message)
    if said.get("top_k") == -1:
        said["top_k"] = 0  # two spellings of "off"
    return SamplingDefaults(**said), tuple(faults)


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise wrong(key, "a number", text) from None


def report(sampling: Sampling) -> dict[str, float]:
    """What holds where a request is silent, for clients."""
    return {row.name: getattr(sampling, row.name) for row in _ROWS.values()}


def spelt(sampling: Sampling, *, llama_server: bool) -> dict[str, float]:
    """The same for another server's request, every field: it would put its own default for one that is left out.

    -1 is the one spelling of "no top_k" that vLLM, SGLang, llama-server and we all take.
    """
    fields = report(sampling) | {"top_k": sampling.top_k or -1}
    if llama_server:
        fields["repeat_penalty"] = fields.pop("repetition_penalty")
    return fields
