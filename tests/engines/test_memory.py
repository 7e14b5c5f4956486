"""The estimate against what llama.cpp takes, and against what it reports; and what is free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import StartupError
from headrace.engines import memory
from headrace.engines.gguf import read_parts
from headrace.engines.memory import Need, Wants, check_memory, estimate, free_memory, refusal
from tiny_gguf import ARRAY, F32, U32, tiny_gguf

WANTS = Wants(4096, 576, 15, 0, "f16", flash_attention=True, extra_buffers=True)

# Loads the model, computes one full batch at the end of the pool, and tells the most that it ever held.
_MEASURE = """
import sys, time
from pathlib import Path
from headrace.core.plan import Chunk
from headrace.engines.llama import LlamaEngine, LlamaSettings
path, cells, flash, kv = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", sys.argv[4]
engine = LlamaEngine(
    LlamaSettings(Path(path), "m", cells=cells, slots=15, batch=576, flash_attention=flash, kv_type=kv), time.monotonic
)
for start in range(0, 1152, 576):
    engine.step([Chunk(0, start, [5] * 576, None)])
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")))
"""


def wants(**changes: Any) -> Wants:
    return Wants(**{**{name: getattr(WANTS, name) for name in WANTS.__dataclass_fields__}, **changes})


def need(path: Path, **changes: Any) -> Need:
    return estimate(read_parts(path), wants(**changes))


@pytest.mark.real
@pytest.mark.parametrize(("cells", "flash", "kv"), [(16384, True, "f16"), (16384, True, "q8_0"), (4096, False, "f16")])
def test_the_demo_model_takes_what_is_said(demo_model: Path, cells: int, flash: bool, kv: str) -> None:
    """Between 70 and 105 %: the step's buffer is touched only as far as prompts reach."""
    words = [sys.executable, "-c", _MEASURE, str(demo_model), str(cells), str(flash), kv]
    held = int(subprocess.run(words, capture_output=True, check=True).stdout) * 1024
    said = need(demo_model, cells=cells, flash_attention=flash, kv_type=kv).total
    assert 0.70 * said <= held <= 1.05 * said


@pytest.mark.real
def test_the_parts_are_those_that_llama_cpp_reports(demo_model: Path) -> None:
    found = need(demo_model, cells=16384, slots=64, drafts=32)
    mib = 2**20
    assert found.kv == 360 * mib
    assert found.weights == pytest.approx(92.1 * mib + 29.8 * mib, rel=0.01), "the embedding may be laid out twice"
    assert (33.7 + 12.2) * mib <= found.step <= (33.7 + 12.2) * 1.2 * mib


def test_kv_follows_layers_heads_and_type(tmp_path: Path) -> None:
    per = 2 * 2 * 2 * 16
    assert need(tiny_gguf(tmp_path / "x.gguf")).kv == 4096 * per * 2
    assert need(tiny_gguf(tmp_path / "x.gguf"), cells=4000).kv == 4096 * per * 2, "rounded up"
    assert need(tiny_gguf(tmp_path / "x.gguf"), kv_type="q8_0").kv == 4096 * per * 34 // 32
    by_layer = tiny_gguf(tmp_path / "x.gguf", head_count_kv=(ARRAY, (U32, [1, 0])))
    assert need(by_layer).kv == 4096 * per * 2 // 4, "a layer without attention has none"
    wide = tiny_gguf(tmp_path / "x.gguf", llama__attention__key_length=(U32, 48))
    assert need(wide).kv == 4096 * per * 2 * 2


def test_recurrent_layers_take_a_state_a_sequence(tmp_path: Path) -> None:
    plain = need(tiny_gguf(tmp_path / "x.gguf")).kv
    state = tiny_gguf(
        tmp_path / "x.gguf",
        llama__ssm__inner_size=(U32, 64), llama__ssm__state_size=(U32, 16), llama__ssm__conv_kernel=(U32, 4),
    )  # fmt: skip
    assert need(state).kv - plain == 4 * 2 * 16 * 64 * (16 + 3)


