from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_bench import gguf
from headrace_bench.fault import Fault, Misuse
from headrace_bench.lab import Lab
from headrace_bench.report import table as tables
from headrace_bench.selection import Facts, Measured
from headrace_bench.server import NotReady, Server
from headrace_bench.verbs import models
from headrace_bench.wire import Answer, Refused

FACTS = Facts(quantisation="Q8_0", parameters=10_000_000, size=10, context=1024, vocabulary=100, prefill=(100.0,))


def asked(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    models.add(parser)
    parsed = parser.parse_args(list(argv))
    parsed.verb, parsed.command = "models", ("headrace-bench", "models", *argv)
    return parsed


def test_files_have_short_names(tmp_path: Path) -> None:
    one, other = tmp_path / "x" / "a.gguf", tmp_path / "y" / "a.gguf"
    assert list(models.names([one, other, tmp_path / "b.gguf"])) == ["a", "y/a", "b"]
    with pytest.raises(Misuse, match="named twice"):
        models.names([one, one])


def test_memory_that_can_be_had(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert models.free_memory(tmp_path / "meminfo") == 50 * 1024
    assert models.free_memory(tmp_path / "none") is None


def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """The child process does `code` instead."""
    place = tmp_path / "python"
    place.write_text(f"#!{sys.executable}\nimport os, sys\n{code}\n")
    place.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(place))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ('print(\'{"error": "not a GGUF file"}\'); sys.exit(1)', "^not a GGUF file$"),
        (
            "sys.stderr.write('GGML_ASSERT(x) failed\\n'); os.abort()",
            r"died of it \(signal 6\): GGML_ASSERT\(x\) failed",
        ),
        ("os.kill(os.getpid(), 9)", r"died of it \(signal 9\): without a word"),
        ("print('{}')", r"died of it \(status 0\)"),
    ],
)
def test_whatever_a_file_does_to_the_library_is_one_line(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, tmp_path, code)
    with pytest.raises(Fault, match=why) as caught:
        models.child(tmp_path / "a.gguf", 1, 1, perplexity=True)
    assert "\n" not in str(caught.value)


