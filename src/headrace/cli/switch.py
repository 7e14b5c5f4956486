"""`headrace switch ALIAS ENGINE`: let another engine answer, without a request noticing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headrace.cli.operator import Operator
from headrace.cli.output import console
from headrace.core.errors import StartupError

LOOK_S = 0.2
"""How often the server is asked how far it is."""
_DOING = {"loading": "loading", "warming": "warming", "changing": "changing over"}


def declared(engine: str, model: str | None, url: str | None, family: str | None) -> dict[str, Any] | None:
    """The body that declares the engine; None if it is there already. Raises UsageError."""
    if model is None and url is None:
        if family is not None:
            raise click.UsageError("--family goes with --model or --url")
        return None
    body: dict[str, Any] = {"name": engine, "load": False}
    if url is None:
        assert model is not None
        # A server elsewhere, or started elsewhere, cannot know what a path is relative to.
        body.update(kind="llama", model=str(Path(model).resolve()) if Path(model).is_file() else model)
    else:
        body.update(kind="openai", url=url, **({} if model is None else {"model": model}))
    return body if family is None else {**body, "family": family}


def run(
    server: Operator,
    alias: str,
    engine: str,
    weight: float,
    declaration: dict[str, Any] | None,
    *,
    wait: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """The verb; gives the exit status. Raises StartupError."""
    if declaration is not None:
        server.ask("POST", "engines", body=declaration)
    ask = {"alias": alias, "to": engine, "weight": weight, "wait": False}
    report = server.ask("POST", "switch", body=ask)
    out = console(sys.stdout)
    if not wait:
        out.print(f"{engine} is being brought up for {alias}; see how far it is with: headrace engines")
        return 0
    try:
        report = _follow(server, report, sleep)
    except KeyboardInterrupt:
        console(sys.stderr).print(f"The server goes on with it; back with: headrace switch {alias} OLD")
        raise
    if report["error"]:
        raise StartupError(f"nothing has changed: {report['error']}")
    share = "everything" if weight == 1 else f"{weight:.4g} of the requests"
    out.print(f"{engine} answers {share} to {alias}: {_durations(report)}")
    if report["draining"]:
        out.print(f"Its last answers are finished by {', '.join(report['draining'])}, which is unloaded then.")
    return 0


def _follow(server: Operator, report: dict[str, Any], sleep: Callable[[float], None]) -> dict[str, Any]:
    """Show how far it is until the change-over, or its failure."""
    err = console(sys.stderr)
    with err.status("") as status:
        while report["stage"] in _DOING:
            status.update(f"{report['to']}: {_DOING[report['stage']]}, {report['seconds']:.0f} s")
            sleep(LOOK_S)
            report = _find(server, report)
    return report


def _find(server: Operator, report: dict[str, Any]) -> dict[str, Any]:
    """What the server says of it by now. Raises StartupError."""
    table = server.get("switch")
    for row in (*table["running"], *table["last"]):
        if row["id"] == report["id"]:
            return dict(row)
    raise StartupError("the server was started again meanwhile, and knows nothing of this switch")


def _durations(report: dict[str, Any]) -> str:
    if report["load_ms"] is None:
        return f"it was loaded; the change-over took {report['changeover_ms']:.3g} ms"
    return (
        f"loaded in {report['load_ms'] / 1e3:.1f} s, warmed in {report['warm_ms'] / 1e3:.1f} s; "
        f"the change-over took {report['changeover_ms']:.3g} ms"
    )
