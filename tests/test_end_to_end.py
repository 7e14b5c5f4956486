"""The program as a user meets it: `headrace serve`, the demo model, the stock client, a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from acceptance.tiny import ALIAS, Tiny, tinies
from chromium import Browser, chromium_or_skip
from headrace.core.timeline import STAGES

QUESTION = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def start(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tiny]]:
    with tinies(demo_model, tmp_path_factory.mktemp("end")) as started:
        yield started


@pytest.fixture
def client(start: Callable[..., Tiny]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=start().url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_stock_client_streams_what_it_gets_whole(client: openai.OpenAI) -> None:
    asked = {"model": ALIAS, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "the first request left its prompt"


def test_the_stock_client_finds_the_model_and_completes(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [ALIAS]
    answer = client.completions.create(model=ALIAS, prompt="One, two,", max_tokens=6, temperature=0, n=2, logprobs=2)
    assert len(answer.choices) == 2
    assert answer.choices[0].text == answer.choices[1].text != ""
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == 6


def test_the_stock_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="served here: tiny"):
        client.chat.completions.create(model="other", messages=QUESTION)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(model=ALIAS, messages=QUESTION, temperature=3)  # type: ignore[arg-type]
    assert refused.value.param == "temperature"


def test_the_stages_of_a_real_request_add_up(start: Callable[..., Tiny]) -> None:
    body = {"model": ALIAS, "messages": QUESTION, "max_tokens": 8, "headrace": {"timings": True, "cache": False}}
    with httpx.Client(base_url=start().url, timeout=60) as web:
        timeline = web.post("/v1/chat/completions", json=body).json()["headrace"]["timeline"]
        assert sum(timeline[stage] for stage in STAGES) == pytest.approx(timeline["ttft"], abs=1.0)
        assert all(timeline[stage] >= 0 for stage in STAGES)
        assert timeline["cached_tokens"] == 0
        with web.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
            parts = dict(part.split(";dur=") for part in stream.headers["server-timing"].split(", "))
            stream.read()
    assert list(parts) == [*STAGES, "ttft"]
    assert sum(float(parts[stage]) for stage in STAGES) == pytest.approx(float(parts["ttft"]), abs=1.0)


def test_the_page_chats_in_a_browser(start: Callable[..., Tiny]) -> None:
    with Browser(chromium_or_skip()) as page:
        page.open(start().url + "/")
        page.wait(f"$('model').value === '{ALIAS}'")
        page.run("$('prompt').focus()")
        page.type("Name three colours.")
        page.press("Enter")
        page.wait("document.querySelector('.assistant .text')?.textContent.length > 5")
        page.wait("document.body.dataset.state === 'idle' && !document.querySelector('[aria-busy=true]')")
        shown = page.run("document.querySelector('.assistant').textContent")
        assert "prefill" in shown, "the answer's stages are drawn under it"
