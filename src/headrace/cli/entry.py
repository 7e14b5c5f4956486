"""The command line: verbs, and how a failed start looks.

Only this package prints. Modules that a verb does not need are imported inside it, so that `--version` and `--help` are
there at once and a broken engine library still lets the others explain themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from headrace import __version__
from headrace.core.errors import StartupError
from headrace.settings import Config


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headrace", message="%(prog)s %(version)s")
def headrace() -> None:
    """A language-model server for people who are waiting."""


@headrace.command()
@click.argument("model", required=False)
@click.option("--host", help="Address to listen on (server.host).")
@click.option("--port", type=int, help="Port to listen on, 0 for a free one (server.port).")
@click.option("--key", help="API key that clients must send (server.key; rather set HEADRACE_SERVER_KEY).")
@click.option("--anyway", is_flag=True, help="Start also what needs more memory than there is (engine.check_memory).")
@click.option("--no-measure", is_flag=True, help="Do not measure a file that is new here (model.measure).")
@click.option("--allow-loss", is_flag=True, help="Where it is measured: also files that lose precision.")
@click.option("--insecure", is_flag=True, default=None, help="Allow a non-loopback address without a key.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any setting, e.g. engine.threads=2.")
def serve(
    model: str | None,
    host: str | None,
    port: int | None,
    key: str | None,
    anyway: bool,
    no_measure: bool,
    allow_loss: bool,
    insecure: bool | None,
    file: Path | None,
    assignments: tuple[str, ...],
) -> int:
    """Serve MODEL over HTTP: a name (see `headrace pull`), hf:ORG/REPO/FILE.gguf or the path of a GGUF file.

    Without it: the engines that the configuration file declares, or else the demo model.
    """
    from headrace.cli import serve as verb

    flags = verb.assigned(assignments)
    named = {
        "model.path": model,
        "server.host": host,
        "server.port": port,
        "server.key": key,
        "server.insecure": insecure,
        "engine.check_memory": False if anyway else None,
        "model.measure": False if no_measure else None,
    }
    flags.update((name, value) for name, value in named.items() if value is not None)
    return verb.run(file, flags, allow_loss=allow_loss)


@headrace.command()
@click.argument("name")
@click.option("--accept-terms", is_flag=True, help="You have read the model's terms and accept them.")
def pull(name: str, accept_terms: bool) -> int:
    """Fetch a model, or check the one that is there: smollm2-135m, gemma3-270m, or hf:ORG/REPO/FILE.gguf."""
    from headrace.cli import pull as verb

    return verb.run(name, accept_terms=accept_terms)


@headrace.command()
@click.argument("model")
@click.option("--slo-profile", help="Whose targets are to be met (slo.profile).")
@click.option("--rounds", type=click.IntRange(1, 50), help="How often each candidate is measured.  [default: 3]")
@click.option("--quick", is_flag=True, help="Two rounds, shorter prompts.")
@click.option("--only", metavar="FORMATS", help="Files to try beside your own: q8_0, q4_0, f16, bf16; source for none.")
@click.option("--allow-loss", is_flag=True, help="A file that loses precision may be chosen.")
@click.option("--keep", is_flag=True, help="Keep all converted files, not just the chosen one.")
@click.option("--anyway", is_flag=True, help="Decide also on a machine that is busy with something else.")
@click.option("--show", is_flag=True, help="Print what was found before.")
@click.option("--forget", is_flag=True, help="Remove what was found before, and the file that was made for it.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")
def tune(
    model: str,
    slo_profile: str | None,
    rounds: int | None,
    quick: bool,
    only: str | None,
    allow_loss: bool,
    keep: bool,
    anyway: bool,
    show: bool,
    forget: bool,
    file: Path | None,
) -> int:
    """Measure how MODEL runs best on this machine, for `headrace serve` to use it."""
    from headrace.cli import tune as verb
    from headrace.config import load, named

    if show and forget:
        raise click.UsageError("give --show or --forget")
    flags = {"model.path": model, **({} if slo_profile is None else {"slo.profile": slo_profile})}
    config = load(file=file, flags=flags)
    if show:
        return verb.show(config)
    if forget:
        return verb.forget(config)
    wish = verb.Wish(rounds or (2 if quick else 3), quick, verb.formats(only), allow_loss, keep, anyway)
    return verb.run(config, wish, named(file=file, flags=flags))


@headrace.group()
@click.option("--model", help="The model whose tokens are counted (model.path).")
@click.option("--file", "templates", help="TOML file of templates (templates.file).")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.pass_context
def templates(context: click.Context, model: str | None, templates: str | None, file: Path | None) -> None:
    """Prompts that are kept warm: whose beginning is computed once, at the start."""
    from headrace.config import load

    named = {"model.path": model, "templates.file": templates}
    context.obj = load(file=file, flags={name: value for name, value in named.items() if value is not None})


@templates.command("list")
@click.pass_obj
def templates_list(config: Config) -> int:
    """Say of each template how many tokens are reused, and warn."""
    from headrace.cli import templates as verb

    return verb.show(config)


@templates.command("add")
@click.argument("name")
@click.option("--system", help="The system message; {name} is a variable, {{ and }} are braces.")
@click.option("--system-file", type=click.Path(path_type=Path), help="The file that holds it.")
@click.option("--user", help="The user's message, if it follows a template too.")
@click.option("--user-file", type=click.Path(path_type=Path), help="The file that holds it.")
@click.option("--literal", is_flag=True, help="There are no variables: every brace is a brace.")
@click.pass_obj
def templates_add(
    config: Config,
    name: str,
    system: str | None,
    system_file: Path | None,
    user: str | None,
    user_file: Path | None,
    literal: bool,
) -> int:
    """Add a template to the file; what else is in it stays as it is."""
    from headrace.cli import templates as verb

    text = verb.given("system", system, system_file)
    if text is None:
        raise click.UsageError("give --system TEXT or --system-file FILE")
    return verb.add(config, name, system=text, user=verb.given("user", user, user_file), literal=literal)


@templates.command("rm")
@click.argument("name")
@click.pass_obj
def templates_rm(config: Config, name: str) -> int:
    """Remove a template from the file; what else is in it stays as it is."""
    from headrace.cli import templates as verb

    return verb.rm(config, name)


@templates.command("explain")
@click.argument("name")
@click.pass_obj
def templates_explain(config: Config, name: str) -> int:
    """Say which part of a template is reused, which is not, and why."""
    from headrace.cli import templates as verb

    return verb.explain_one(config, name)


_at = click.option("--at", default="", metavar="URL", help="Where its admin API is; default: where the settings say.")
_file = click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")


@headrace.command()
@click.argument("alias")
@click.argument("engine")
@click.option("--weight", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Its share of the requests.")
@click.option("--model", help="Declare ENGINE first: a name, or the path of a GGUF file.")
@click.option("--url", help="Declare ENGINE first: an OpenAI-compatible server; --model is the model's name there.")
@click.option("--family", help="With --model or --url: engines of one family go on with each other's answers.")
@click.option("--no-wait", is_flag=True, help="Come back at once; the server goes on.")
@_at
@_file
def switch(
    alias: str,
    engine: str,
    weight: float,
    model: str | None,
    url: str | None,
    family: str | None,
    no_wait: bool,
    at: str,
    file: Path | None,
) -> int:
    """Let ENGINE of a running server answer ALIAS; back with the same command and the old engine's name."""
    from headrace.cli import switch as verb
    from headrace.cli.operator import Operator
    from headrace.config import load

    declaration = verb.declared(engine, model, url, family)
    return verb.run(Operator(load(file=file), at), alias, engine, weight, declaration, wait=not no_wait)


