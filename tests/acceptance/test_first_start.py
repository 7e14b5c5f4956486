"""The first start of a file on a machine: it is measured, once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import tuned

pytestmark = pytest.mark.real


def started(model: Path, folder: Path) -> tuple[str, str]:
    """What a `headrace serve` says on stdout, up to its address, and on stderr, with a cache of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    errors = folder / "stderr"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", str(model), "--port=0", "--set", "tiers.ssd_mib=0"],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env={**environ, "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        )
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if re.search(r"Chat page\s+http://", line):
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, errors.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return said, errors.read_text()


def test_a_file_is_measured_at_its_first_start_and_not_again(demo_model: Path, tmp_path: Path) -> None:
    said, err = started(demo_model, tmp_path)
    assert "Ready" in said
    assert "on this machine, once, for up to 17 s" in err
    cache = tmp_path / "headrace"
    file = tuned.profile_file(cache, demo_model)
    if "this machine is busy with something else" in err:
        assert not file.exists()
        pytest.skip("the rest needs cores that nothing else uses")
    assert "Headrace: measured this machine in" in err
    profile = tuned.load_profile(file)
    assert profile is not None
    assert profile.by == tuned.SERVE
    assert not tuned.unusable(profile, demo_model, file)
    made = [] if profile.converted is None else [Path(profile.converted.path).name]
    assert [path.name for path in tuned.weights_folder(file).iterdir()] == made
    said, err = started(demo_model, tmp_path)
    assert "Ready" in said
    assert "measuring" not in err
    assert "measured this machine" not in err
