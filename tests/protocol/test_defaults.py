from __future__ import annotations

import pytest

from headrace.core.request import Sampling, SamplingDefaults
from headrace.protocol.defaults import read_defaults, report, spelt

WHOLE = {
    "general.sampling.temp": "0.200000",
    "general.sampling.top_p": "0.900000",
    "general.sampling.top_k": "40",
    "general.sampling.min_p": "0.050000",
    "general.sampling.penalty_repeat": "1.100000",
    "general.sampling.mirostat": "2",
    "general.name": "M",
}


def test_a_file_says_what_a_request_may_say() -> None:
    assert read_defaults(WHOLE.get) == (SamplingDefaults(0.2, 0.9, 40, 0.05, 1.1), ())
    assert read_defaults(lambda key: None) == (SamplingDefaults(), ())
    assert read_defaults({"general.sampling.temp": "0.000000"}.get)[0] == SamplingDefaults(temperature=0.0)


@pytest.mark.parametrize("text", ["-1", "0", "-1.000000"])
def test_no_top_k_has_one_spelling(text: str) -> None:
    said, faults = read_defaults({"general.sampling.top_k": text}.get)
    assert (said, faults) == (SamplingDefaults(top_k=0), ())


@pytest.mark.parametrize(
    ("key", "text", "fault"),
    [
        ("temp", "-1.000000", "general.sampling.temp must be a number from 0 to 2; got -1.0"),
        ("temp", "nan", "general.sampling.temp must be a number from 0 to 2; got nan"),
        ("temp", "-nan", "general.sampling.temp must be a number from 0 to 2; got nan"),
        ("temp", "inf", "general.sampling.temp must be a number from 0 to 2; got inf"),
        ("temp", "hot", "general.sampling.temp must be a number; got a string"),
        ("temp", "", "general.sampling.temp must be a number; got an empty string"),
        ("temp", "true", "general.sampling.temp must be a number; got a string"),
        ("top_p", "7.000000", "general.sampling.top_p must be a number from 0 to 1; got 7.0"),
        ("min_p", "-0.100000", "general.sampling.min_p must be a number from 0 to 1; got -0.1"),
        ("top_k", "-2", "general.sampling.top_k must be an integer from -1 to 2147483647; got -2.0"),
        ("top_k", "1.500000", "general.sampling.top_k must be an integer from -1 to 2147483647; got 1.5"),
        ("top_k", "nan", "general.sampling.top_k must be an integer from -1 to 2147483647; got nan"),
        ("top_k", "inf", "general.sampling.top_k must be an integer from -1 to 2147483647; got inf"),
        ("top_k", "9" * 400, "general.sampling.top_k must be an integer from -1 to 2147483647; got inf"),
        ("penalty_repeat", "0.000000", "general.sampling.penalty_repeat must be a number above 0; got 0.0"),
    ],
)
def test_what_cannot_be_is_not_used_and_is_said(key: str, text: str, fault: str) -> None:
    given = {**WHOLE, f"general.sampling.{key}": text}
    said, faults = read_defaults(given.get)
    whole = {"temp": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "penalty_repeat": 1.1, key: None}
    assert said == SamplingDefaults(*whole.values()), "the others hold"  # type: ignore[arg-type]
    assert faults == (fault,)


def test_clients_are_told_all_of_it() -> None:
    assert report(Sampling(temperature=0.2, top_p=0.9, seed=7)) == {
        "temperature": 0.2, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip


def test_another_server_is_told_all_of_it_in_its_words() -> None:
    sampling = Sampling(0.2, 0.9, 40, 0.05, 1.1)
    common = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    assert spelt(sampling, llama_server=False) == {**common, "repetition_penalty": 1.1}
    assert spelt(sampling, llama_server=True) == {**common, "repeat_penalty": 1.1}
    assert spelt(Sampling(), llama_server=False)["top_k"] == -1, "0 is not a top_k everywhere"
