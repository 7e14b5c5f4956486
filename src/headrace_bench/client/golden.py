"""Answers whose figures are known: scripts, by name."""

from __future__ import annotations

from headrace_bench.client.script import Script, delta, ending, role, stream

SCRIPTS: dict[str, Script] = {
    "a": stream((0.01, role()), (0.1, delta(content="x")), (0.11, delta(None, "stop")), (0.12, ending(1)))
}
