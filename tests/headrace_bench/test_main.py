from __future__ import annotations

import subprocess
import sys

import pytest

from headrace_bench import __main__ as program
from headrace_bench.__main__ import VERBS, main, module_of
from headrace_bench.fault import Fault, Misuse


class Verb:
    """A verb's module, in a test."""

    def __init__(self, end: BaseException | int = 0) -> None:
        self.end = end
        self.command: tuple[str, ...] = ()

    def add(self, parser: program.Parser) -> None:
        parser.add_argument("--rate", type=float, default=1.0)

    def run(self, asked: object) -> int:
        self.command = getattr(asked, "command", ())
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


def started(monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    monkeypatch.setattr("headrace_bench.__main__.importlib.import_module", lambda name: verb)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (Fault("no such\nserver"), 1, "headrace-bench: no such server\n"),
        (Misuse("--rate -1"), 2, "headrace-bench: --rate -1\n"),
        (KeyboardInterrupt(), 130, "headrace-bench: interrupted; what was written is kept\n"),
        (
            ModuleNotFoundError("No module named 'h2'", name="h2.connection"),
            1,
            "headrace-bench: run needs h2.connection: scripts/install bench, or pip install 'headrace[bench]'\n",
        ),
    ],
)
def test_how_a_verb_ends(
    end: BaseException | int,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    verb = Verb(end)
    started(monkeypatch, verb)
    assert main(["run", "--rate", "2"]) == status
    assert capsys.readouterr().err == said
    assert verb.command == ("headrace-bench", "run", "--rate", "2")


def test_a_part_of_ours_that_is_missing_is_a_mistake_and_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, Verb(ModuleNotFoundError("x", name="headrace_bench.nothing")))
    with pytest.raises(ModuleNotFoundError):
        main(["run"])


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "VERB"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["run", "--rate", "x"], "invalid float value: 'x' (see headrace-bench run --help)"),
        (["run", "--nonsense"], "--nonsense"),
    ],
)
def test_misuse_is_one_line(
    argv: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started(monkeypatch, Verb())
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.startswith("headrace-bench: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_its_flags_and_its_run(verb: str) -> None:
    module = pytest.importorskip(module_of(verb))
    parser = program.Parser(prog=verb)
    module.add(parser)
    assert parser.format_help()
    assert callable(module.run)


def test_help_loads_nothing_that_is_slow() -> None:
    code = "import sys; from headrace_bench.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += (
        "sys.exit(','.join(sorted({'numpy', 'msgspec', 'matplotlib', 'rich', 'uvloop', 'asyncio'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == ""
    assert all(verb in done.stdout for verb in VERBS)
