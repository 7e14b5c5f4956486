"""`headrace-bench VERB …`: measures a server from outside.

Rules: a verb's module is imported when the verb is asked for, so that `--help` is quick and a library that one verb
needs is not missed by another; what a user did or met ends as one line on stderr and an exit status.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from headrace_bench.fault import Fault

PROGRAM = "headrace-bench"
VERBS: Mapping[str, str] = {
    "run": "one load on one server, measured",
    "find": "the highest rate that keeps what was promised",
    "compare": "two servers, in turn, with the same load",
    "ablate": "a Headrace with each optimisation off and on",
    "models": "model files side by side: speed, size, perplexity",
    "peers": "other servers, installed, started and measured",
    "shape": "a model file of a published shape with random weights, made once",
    "publish": "measured tables into a page",
    "waterfall": "one request, its stages drawn",
    "report": "a run's page and plots again",
    "selftest": "does this client measure what it says?",
    "agree": "the same figures as another client's, of one server",
    "first-token": "the first token of one request at a time, and what the server adds to it",
    "busy": "a busy server, side by side with its peers",
    "idle": "what silent streams cost a server: memory, and the time of the others",
    "switching": "a model exchanged under load: what is lost, and how long the longest gap is",
    "memory": "KV that comes back, text that is looked up, streams that survive",
}
INTERRUPTED = 130
TERMINATED = 143


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 measured; 1 a server did not do what it has to, or the run does not count; 2 misused."""
    if argv is None:  # the program itself: an exception, so that servers that run are ended
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    given = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in given if word in VERBS), None)
    try:
        module = None if verb is None else importlib.import_module(module_of(verb))
        asked = _parser(verb, module).parse_args(given)
        asked.command = (PROGRAM, *given)
        return int(importlib.import_module(module_of(asked.verb)).run(asked))
    except Fault as fault:
        print(f"{PROGRAM}: {fault}", file=sys.stderr)
        return fault.status
    except ModuleNotFoundError as missing:
        name = missing.name or ""
        if name.split(".")[0] == __package__:
            raise
        print(
            f"{PROGRAM}: {verb} needs {name}: scripts/install bench, or pip install 'headrace[bench]'", file=sys.stderr
        )
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; what was written is kept", file=sys.stderr)
        return INTERRUPTED


def module_of(verb: str) -> str:
    """Where a verb's `add(parser)` and `run(asked)` are."""
    return f"headrace_bench.verbs.{verb.replace('-', '_')}"


def _parser(verb: str | None, module: Any) -> Parser:
    """All verbs by name, `verb` with its flags."""
    parser = Parser(prog=PROGRAM, description="Measure a server from outside.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in VERBS.items():
        one = verbs.add_parser(name, help=text, description=text)
        if name == verb:
            module.add(one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
