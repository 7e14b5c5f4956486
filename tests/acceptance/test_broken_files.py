"""Files that cannot be served, or hardly: one line each, never a traceback, never a hang. OC-68, OC-74, OC-84, OC-86.

python tests/acceptance/test_broken_files.py SEEDS      a longer sweep over damaged metadata, by hand
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_gguf import ARRAY, BOOL, F32, I32, TEXT, TOKENS, U32, encoded, keys, tiny_gguf, weights

pytestmark = pytest.mark.real

PATIENCE = 60.0
ONE_RUNG = ("engine.extra_buffers=false", "engine.flash_attention=false", "engine.threads=1", "engine.threads_batch=1")
"""Nothing plainer is left to try: a start that ends in a signal ends at once."""
SMALL = ("engine.cells=512", "engine.max_running=4", "engine.slots=4", "model.measure=false")

# The double of a library that was built wrongly: its kernels for weights laid out anew crash.
CRASHING = """
import os, signal, sys
if "headrace.engines.worker" in sys.orig_argv:
    import headrace.engines.llama as engine
    whole = engine.LlamaEngine._make_batch
    def make_batch(self):
        if self._extra:
            os.kill(os.getpid(), signal.SIGSEGV)
        whole(self)
    begin = engine.LlamaEngine.__init__
    def init(self, settings, clock):
        self._extra = settings.extra_buffers
        begin(self, settings, clock)
    engine.LlamaEngine._make_batch, engine.LlamaEngine.__init__ = make_batch, init
