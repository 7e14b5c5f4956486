from __future__ import annotations

import msgspec

from headrace.core.request import (
    BATCH,
    ChatRequest,
    CompletionRequest,
    Decay,
    Generation,
    Message,
    Options,
    Sampling,
    SamplingDefaults,
)


def test_a_generation_crosses_processes_unchanged() -> None:
    sampling = Sampling(0.5, 0.9, 40, 0.1, 1.1, 0.2, 0.3, ((5, -100.0), (7, 1.5)), 2**63 - 1, 20, Decay(10, 0.95, 0.4))
    generation = Generation(7, [1, 2, 3], 9, 4, ("a", "é\n"), sampling, False, BATCH, 0.8, "t", ((4, 5), None, (), ()))
    packed = msgspec.msgpack.encode(generation)
    assert msgspec.msgpack.decode(packed, type=Generation) == generation


def test_defaults_are_plain_sampling_of_one_choice() -> None:
    generation = Generation(1, [1], 1)
    assert (generation.n, generation.stop, generation.cache) == (1, (), True)
    s = generation.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.logprobs) == (1.0, 1.0, 0, 0.0, None)
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty, s.logit_bias) == (1.0, 0.0, 0.0, ())


def test_requests_do_not_share_what_can_change() -> None:
    assert Message("user", "a").fields is not Message("user", "a").fields
    chat = ChatRequest("m", (Message("user", "hi"),), Options())
    completion = CompletionRequest("m", ("hi", (1, 2)), False, False, Options(max_tokens=0))
    assert chat.options.sampling == completion.options.sampling == Sampling()


def test_defaults_fill_each_others_gaps_field_by_field() -> None:
    file, catalogue = SamplingDefaults(temperature=0.0, top_k=40), SamplingDefaults(temperature=0.2, top_p=0.9)
    assert file.over(catalogue) == SamplingDefaults(temperature=0.0, top_p=0.9, top_k=40)
    assert catalogue.over(file) == SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40)
    assert SamplingDefaults().over(file) == file
    assert file.over(catalogue).sampling() == Sampling(temperature=0.0, top_p=0.9, top_k=40)
    assert SamplingDefaults().sampling() == Sampling(), "nobody said anything: OpenAI's"