@headrace.command()
@_at
@_file
def engines(at: str, file: Path | None) -> int:
    """Show the engines of a running server."""
    from headrace.cli import engines as verb
    from headrace.cli.operator import Operator
    from headrace.config import load

    return verb.run(Operator(load(file=file), at))


@headrace.group()
@click.option("--file", "keys_file", help="The file of keys (keys.file).")
@click.option("--store", type=click.Choice(("file", "redis")), help="Where they are kept (keys.store).")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file with settings.")
@click.pass_context
def keys(context: click.Context, keys_file: str | None, store: str | None, file: Path | None) -> None:
    """API keys: made, listed and revoked, while servers run."""
    from headrace.config import load

    named = {"keys.file": keys_file, "keys.store": store}
    context.obj = load(file=file, flags={name: value for name, value in named.items() if value is not None})


@keys.command("add")
@click.argument("name")
@click.option("--models", metavar="A,B", help="Aliases that it may use.  [default: all]")
@click.option("--rpm", type=int, help="Requests a minute, 0 for no limit.  [default: keys.requests_per_minute]")
@click.option("--tpm", type=int, help="Tokens a minute, 0 for no limit.  [default: keys.tokens_per_minute]")
@click.option("--streams", type=int, help="Requests at the same time, 0 for no limit.  [default: keys.streams]")
@click.option("--priority", type=click.Choice(("interactive", "batch")), default="interactive", help="Its best class.")
@click.option("--tenant", default="", help="Keys of one tenant share cached prefixes and streams.")
@click.option("--expires", type=click.IntRange(1, 36500), metavar="DAYS", help="It is no longer valid after that.")
@click.pass_obj
def keys_add(
    config: Config,
    name: str,
    models: str | None,
    rpm: int | None,
    tpm: int | None,
    streams: int | None,
    priority: str,
    tenant: str,
    expires: int | None,
) -> int:
    """Make a key and show it, this once."""
    from headrace.cli import keys as verb

    rights = {"rpm": rpm, "tpm": tpm, "streams": streams, "priority": priority, "tenant": tenant}
    return verb.add(config, name, verb.listed(models), rights, expires)


@keys.command("list")
@click.pass_obj
def keys_list(config: Config) -> int:
    """Say what each key may do."""
    from headrace.cli import keys as verb

    return verb.show_all(config)


@keys.command("show")
@click.argument("name")
@click.pass_obj
def keys_show(config: Config, name: str) -> int:
    """Say everything that is known of a key; the key itself is not."""
    from headrace.cli import keys as verb

    return verb.show(config, name)


@keys.command("revoke")
@click.argument("name")
@click.pass_obj
def keys_revoke(config: Config, name: str) -> int:
    """Make a key invalid; servers know within seconds."""
    from headrace.cli import keys as verb

    return verb.revoke(config, name)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `headrace` program. Always leaves by SystemExit: 0 done, 2 cannot start, 130 interrupted."""
    try:
        status = headrace.main(arguments, prog_name="headrace", standalone_mode=False)
    except StartupError as error:
        click.echo(f"headrace: {' '.join(error.message.split())}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    sys.exit(status)
