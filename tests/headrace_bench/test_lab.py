from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

from headrace_bench.lab import Lab, Programs, words
from headrace_bench.peers import example_server

ROOT = Path(__file__).parents[2]
MODEL = Path("/models/Demo.Q4.gguf")


def test_the_peers_that_are_there(tmp_path: Path) -> None:
    assert not Lab(MODEL, tmp_path).peers()
    assert list(Lab(MODEL, tmp_path, Programs(server_py=Path("s.py"))).peers()) == ["server.py"]
    both = Lab(MODEL, tmp_path, Programs(Path("/p/llama-server"), Path("s.py")))
    assert list(both.peers()) == ["llama-server", "llama-server-tuned", "server.py"]
    python = Path("/p/python")
    assert list(Lab(MODEL, tmp_path, Programs(python_server=python)).peers()) == ["llama_cpp.server"]
    assert not Lab(MODEL, tmp_path, Programs(vllm=python)).peers(), "without weights there is nothing to start"
    assert list(Lab(MODEL, tmp_path, Programs(vllm=python, vllm_weights=tmp_path)).peers()) == ["vllm"]


def test_vllm_gets_the_weights_and_its_cores(tmp_path: Path) -> None:
    lab = Lab(MODEL, tmp_path, Programs(vllm=Path("/p/python"), vllm_weights=Path("/w")), threads=1)
    server = lab.vllm()
    assert server.command[:6] == [
        "/p/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/w",
        "--served-model-name",
    ]
    assert "," not in server.env["VLLM_CPU_OMP_THREADS_BIND"]
    assert server.env["HF_HUB_OFFLINE"] == "1"


def test_the_own_server_of_llama_cpp_python(tmp_path: Path) -> None:
    server = Lab(MODEL, tmp_path, Programs(python_server=Path("/p/python")), threads=3).python_server()
    text = " ".join(server.command)
    assert text.startswith(f"/p/python -m llama_cpp.server --model {MODEL} --model_alias Demo.Q4 ")
    assert text.endswith("--n_threads 3 --n_threads_batch 3 --interrupt_requests false --logits_all false")


def test_llama_server_is_its_defaults_and_the_threads(tmp_path: Path) -> None:
    peers = Lab(MODEL, tmp_path, Programs(Path("/p/llama-server")), threads=3).peers()
    plain, tuned = (peers[name]() for name in ("llama-server", "llama-server-tuned"))
    port = plain.url.rpartition(":")[2]
    place = ["--host", "127.0.0.1", "--port", port]
    assert plain.command == ["/p/llama-server", "-m", str(MODEL), *place, "-t", "3", "-tb", "3"]
    assert tuned.command[7:] == "-t 3 -tb 3 -b 128 -ub 128 -np 16 -kvu --no-cache-idle-slots".split()
    assert tuned.name == "llama-server-tuned"


def test_server_py_gets_a_file(tmp_path: Path) -> None:
    lab = Lab(MODEL, tmp_path, Programs(server_py=Path("/p/server.py"), peer_python=Path("/p/python")), threads=3)
    server = lab.server_py()
    config = tmp_path / "server.py.json"
    assert (server.command[0], server.command[-3:]) == ("/p/python", ["/p/server.py", "-C", str(config)])
    written = json.loads(config.read_text())
    assert written == example_server.config(MODEL, "Demo.Q4", written["server"]["port"], 3)
    assert server.url.endswith(f":{written['server']['port']}")
    assert written["model"]["n_batch"] == 128
    assert written["model"]["threads"] == written["model"]["threads_batch"] == 3


def test_ours_starts_with_an_empty_disk(tmp_path: Path) -> None:
    lab = Lab(MODEL, tmp_path, threads=3)
    one, other = lab.headrace("--set", "engine.cells=16000"), lab.headrace()
    found = [re.search(r"tiers\.ssd_path=(\S+)", " ".join(server.command)) for server in (one, other)]
    folders = [Path(match[1]) for match in found if match]
    assert len(set(folders)) == 2
    for folder in folders:
        assert not list(folder.iterdir())
        shutil.rmtree(folder)
    assert one.command[-1] == "engine.cells=16000"
    assert f"tiers.ssd_path={tmp_path}" in lab.headrace(ssd=tmp_path).command


def test_ours_serves_the_file_that_the_table_names(tmp_path: Path) -> None:
    command = Lab(MODEL, tmp_path).headrace("--set", "model.tuned=true", ssd=tmp_path).command
    assert command.index("model.tuned=false") < command.index("model.tuned=true"), "the later one wins"


def test_ours_by_itself_has_a_cache_of_its_own_and_no_threads(tmp_path: Path) -> None:
    lab = Lab(MODEL, tmp_path, threads=3, cache=tmp_path / "cache")
    server = lab.headrace(ssd=tmp_path)
    assert server.env == {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert not [word for word in server.command if "tuned" in word or "threads" in word]
    other = lab.headrace(ssd=tmp_path, name="headrace-off")
    assert other.env == {}
    assert {"model.tuned=false", "engine.threads=3"} <= set(other.command)


def test_peers_may_serve_another_file_under_the_same_name(tmp_path: Path) -> None:
    python = Path("/p/python")
    programs = Programs(Path("/p/llama-server"), Path("s.py"), python, python)
    lab = Lab(MODEL, tmp_path, programs, peers_model=Path("/models/Demo.BF16.gguf"))
    assert "/models/Demo.BF16.gguf" in lab.llama_server().command
    text = " ".join(lab.python_server().command)
    assert "--model /models/Demo.BF16.gguf --model_alias Demo.Q4 " in text
    lab.server_py()
    assert json.loads((tmp_path / "server.py.json").read_text())["model"]["alias"] == "Demo.Q4"
    assert str(MODEL) in lab.headrace(ssd=tmp_path).command


def test_words_are_the_same_for_a_seed() -> None:
    assert words(random.Random(1), 5) == words(random.Random(1), 5)
    assert len(words(random.Random(1), 900).split()) == 900