"""


class Started:
    """A `headrace serve` that has said Ready, or has ended."""

    def __init__(self, model: Path, folder: Path, settings: tuple[str, ...], *flags: str, path: str = "") -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environ |= {"XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (path, environ.get("PYTHONPATH"))))
        self._errors = folder / "stderr"
        words = [sys.executable, "-m", "headrace", "serve", os.fspath(model), "--port=0", *flags]
        with self._errors.open("wb") as stream:
            self.process = subprocess.Popen(
                [*words, *(f"--set={text}" for text in (*SMALL, *settings))],
                stdout=subprocess.PIPE,
                stderr=stream,
                env=environ,
            )
        assert self.process.stdout is not None
        self.url = ""
        for line in self.process.stdout:
            if found := re.search(rb"Chat page\s+(http://\S+)/\s*$", line):
                self.url = found[1].decode()
                break

    @property
    def log(self) -> str:
        return self._errors.read_bytes().decode()

    def get(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            text = response.read()
        return json.loads(text) if "json" in response.headers["content-type"] else text.decode()

    def close(self) -> int:
        assert self.process.stdout is not None
        try:
            if self.url:
                self.process.send_signal(signal.SIGTERM)
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.stdout.close()
            self.process.wait()


@contextlib.contextmanager
def served(model: Path, folder: Path, *settings: str, flags: tuple[str, ...] = (), path: str = "") -> Iterator[Started]:
    server = Started(model, folder, settings, *flags, path=path)
    try:
        assert server.url, server.log
        yield server
    finally:
        code = server.close()
    assert code == 0, server.log
    assert "Traceback" not in server.log


def refused(model: Path, folder: Path, *settings: str) -> str:
    """The one line with which it is not served."""
    server = Started(model, folder, settings)
    code = server.close()
    assert not server.url, "it is served"
    assert code == 2, server.log
    lines = [line for line in server.log.splitlines() if line]
    last = [line for line in lines if line.startswith("headrace: ")]
    assert len(last) == 1, server.log
    assert lines[-1] == last[0]
    assert not any("Traceback" in line or "libggml" in line for line in lines), server.log
    # What else there is says that plainer kernels are tried.
    assert all("loading" in line or "trying again" in line for line in lines[:-1]), server.log
    return last[0]


def completion(server: Started, **fields: Any) -> Any:
    alias = server.get("/v1/models")["data"][0]["id"]
    return server.get("/v1/completions", {"model": alias, "prompt": "abc", "max_tokens": 4, "temperature": 0, **fields})


def test_oc_68_a_library_whose_kernels_crash_is_started_without_them(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASHING)
    model = tiny_gguf(tmp_path / "tiny.gguf")
    with served(model, tmp_path, path=str(tmp_path)) as server:
        assert completion(server)["choices"][0]["finish_reason"] in ("length", "stop")
        streamed = completion(server, stream=True)
        assert "data: [DONE]" in streamed
        said = [line for line in server.log.splitlines() if "scripts/install" in line]
        assert len(said) == 1
        assert "SIGSEGV" in said[0]
        assert "engine.extra_buffers" in said[0]
        (engine,) = server.get("/admin/v1/engines")["engines"]
        assert engine["rung"] == "no-extra-buffers"
        assert "SIGSEGV" in engine["rung_note"]
        assert engine["healthy"]
        metrics = server.get("/metrics")
        assert re.search(r'^headrace_engine_rung\{model="tiny",rung="no-extra-buffers"\} 1.0$', metrics, re.M)
    with served(model, tmp_path, path=str(tmp_path)) as server:
        assert "trying again" not in server.log, "it begins on the rung that works"
        completion(server)


def not_finite(**changes: Any) -> Callable[[Path], Path]:
    return lambda file: tiny_gguf(file, **changes)


def bad_weights(name: str, value: float) -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        tensors = weights()
        tensors[name][:] = value
        return tiny_gguf(file, tensors)

    return make


NOT_FINITE = {
    "rope.freq_base 0": not_finite(rope__freq_base=(F32, 0.0)),
    "rope.freq_base NaN": not_finite(rope__freq_base=(F32, float("nan"))),
    "NaN in the head": bad_weights("output.weight", np.nan),
    "infinite norm": bad_weights("output_norm.weight", np.inf),
    "NaN in a layer": bad_weights("blk.1.ffn_down.weight", np.nan),
    "NaN epsilon": not_finite(attention__layer_norm_rms_epsilon=(F32, float("nan"))),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_oc_74_a_model_that_computes_nan_is_refused(tmp_path: Path, name: str) -> None:
    line = refused(NOT_FINITE[name](tmp_path / "x.gguf"), tmp_path, *ONE_RUNG)
    assert "NaN" in line or "norm" in line or "eps" in line, line


def test_oc_74_nan_that_comes_later_fails_its_request_and_is_counted(tmp_path: Path) -> None:
    tensors = weights()
    bad = TOKENS.index("<0x51>")  # Q: not among those that a warm-up computes
    tensors["token_embd.weight"][bad] = np.nan
    with served(tiny_gguf(tmp_path / "x.gguf", tensors), tmp_path) as server:
        text = completion(server)["choices"][0]["text"]
        for _ in range(3):
            with pytest.raises(urllib.error.HTTPError) as caught:
                completion(server, prompt="Q")
            body = json.loads(caught.value.read())
            caught.value.close()
            assert caught.value.code == 500
            assert body["error"]["code"] == "engine_failed"
            assert completion(server)["choices"][0]["text"] == text, "what it left behind does not break others"
        assert re.search(r'^headrace_logits_not_finite_total\{model="x"\} 3.0$', server.get("/metrics"), re.M)


def doubled(file: Path) -> Path:
    return tiny_gguf(file, tokenizer__ggml__tokens=(ARRAY, (TEXT, [*TOKENS[:-1], TOKENS[-2]])))


def several(file: Path) -> Path:
    file = file.with_name("x-00001-of-00002.gguf")
    return tiny_gguf(file, split__count=(U32, 2), split__no=(U32, 0))


def cut(file: Path) -> Path:
    data = tiny_gguf(file).read_bytes()
    file.write_bytes(data[:-5000])
    return file


def fifo(file: Path) -> Path:
    os.mkfifo(file)
    return file


def folder(file: Path) -> Path:
    file.mkdir()
    return file


def empty(file: Path) -> Path:
    file.touch()
    return file


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "doubled token": (doubled, "SIGABRT.*GGML_ASSERT"),
    "no vocabulary": (not_finite(tokenizer__ggml__model=(TEXT, "none")), "vocabulary|token_embd"),
    "no tokenizer": (not_finite(tokenizer__ggml__model=None), "tokenizer"),
    "600 blocks": (not_finite(block_count=(U32, 600)), "SIGABRT.*GGML_ASSERT"),
    "no layers": (not_finite(block_count=(U32, 0)), "GGML_ASSERT|layer"),
    "context_length 0": (not_finite(context_length=(U32, 0)), "0 tokens.*engine.context"),
    "no heads": (not_finite(head_count=(U32, 0)), "x.gguf"),
    "a negative number": (not_finite(context_length=(I32, -5)), "x.gguf"),
    "more tokens than rows": (not_finite(tokenizer__ggml__tokens=(ARRAY, (TEXT, [*TOKENS, "more"]))), "shape|scores"),
    "fewer scores": (not_finite(tokenizer__ggml__scores=(ARRAY, (F32, [0.0]))), "score|SIG|array"),
    "a part missing": (several, "x-00002-of-00002.gguf is not beside it"),
    "cut short": (cut, "is cut short: tensor"),
    "a pipe": (fifo, "no ordinary file"),
    "a directory": (folder, "directory"),
    "empty": (empty, "GGUF"),
    "an unknown kind": (not_finite(general__architecture=(TEXT, "nonsense")), "nonsense"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_oc_84_a_file_that_cannot_be_served_is_one_line(tmp_path: Path, name: str) -> None:
    make, says = BROKEN[name]
    line = refused(make(tmp_path / "x.gguf"), tmp_path, *ONE_RUNG)
    assert re.search(says, line), line


def test_oc_84_an_assertion_is_told_once_after_all_rungs(tmp_path: Path) -> None:
    line = refused(doubled(tmp_path / "x.gguf"), tmp_path)
    assert re.search(r"SIGABRT: llama-vocab.cpp:\d+: GGML_ASSERT\(.*\) failed", line), line
    assert "get it again" in line


def test_oc_84_a_name_that_is_not_utf_8_is_served(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / os.fsdecode(b"tiny-\xff.gguf"))
    with served(file, tmp_path) as server:
        assert server.get("/v1/models")["data"][0]["id"] == "tiny-_"
        completion(server)
        (engine,) = server.get("/admin/v1/engines")["engines"]
        assert engine["model"].endswith(r"tiny-\xff.gguf")
        server.get("/metrics")
    broken = tmp_path / os.fsdecode(b"broken-\xff.gguf")
    assert "GGML_ASSERT" in refused(doubled(broken), tmp_path, *ONE_RUNG)
    assert r"nowhere-\xff" in refused(tmp_path / os.fsdecode(b"nowhere-\xff.gguf"), tmp_path)


@pytest.mark.parametrize("words", [["tune"], ["templates", "--model"]])
@pytest.mark.parametrize("name", ["doubled token", "600 blocks", "cut short", "a pipe", "no tokenizer"])
def test_oc_84_other_verbs_say_it_in_one_line_too(tmp_path: Path, words: list[str], name: str) -> None:
    model = BROKEN[name][0](tmp_path / "x.gguf")
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace" / "templates.toml").write_text('[templates.a]\nsystem = "abc"\n')
    more = ["list"] if words[0] == "templates" else ["--quick", "--only=source"]
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words, str(model), *more],
        env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    if name == "600 blocks" and words[0] == "templates":
        assert done.returncode == 0, "its vocabulary is whole, and nothing else is read"
        return
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert len([line for line in done.stderr.splitlines() if line.startswith("headrace: ")]) == 1
    assert "Traceback" not in done.stderr
    assert "libggml" not in done.stderr


def test_oc_86_a_context_above_what_was_trained_is_served_with_a_warning(tmp_path: Path) -> None:
    with served(tiny_gguf(tmp_path / "x.gguf"), tmp_path, "engine.context=500") as server:
        (line,) = [line for line in server.log.splitlines() if "engine.context" in line]
        assert "WARNING" in line
        assert "500" in line
        assert "256" in line
        assert completion(server, max_tokens=400, logit_bias={"2": -100})["usage"]["completion_tokens"] == 400
    with served(tiny_gguf(tmp_path / "x.gguf"), tmp_path, "engine.context=256") as server:
        assert "engine.context" not in server.log


def test_oc_86_more_memory_than_there_is_is_refused_with_the_numbers(demo_model: Path, tmp_path: Path) -> None:
    line = refused(demo_model, tmp_path, "engine.cells=16777216")
    for part in (
        r"needs \d+\.\d GB",
        r"16777216 KV cells 386\.5 GB",
        r"\d GB are free",
        r"engine\.cells=\d+ would",
        "--anyway",
    ):
        assert re.search(part, line), line


# --- damaged metadata


def damaged(rng: random.Random) -> bytes:
    """A small model with something wrong, or only odd, in what it says of itself."""
    metadata = keys()
    for _ in range(rng.randrange(1, 3)):
        key = rng.choice(list(metadata))
        kind, value = metadata[key]
        odd: dict[int, list[Any]] = {
            U32: [0, 1, 2, 3, 31, 2**16, 2**31, 2**32 - 1],
            F32: [0.0, -1.0, float("nan"), float("inf"), 1e-30, 1e30],
            TEXT: ["", "none", "gpt2", "x" * 5000, "\udcff"],
            BOOL: [True, False],
        }
        if kind == ARRAY:
            item, items = value
            items, at = list(items), rng.randrange(len(items))
            match rng.randrange(5):
                case 0:
                    items.clear()
                case 1:
                    items.append(items[0])
                case 2:
                    items.pop()
                case 3:
                    items[at] = items[rng.randrange(len(items))]
                case _:
                    items[at] = {TEXT: "", F32: float("nan"), I32: 99}[item]
            metadata[key] = kind, (item, items)
        elif rng.random() < 0.15:
            del metadata[key]
        elif rng.random() < 0.1:
            metadata[key] = (TEXT, "text") if kind != TEXT else (U32, 5)
        else:
            metadata[key] = kind, rng.choice(odd[kind])
    return encoded(metadata, weights(layers=2))


def sweep(folder: Path, seed: int) -> str:
    """Serve one of them: "served", or the line that says why not. AssertionError for anything else."""
    place = folder / str(seed)
    place.mkdir()
    (place / "x.gguf").write_bytes(damaged(random.Random(seed)))
    server = Started(place / "x.gguf", place, ONE_RUNG)
    try:
        if server.url:
            with contextlib.suppress(urllib.error.HTTPError):
                completion(server)
    finally:
        code = server.close()
    lines = server.log.splitlines()
    assert "Traceback" not in server.log, (seed, server.log)
    assert code == (0 if server.url else 2), (seed, server.log)
    if server.url:
        return "served"
    assert sum(line.startswith("headrace: ") for line in lines) == 1, (seed, server.log)
    return lines[-1]


@pytest.mark.timeout(300)
def test_oc_84_damaged_metadata_is_served_or_refused_in_one_line(tmp_path: Path) -> None:
    for seed in range(12):
        sweep(tmp_path, seed)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        for number in range(int(sys.argv[1])):
            print(number, sweep(Path(home), number), flush=True)  # noqa: T201 - a program, run by hand
