"""The peers there are, one row each, in the order of the tables: what installs it, finds it, and names its version."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace_bench.fault import Fault, Misuse
from headrace_bench.lab import Programs
from headrace_bench.peers import example_server, kept, litellm, llama_server, python_server, vllm


@dataclass(frozen=True, slots=True)
class Row:
    """A peer's functions; two rows may share a program."""

    locate: Callable[[Path], Path | None]
    install: Callable[[Path], None]
    version: Callable[[Path], str]
    takes: str
    """What installing it takes, for whoever waits."""


_LLAMA_SERVER = Row(
    llama_server.locate, llama_server.install, llama_server.version, "compiles, a quarter of an hour on two cores"
)
ROWS: Mapping[str, Row] = {
    llama_server.NAME: _LLAMA_SERVER,
    llama_server.TUNED_NAME: _LLAMA_SERVER,
    example_server.NAME: Row(example_server.locate, example_server.install, example_server.version, "half a minute"),
    python_server.NAME: Row(python_server.locate, python_server.install, python_server.version, "half a minute"),
    vllm.NAME: Row(vllm.locate, vllm.install, vllm.version, "some minutes and 3.4 GB"),
}
GATEWAYS: Mapping[str, Row] = {
    litellm.NAME: Row(litellm.locate, litellm.install, litellm.version, "a minute and 700 MB"),
}
"""They serve no model of their own, so they stand beside a gateway, not beside a server."""


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of the peers that were asked for."""

    programs: Programs
    versions: Mapping[str, str]
    """Of those that can be started."""
    left_out: Mapping[str, str]
    """Of the others: why, in a line."""
    places: Mapping[str, Path] = field(default_factory=dict)
    """Of those that can be started: what `locate` gave."""


def named(text: str, rows: Mapping[str, Row] | None = None) -> list[str]:
    """The peers of a comma-separated list, in their order; all of them for an empty one. Raises Misuse."""
    rows = ROWS if rows is None else rows
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in rows:
            raise Misuse(f"--only {name}: no such peer; choose from {', '.join(rows)}")
    return [name for name in rows if name in asked] or list(rows)


def find(
    names: Sequence[str], home: Path, model: Path | None, say: Callable[[str], None], *, install: bool = False
) -> Found:
    """Looks for each, installs what is missing if it may, and makes a model's weights for vLLM.

    No peer's failure stops another.
    """
    places: dict[str, Path] = {}
    versions: dict[str, str] = {}
    left_out: dict[str, str] = {}
    failed: dict[Callable[[Path], None], str] = {}
    weights = None
    for name in names:
        row = GATEWAYS[name] if name in GATEWAYS else ROWS[name]
        try:
            place = row.locate(home)
            if place is None and row.install in failed:
                raise Fault(failed[row.install])
            if place is None and install:
                say(f"installing {name}: {row.takes}")
                row.install(home)
                place = row.locate(home)
            if place is None:
                raise Fault("its program is not where it should be" if install else "not installed (--install does it)")
            if name == example_server.NAME:
                kept.share_engine(place.parent / "venv")
            if name == vllm.NAME and model is not None:
                weights = vllm.weights(place, model)
            places[name], versions[name] = place, row.version(place)
        except (Fault, OSError, tarfile.TarError) as error:
            failed[row.install] = left_out[name] = str(error)
    return Found(_programs(places, weights), versions, left_out, places)


def _programs(places: Mapping[str, Path], weights: Path | None) -> Programs:
    source = places.get(example_server.NAME)
    found = Programs(
        llama_server=places.get(llama_server.NAME) or places.get(llama_server.TUNED_NAME),
        server_py=source,
        python_server=places.get(python_server.NAME),
        vllm=places.get(vllm.NAME),
        vllm_weights=weights,
    )
    if source is None:
        return found
    return Programs(found.llama_server, source, example_server.python(source), found.python_server, found.vllm, weights)
