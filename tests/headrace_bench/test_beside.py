from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_bench import beside

NEUTRAL = """
import argparse, asyncio, json, random

class Client:
    def __init__(self):
        self.asked = []

    async def chat(self, system, user, max_tokens, hang_up_after=None):
        self.asked.append((system, user, max_tokens))
        return [12.34, 20.0]

class Lab:
    def __init__(self, client, seed, seconds):
        self.c, self.rng = client, random.Random(seed)

    def text(self, n):
        return " ".join(str(self.rng.random()) for _ in range(n))

async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    asked = parser.parse_args()
    print(json.dumps({name: await getattr(Lab(Client(), 1, 1), name)() for name in asked.only.split(",")}))
"""


@pytest.fixture
def peerload(tmp_path: Path) -> Path:
    place = tmp_path / "peerload.py"
    place.write_text(NEUTRAL)
    return place


def test_it_asks_what_the_mixed_scenario_asks_alone_and_with_new_text(peerload: Path) -> None:
    module: Any = beside.load(peerload)
    client = module.Client()
    lab = module.Lab(client, 3, 1)
    assert asyncio.run(lab.long_alone()) == {"long_ttft": 12.3}
    asyncio.run(lab.long_alone())
    (system, first, tokens), (_, second, _) = client.asked
    assert (system, len(first.split()), tokens) == ("Summarise.", 1500, 8)
    assert first != second
    again = module.Client()
    asyncio.run(module.Lab(again, 3, 1).long_alone())
    assert again.asked[0][1] == first, "the seed makes the text"


def test_it_is_the_client_otherwise(peerload: Path) -> None:
    command = beside.client(peerload, ["mixed", "long_alone"])
    done = subprocess.run([*command, "--only", "long_alone"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"long_alone": {"long_ttft": 12.3}}
    assert beside.client(peerload, ["mixed"]) == [sys.executable, str(peerload)]


def test_another_client_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.py"
    other.write_text("def main(): pass")
    assert beside.main([str(other), "--only", "single"]) == 1
    assert beside.main([str(tmp_path / "none.py")]) == 1
    assert beside.main([]) == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert "has no Lab" in first
    assert "none.py" in second
    assert third.startswith("usage")
