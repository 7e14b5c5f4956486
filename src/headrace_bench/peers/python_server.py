"""`python -m llama_cpp.server`, llama-cpp-python's own: one request at a time, on the same build of the library.

What is not its default, and why:

    n_ctx 16384                  2,048 tokens are too few for the scenarios' long prompts; it gets ours
    interrupt_requests false     by default a new request ends the one before it in the middle of its answer
    logits_all false             by default it computes, and keeps, the logits of every token of every prompt
"""

from __future__ import annotations

from pathlib import Path

from headrace_bench.peers import kept

NAME = "llama_cpp.server"
CELLS = 16384


def locate(home: Path) -> Path | None:
    """The interpreter that runs it; None where it is not installed."""
    place = home / NAME
    return kept.interpreter(place / "venv") if (place / kept.LAST).is_file() else None


def install(home: Path) -> None:
    """Installs what its extra `server` names; the library itself is ours, by a link. Raises Fault."""
    kept.engine_version()
    place = home / NAME
    runs = kept.environment(place / "venv")
    kept.pip(runs, "install", *kept.engine_needs("server"))
    kept.share_engine(place / "venv")
    (place / kept.LAST).touch()


def version(_program: Path) -> str:
    """Of the package; the link makes it ours."""
    return f"{kept.ENGINE} {kept.engine_version()}"


def command(runs: Path, model: Path, alias: str, port: int, threads: int) -> list[str]:
    """See the module's table."""
    place = ["--model", str(model), "--model_alias", alias, "--host", "127.0.0.1", "--port", str(port)]
    engine = ["--n_ctx", str(CELLS), "--n_threads", str(threads), "--n_threads_batch", str(threads)]
    return [
        *(str(runs), "-m", "llama_cpp.server"),
        *place,
        *engine,
        *("--interrupt_requests", "false", "--logits_all", "false"),
    ]