class Quiet(Server):
    """Starts nothing."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        return


def answers(monkeypatch: pytest.MonkeyPatch, texts: list[str] | None = None, system: bool = True) -> list[int]:
    """A model to which a word is a token, and a template of 20; the lengths that it was asked, in order.

    Its template takes a system message, or does not.
    """
    asked_texts = [] if texts is None else texts
    seen: list[int] = []

    async def chat(_url: str, body: dict[str, Any]) -> Answer:
        if not system and body["messages"][0]["role"] == "system":
            raise Refused("HTTP 400")
        tokens = 20 + sum(len(re.findall(r"\w+", message["content"])) for message in body["messages"])
        seen.append(tokens)
        asked_texts.append(body["messages"][0]["content"])
        n = body["max_tokens"]
        return Answer([tokens / 1000 + i / 100 for i in range(n)], ["x"] * n, n, tokens)

    monkeypatch.setattr(models, "chat", chat)
    monkeypatch.setattr(
        Lab, "headrace", lambda self, *_, name: Quiet(name, [], url="", ready="", log=self.folder / "l")
    )
    return seen


def test_models_take_turns_and_a_bad_one_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("a.gguf", "bad.gguf", "b.gguf")]
    for file in files:
        file.touch()
    turns: list[tuple[str, bool]] = []

    def facts(file: Path, _threads: int, _seed: int, *, perplexity: bool) -> Facts:
        turns.append((file.stem, perplexity))
        if file.stem == "bad":
            raise Fault("llama.cpp cannot load it: torn")
        return FACTS

    monkeypatch.setattr(models, "child", facts)
    answers(monkeypatch)
    out = tmp_path / "out"
    assert models.run(asked(*map(str, files), "--rounds", "3", "--out", str(out))) == 1
    assert turns == [
        *(("a", True), ("bad", True), ("b", True)),
        *(("b", False), ("a", False)),
        *(("a", False), ("b", False)),
    ]
    table = tables.read(out)
    assert [row[0] for row in table.rows] == ["a", "b"]
    # The context of 1,024 tokens does not hold the longest prompt; a time is the prompt's tokens in ms.
    assert table.rows[0][4:9] == ("100 (?–?)", "64 (64–64)", "512 (512–512)", "–", "10.00 ± 0.00")
    assert table.notes[-3:] == (
        "a: no TTFT at 2,048: its context has 1,024 tokens",
        "bad: llama.cpp cannot load it: torn",
        "b: no TTFT at 2,048: its context has 1,024 tokens",
    )
    assert f"{files[1]}: llama.cpp cannot load it: torn" in capsys.readouterr().err


@pytest.mark.parametrize("system", [True, False])
def test_every_prompt_is_new_from_its_first_word(system: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts: list[str] = []
    seen = answers(monkeypatch, texts, system)
    lab = Lab(tmp_path / "a.gguf", tmp_path)
    model = Measured("a")
    server = Quiet("a", [], url="", ready="", log=tmp_path / "l")
    models._ask(server, lab, model, 8192, random.Random(1))
    assert seen[-10:-3] == [64, 64, 64, 512, 512, 2048, 2048]
    assert {n: len(times) for n, times in model.ttft.items()} == models.REPEATS
    assert len(model.tpot) == models.ANSWERS
    assert len(set(texts)) == len(texts)


def test_a_server_that_does_not_start_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(models, "child", lambda *_, **__: FACTS)

    def refuse(self: Lab, *_: str, name: str) -> Server:
        raise NotReady(f"{name} did not become ready:\nout of memory")

    monkeypatch.setattr(Lab, "headrace", refuse)
    assert models.run(asked(str(tmp_path / "a.gguf"), "--out", str(tmp_path / "out"))) == 1
    assert "a: headrace serve: headrace-a did not become ready: out of memory" in tables.read(tmp_path / "out").notes


@pytest.mark.parametrize(
    "odd", [ValueError("144 words are 9 tokens"), KeyError("usage"), ZeroDivisionError(), TimeoutError()]
)
def test_an_odd_model_is_a_line_and_the_others_go_on(
    odd: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.gguf", "odd.gguf", "b.gguf"):
        (tmp_path / name).touch()
    monkeypatch.setattr(models, "child", lambda *_, **__: FACTS)
    answers(monkeypatch)
    plain = models._ask

    def ask(server: Server, lab: Lab, *more: Any) -> None:
        if lab.model.stem == "odd":
            raise odd
        plain(server, lab, *more)

    monkeypatch.setattr(models, "_ask", ask)
    files = [str(tmp_path / name) for name in ("a.gguf", "odd.gguf", "b.gguf")]
    out = tmp_path / "out"
    assert models.run(asked(*files, "--rounds", "1", "--out", str(out), "--serve-args=--key SECRET")) == 1
    table = tables.read(out)
    assert [row[0] for row in table.rows][:1] == ["a"]
    assert "b" in [row[0] for row in table.rows]
    (line,) = [note for note in table.notes if note.startswith("odd: headrace serve: ")]
    assert len(line) > len("odd: headrace serve: ")
    assert table.command == "headrace-bench models a.gguf odd.gguf b.gguf --rounds 1 --out DIR '--serve-args=--key …'"


def test_an_answer_in_one_piece_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch)
    plain: Any = vars(models)["chat"]

    async def at_once(url: str, body: dict[str, Any]) -> Answer:
        answer = await plain(url, body)
        return Answer([answer.stamps[0]] * len(answer.stamps), answer.texts, answer.tokens, answer.prompt_tokens)

    monkeypatch.setattr(models, "chat", at_once)
    model = Measured("a")
    server = Quiet("a", [], url="", ready="", log=tmp_path / "l")
    models._ask(server, Lab(tmp_path / "a.gguf", tmp_path), model, 8192, random.Random(1))
    assert model.tpot == []
    assert model.ttft


def test_none_can_be_measured(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="none of the files"):
        models.run(asked(str(tmp_path / "none.gguf"), "--out", str(tmp_path / "out")))
    assert "none: no such file" in tables.read(tmp_path / "out").notes


def test_a_model_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(bytes(2000))
    monkeypatch.setattr(models, "free_memory", lambda: 1000)
    with pytest.raises(Fault, match="none of the files"):
        models.run(asked(str(tmp_path / "a.gguf"), "--out", str(tmp_path / "out")))
    assert "do not fit into" in tables.read(tmp_path / "out").notes[-1]


def test_the_child_is_the_only_one_with_the_library() -> None:
    assert "llama_cpp" not in vars(gguf)
