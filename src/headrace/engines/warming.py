"""Ways to draw that an engine goes through when it starts, so that the first user does not pay for their first use."""

from __future__ import annotations

from headrace.core.request import Decay, Sampling

WARM = (
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(top_p=0.9),
    Sampling(top_k=40, min_p=0.05),
    Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    Sampling(logit_bias=((0, -1.0),), decay=Decay(10, 0.95, 0.4)),
    Sampling(temperature=0.0, logprobs=5),
    Sampling(top_p=0.9, logprobs=5),
)
"""Ways to draw, for one step of a full batch: the first use of some costs as much as a decode."""
