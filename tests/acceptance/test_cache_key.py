"""OC-42: what shapes KV is never shared between settings.

Here a cache lives and dies with its engine, so engines side by side in one process, and one after another over one
file, are what could go wrong. Adapters, rope scaling, the fingerprint in the keys (a hash of the weights, not a file
name), a common directory and Redis come with the KV tiers.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from acceptance.asking import Answer, on_loop
from acceptance.recorded import Recorded, recorded
from headrace.core.sequence import common_prefix
from headrace.gateway.model import ServedModel
from headrace.protocol.chat_template import ChatTemplate, PieceEncoder

MESSAGES = [
    {"role": "system", "content": "You are a lighthouse keeper who answers in one short sentence."},
    {"role": "user", "content": "What did you see last night?"},
]
ASKED: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
OFF = {"prefix_cache": False}
ROPE = b"llama.rope.freq_base"


def other_model(path: Path) -> None:
    """Make it another model with the same name, size and tokenizer, and with other states: its rope base is changed."""
    with path.open("r+b") as file:
        at = file.read(2**20).index(ROPE) + len(ROPE)
        file.seek(at)
        kind, base = struct.unpack("<If", file.read(8))
        assert (kind, base) == (6, 100_000.0)
        file.seek(at)
        file.write(struct.pack("<If", kind, base / 20))


async def ask(server: Recorded, model: str, **fields: Any) -> Answer:
    answer = await server.chat(model=model, **{**ASKED, **fields})
    assert answer.status == 200
    return answer


def cached(answer: Answer) -> int:
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.real
@on_loop
async def test_oc_42_engines_side_by_side(demo_model: Path, tmp_path: Path) -> None:
    other = tmp_path / demo_model.name
    shutil.copyfile(demo_model, other)
    other_model(other)
    settings: dict[str, dict[str, Any]] = {"a": {}, "q8": {"kv_type": "q8_0"}, "b": {"path": other}}
    settings |= {f"{name} off": {**fields, **OFF} for name, fields in settings.items()}
    models = {name: {"cells": 1024, **fields} for name, fields in settings.items()}
    async with recorded(demo_model, models) as server:
        texts: dict[str, str] = {}
        for _ in range(2):
            for name in ("a", "q8", "b"):
                answer = await ask(server, name)
                if name in texts:
                    # The second time each finds its own: the cache was on all the while.
                    assert cached(answer) == answer.usage["prompt_tokens"] - 1
                    assert answer.text == texts[name]
                else:
                    assert cached(answer) == 0
                    texts[name] = answer.text
                    alone = await ask(server, f"{name} off")
                    assert cached(alone) == 0
                    assert alone.text == answer.text
        assert texts["a"] != texts["b"], "the other model must answer differently"
        assert all(texts.values())


@pytest.mark.real
@on_loop
async def test_oc_42_a_file_that_changes_under_its_name(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(demo_model, path)
    texts = []
    for changed in (False, True):
        if changed:
            other_model(path)
        async with recorded(path, {"m": {"cells": 1024}, "m off": {"cells": 1024, **OFF}}) as server:
            answer = await ask(server, "m")
            assert cached(answer) == 0
            assert (await ask(server, "m off")).text == answer.text
            texts.append(answer.text)
    assert texts[0] != texts[1]


OTHER_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant:\n"
)


@pytest.mark.real
@on_loop
async def test_oc_42_templates_and_bos_on_one_engine(demo_model: Path) -> None:
    """What only shapes the prompt is in its ids: a prefix is shared as far as they are equal, and not further."""
    off = {"cells": 1024, **OFF}
    async with recorded(demo_model, {"a": {"cells": 1024}, "a off": off}) as server:
        for name in ("a", "a off"):
            engine = server.models[name].engine
            template = ChatTemplate(
                OTHER_TEMPLATE, control=engine.info.control, bos=engine.info.bos, eos=engine.info.eos
            )
            encoder = PieceEncoder(server.vocabulary, max_bytes=0)
            server.models[f"{name}, other template"] = ServedModel(engine, server.vocabulary, template, encoder)
        bos = server.recorders["a"].info.bos
        assert bos is not None
        ids = server.vocabulary.encode("It was a dark and stormy night, and the keeper", special=False)

        for template_name in ("", ", other template"):
            answer = await ask(server, f"a{template_name}")
            check(server, cached(answer))
            assert answer.text == (await ask(server, f"a off{template_name}")).text
        for prompt in (ids, [bos, *ids], [bos, bos, *ids]):
            raw: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 8}
            answer = await server.comp(model="a", **raw)
            assert answer.status == 200
            check(server, cached(answer))
            assert answer.text == (await server.comp(model="a off", **raw)).text
        assert len({tuple(prompt) for prompt in server.prompts}) == 5
        # Each finds its own, whole.
        assert cached(await server.comp(model="a", prompt=ids, max_tokens=1)) == len(ids) - 1


def check(server: Recorded, tokens: int) -> None:
    """The newest prompt has at most what it has in common with an earlier one."""
    *earlier, newest = server.prompts
    sequences = [server.recorders[server.model].sequences[tuple(prompt)] for prompt in earlier]
    assert tokens <= max((common_prefix(newest, sequence) for sequence in sequences), default=0)
