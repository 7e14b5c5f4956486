"""Where peers are kept, and the few steps by which all of them get there.

    $XDG_CACHE_HOME/headrace/peers/
        llama-server/            an environment whose only package brings the program
        lib/python3…/            the same, from before each peer had a folder of its own
        server.py-VERSION/       the example server's source, and venv/ with what it imports
        llama_cpp.server/venv/   what llama-cpp-python's own server imports
        vllm/venv/               vLLM and its PyTorch
        vllm/weights/MODEL-…/    a GGUF file's weights as vLLM takes them

Rules: outside every repository; an environment a peer, so that no peer's needs bend another's; what is complete says so
by a file `.complete`, written last; a step that fails is one `Fault` whose line ends with the tool's own last words.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from headrace_bench.fault import Fault

ENGINE = "llama-cpp-python"
LAST = ".complete"
STOP_S = 5.0
"""A tool that is told to end may take so long to clean up."""


def home() -> Path:
    """The peers' folder, whether or not it is there."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "headrace" / "peers"


def environment(folder: Path) -> Path:
    """A fresh environment in `folder`; its interpreter."""
    act([sys.executable, "-m", "venv", "--clear", str(folder)])
    return interpreter(folder)


def interpreter(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Runs pip in the environment of `python`; `env` stands above our own variables."""
    act([str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], env)


def act(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Runs a step of an installation; what it prints is shown only if it fails. Raises Fault.

    Who is interrupted leaves nothing behind that still compiles: the step has a process group of its own, which ends.
    """
    try:
        step = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
            env={**os.environ, **(env or {})},
        )
    except OSError as error:
        raise Fault(f"{command[0]}: {error.strerror}") from None
    with step:
        try:
            out, err = step.communicate()
        except BaseException:
            _end(step)
            raise
    if step.returncode:
        said = [line.strip() for line in (out + "\n" + err).splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()] or said
        raise Fault(f"{Path(command[0]).name} {' '.join(command[1:])[:120]}: {(errors or ['no word'])[-1][:200]}")


def _end(step: subprocess.Popen[str]) -> None:
    """Its whole group: pip's compilers too."""
    try:
        os.killpg(step.pid, signal.SIGTERM)
        step.wait(timeout=STOP_S)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(step.pid, signal.SIGKILL)
        step.wait()


def site(folder: Path) -> Path | None:
    """`site-packages` of an environment; None where there is none."""
    return next(iter(sorted(folder.glob("lib/python3*/site-packages"))), None)


def version(folder: Path, distribution: str) -> str | None:
    """The version of a distribution in an environment; None where it is not installed."""
    packages = site(folder)
    if packages is None:
        return None
    found = importlib.metadata.distributions(name=distribution, path=[str(packages)])
    return next((one.version for one in found), None)


def engine_version() -> str:
    """Of the llama-cpp-python beside us, whose library ours and its own servers share. Raises Fault: there is none."""
    try:
        return importlib.metadata.version(ENGINE)
    except importlib.metadata.PackageNotFoundError:
        raise Fault(f"{ENGINE} is not installed beside headrace-bench: its servers share its library") from None


def engine_needs(extra: str) -> list[str]:
    """What our llama-cpp-python and its extra `extra` require, as pip reads it."""
    lines = importlib.metadata.requires(ENGINE) or []
    chosen = [line.partition(";") for line in lines]
    return [need.strip() for need, _, marker in chosen if not marker or f'extra == "{extra}"' in marker]


def share_engine(folder: Path) -> None:
    """Puts our build of the library into an environment by a link: both servers run the same code below Python."""
    spec = importlib.util.find_spec("llama_cpp")
    packages = site(folder)
    if spec is None or not spec.submodule_search_locations or packages is None:
        raise Fault(f"{ENGINE} is not installed beside headrace-bench: its servers share its library")
    ours, link = Path(spec.submodule_search_locations[0]), packages / "llama_cpp"
    if link.is_symlink() and link.readlink() == ours:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(ours)