@pytest.mark.parametrize("value", [(U32, 2**32 - 1), (U32, 0), (F32, float("nan")), (F32, 1e38), (ARRAY, (U32, []))])
@pytest.mark.parametrize(
    "name", ["block_count", "head_count", "head_count_kv", "embedding_length", "feed_forward_length"]
)
def test_whatever_a_file_says_the_sum_is_a_number(tmp_path: Path, name: str, value: Any) -> None:
    found = need(tiny_gguf(tmp_path / "x.gguf", **{name: value}))
    assert 0 < found.total < 2**200


def test_without_flash_attention_a_step_takes_more(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "x.gguf")
    assert need(file, flash_attention=False).step > need(file).step


def test_a_refusal_has_the_numbers_and_what_would_do() -> None:
    small = Need(weights=10**9, kv=4 * 10**9, step=10**9, per_cell=5e9 / 65536, program=0)
    assert refusal(small, 6 * 10**9, wants(cells=65536)) == ""
    line = refusal(small, 4 * 10**9, wants(cells=65536))
    for part in (
        "6.0 GB",
        "1.0 GB",
        "65536 KV cells 4.0 GB",
        "4.0 GB are free",
        "engine.cells=39168",
        "--anyway",
        "q8_0",
    ):
        assert part in line
    assert "choose a smaller file" in refusal(small, 10**9, wants(cells=65536))
    assert "q8_0" not in refusal(small, 4 * 10**9, wants(cells=65536, kv_type="q8_0"))


def test_the_cells_that_would_fit_do_fit(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "x.gguf")
    for flash in (True, False):
        line = refusal(
            need(file, cells=2**20, flash_attention=flash), 2 * 10**8, wants(cells=2**20, flash_attention=flash)
        )
        cells = int(line.partition("engine.cells=")[2].split()[0])
        assert need(file, cells=cells, flash_attention=flash).total <= 2 * 10**8
        assert need(file, cells=cells + 512, flash_attention=flash).total > 2 * 10**8


def test_what_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny_gguf(tmp_path / "x.gguf")
    check_memory(file, WANTS)
    monkeypatch.setattr(memory, "free_memory", lambda: 10**6)
    with pytest.raises(StartupError, match=r"x\.gguf needs .* smaller file"):
        check_memory(file, WANTS)
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    check_memory(file, WANTS)


# --- what is free


def test_here_and_now() -> None:
    free = free_memory()
    assert free is not None
    assert 0 < free < 2**50


def proc(tmp_path: Path, cgroup: str, available: str = "MemAvailable:    8000000 kB\n") -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:   16000000 kB\n" + available)
    (folder / "self" / "cgroup").write_text(cgroup)
    return folder


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert free_memory(proc(tmp_path, "0::/\n"), tmp_path / "none") == 8_000_000 * 1024
    assert free_memory(tmp_path / "nowhere", tmp_path / "none") is None


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    group(root / "a", max=4_000_000_000, current=1_000_000_000, stat="inactive_file 300000000\nactive_file 0")
    group(root / "a" / "b", max="max", current=900_000_000)
    assert free_memory(proc(tmp_path, "0::/a/b\n"), root) == 3_300_000_000


def test_the_old_sort_of_groups(tmp_path: Path) -> None:
    root = tmp_path / "groups"
    group(root / "memory" / "a", limit_in_bytes=2_000_000_000, usage_in_bytes=2_500_000_000)
    group(root / "memory", limit_in_bytes=9223372036854771712, usage_in_bytes=5)
    assert free_memory(proc(tmp_path, "4:cpu,memory:/a\n3:pids:/b\n"), root) == 0


def test_wants_can_be_said_in_json() -> None:
    assert msgspec.convert(msgspec.to_builtins(WANTS), Wants) == WANTS
