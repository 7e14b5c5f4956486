from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

from headrace_bench.lab import Lab, Programs, server_py_config, words

ROOT = Path(__file__).parents[2]
MODEL = Path("/models/Demo.Q4.gguf")


def test_the_peers_that_are_there(tmp_path: Path) -> None:
    assert not Lab(MODEL, tmp_path).peers()
    assert list(Lab(MODEL, tmp_path, Programs(server_py=Path("s.py"))).peers()) == ["server.py"]
    both = Lab(MODEL, tmp_path, Programs(Path("/p/llama-server"), Path("s.py")))
    assert list(both.peers()) == ["llama-server", "llama-server-tuned", "server.py"]


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
    assert written == server_py_config(MODEL, written["server"]["port"], 3)
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


def test_words_are_the_same_for_a_seed() -> None:
    assert words(random.Random(1), 5) == words(random.Random(1), 5)
    assert len(words(random.Random(1), 900).split()) == 900
