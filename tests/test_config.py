from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headrace.config import cache_home, config_home, engine_environment, for_engine, load, named, nearest
from headrace.core.errors import StartupError
from headrace.settings import SETTINGS, Config, Setting, Value

NOWHERE = {"XDG_CONFIG_HOME": "/nonexistent"}


def refusal(
    *, flags: dict[str, Value] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> str:
    with pytest.raises(StartupError) as caught:
        load(file=file, flags=flags, environ=NOWHERE | (environ or {}))
    assert "\n" not in caught.value.message
    return caught.value.message


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text)
    return file


def value_of(config: Config, name: str) -> object:
    section, _, part = name.partition(".")
    return getattr(getattr(config, section), part)


# --- sources


def test_what_the_user_has_set_is_known_also_where_it_is_the_default(tmp_path: Path) -> None:
    assert named(environ=NOWHERE) == frozenset()
    file = write(tmp_path, "[engine]\nstep_tokens = 512\n")
    environ = NOWHERE | {"HEADRACE_ENGINE_THREADS": "0"}
    found = named(file=file, environ=environ, flags={"engine.flash_attention": "true"})
    assert found == {"engine.step_tokens", "engine.threads", "engine.flash_attention"}
    assert load(file=file, environ=environ, flags={"engine.flash_attention": "true"}) == Config()
    with pytest.raises(StartupError, match="unknown setting"):
        named(environ=NOWHERE, flags={"engine.thread": 1})


def test_without_sources_it_is_the_defaults() -> None:
    assert load(environ=NOWHERE) == Config()


@pytest.mark.parametrize("row", SETTINGS.values(), ids=lambda row: row.name)
def test_every_row_is_its_default_in_the_config(row: Setting) -> None:
    assert value_of(Config(), row.name) == row.default
    assert type(value_of(Config(), row.name)) is type(row.default)


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path, "[server]\nport = 1\nheartbeat_s = 1\nbody_limit_bytes = 2048\n")
    environ = {"HEADRACE_SERVER_PORT": "2", "HEADRACE_SERVER_HEARTBEAT_S": "2"}
    config = load(file=file, environ=environ, flags={"server.port": 3})
    assert (config.server.port, config.server.heartbeat_s, config.server.body_limit_bytes) == (3, 2.0, 2048)


def test_a_tuned_profile_is_below_everything_that_the_user_says(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nthreads = 3\n")
    profile: dict[str, Value] = {"engine.threads": 1, "engine.threads_batch": 1, "engine.flash_attention": False}
    environ = NOWHERE | {"HEADRACE_ENGINE_THREADS_BATCH": "4"}
    engine = load(file=file, environ=environ, tuned=profile).engine
    assert (engine.threads, engine.threads_batch, engine.flash_attention) == (3, 4, False)
    with pytest.raises(StartupError, match=r"engine.threads: -1 is outside .*tuned profile"):
        load(environ=NOWHERE, tuned={"engine.threads": -1})


def test_the_usual_file_is_read_if_it_exists(tmp_path: Path) -> None:
    (tmp_path / "headrace").mkdir()
    write(tmp_path / "headrace", 'model.alias = "tiny"\n')
    assert load(environ={"XDG_CONFIG_HOME": str(tmp_path)}).model.alias == "tiny"


def test_templates_are_beside_the_config_file(tmp_path: Path) -> None:
    assert config_home({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "headrace"
    assert config_home({"XDG_CONFIG_HOME": "relative", "HOME": str(tmp_path)}) == tmp_path / ".config" / "headrace"


def test_a_named_file_replaces_the_usual_one(tmp_path: Path) -> None:
    (tmp_path / "headrace").mkdir()
    write(tmp_path / "headrace", 'model.alias = "tiny"\n')
    config = load(file=write(tmp_path, "server.port = 1\n"), environ={"XDG_CONFIG_HOME": str(tmp_path)})
    assert (config.model.alias, config.server.port) == ("", 1)


def test_a_relative_xdg_path_counts_as_not_set(tmp_path: Path) -> None:
    (tmp_path / ".config/headrace").mkdir(parents=True)
    write(tmp_path / ".config/headrace", "server.port = 7\n")
    assert load(environ={"XDG_CONFIG_HOME": "relative", "HOME": str(tmp_path)}).server.port == 7


@pytest.mark.parametrize("row", SETTINGS.values(), ids=lambda row: row.name)
def test_every_row_can_be_set_from_the_environment_and_from_flags(row: Setting) -> None:
    if isinstance(row.default, str):
        text = row.choices[-1] if row.choices else "x1"
    else:
        text = str(not row.default) if isinstance(row.default, bool) else str(row.default + 1)
    by_environ = load(environ=NOWHERE | {row.variable: text})
    by_flag = load(environ=NOWHERE, flags={row.name: text})
    assert by_environ == by_flag
    assert type(value_of(by_flag, row.name)) is type(row.default)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(environ=NOWHERE | {"HEADRACE_SERVER_PORT": ""}) == Config()


def test_variables_made_for_a_service_of_our_name_are_ignored() -> None:
    injected = {
        "HEADRACE_SERVICE_HOST": "10.0.0.1",
        "HEADRACE_SERVICE_PORT": "8000",
        "HEADRACE_SERVICE_PORT_HTTP": "8000",
        "HEADRACE_PORT": "tcp://10.0.0.1:8000",
        "HEADRACE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "HEADRACE_SERVER_PORT": "tcp://10.0.0.1:8000",  # the service is called headrace-server
    }
    assert load(environ=NOWHERE | injected) == Config()


@pytest.mark.parametrize("text", ["1", "true", "Yes", " on "])
def test_true_has_several_spellings(text: str) -> None:
    assert load(environ=NOWHERE, flags={"server.insecure": text}).server.insecure is True


def test_a_whole_number_will_do_where_a_float_is_meant(tmp_path: Path) -> None:
    got = load(file=write(tmp_path, "server.drain_s = 3\n"), environ=NOWHERE).server.drain_s
    assert got == 3.0
    assert isinstance(got, float)


# --- refusals


def test_an_unknown_name_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    assert refusal(flags={"server.prot": "1"}) == (
        "unknown setting server.prot (command line); the nearest known one is server.port"
    )
    file = write(tmp_path, "port = 1\n")
    assert refusal(file=file) == f"unknown setting port (config file {file}); the nearest known one is server.port"
    assert refusal(environ={"HEADRACE_SERVER_PROT": "1"}) == (
        "unknown environment variable HEADRACE_SERVER_PROT; the nearest known one is HEADRACE_SERVER_PORT"
    )


def test_a_forgotten_section_counts_less_than_a_misspelling() -> None:
    assert nearest("threads", SETTINGS) == "engine.threads"
    assert nearest("enigne.slot", SETTINGS) == "engine.slots"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("server.port", "65536", "server.port: '65536' is outside 0 to 65535 (command line)"),
        ("server.port", -1, "server.port: -1 is outside 0 to 65535 (command line)"),
        ("server.port", "http", "server.port: 'http' is not a whole number (command line)"),
        ("server.port", "1.5", "server.port: '1.5' is not a whole number (command line)"),
        ("server.drain_s", "nan", "server.drain_s: 'nan' is not a number (command line)"),
        ("server.drain_s", "inf", "server.drain_s: 'inf' is not a number (command line)"),
        ("server.insecure", "maybe", "server.insecure: 'maybe' is not true or false (command line)"),
        ("engine.kv_type", "q4", "engine.kv_type: 'q4' is not one of f16, bf16, q8_0 (command line)"),
    ],
)
def test_a_wrong_value_is_refused_with_its_bounds(name: str, value: Value, message: str) -> None:
    assert refusal(flags={name: value}) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('port = "8000"', "server.port: '8000' is not a whole number"),
        ("port = true", "server.port: True is not a whole number"),
        ("port = {a = 1}", "server.port: {'a': 1} is not a whole number"),
        ("host = 1", "server.host: 1 is not text"),
        ("insecure = 1", "server.insecure: 1 is not true or false"),
        ("drain_s = 1e999", "server.drain_s: inf is not a number"),
        (f"drain_s = {10**400}", f"server.drain_s: {10**400} is not a number"),
    ],
)
def test_a_file_must_use_the_right_type(tmp_path: Path, line: str, message: str) -> None:
    assert refusal(file=write(tmp_path, f"[server]\n{line}\n")).startswith(message + " (config file ")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert refusal(file=tmp_path / "none.toml").endswith("none.toml: no such file or directory")
    assert refusal(file=tmp_path).endswith("is a directory")
    assert "not valid TOML" in refusal(file=write(tmp_path, "[server\n"))
    (tmp_path / "config.toml").write_bytes(b"\xff")
    assert "not valid TOML" in refusal(file=tmp_path / "config.toml")


def test_settings_that_contradict_each_other_are_refused() -> None:
    assert refusal(flags={"engine.max_running": 65}) == (
        "engine.max_running: 65 sequences need as many slots, but engine.slots is 64"
    )
    assert refusal(flags={"engine.context": 20000}) == (
        "engine.context: 20000 tokens do not fit engine.cells, which is 16384"
    )
    assert "needs engine.flash_attention" in refusal(flags={"engine.kv_type": "q8_0", "engine.flash_attention": False})
    assert "model.path: is empty" in refusal(flags={"model.path": " "})


@pytest.mark.parametrize("key", ["two words", "schlüssel", "a\nb"])
def test_a_key_is_never_shown(key: str) -> None:
    for name in ("server.key", "server.admin_key"):
        assert refusal(flags={name: key}) == f"{name}: a header can carry only printable ASCII without spaces"
    assert key not in repr(Config(server=dataclasses.replace(Config().server, key=key, admin_key=key)))


def test_clients_do_not_have_the_admin_key() -> None:
    assert "clients must not have" in refusal(flags={"server.key": "k", "server.admin_key": "k"})


def test_a_key_of_the_wrong_type_is_not_shown_either(tmp_path: Path) -> None:
    assert "271828" not in refusal(file=write(tmp_path, "[server]\nkey = 271828\n"))


# --- engines and aliases

TABLES = """
[server]
port = 1234

[engine]
cells = 8192

[engines.main]
kind = "llama"
model = "smollm2-135m"
engine = {cells = 4096, threads = 2}
slo = {ttft_ms = 300}

[engines."gpu/1"]
kind = "openai"
url = "http://10.0.0.1:8000"
model = "big"
key_env = "GPU_KEY"

[aliases.chat]
engines = {main = 9, "gpu/1" = 1}
"""


def test_engines_and_aliases_stand_next_to_the_settings(tmp_path: Path) -> None:
    config = load(file=write(tmp_path, TABLES), environ=NOWHERE | {"GPU_KEY": "sesame"})
    assert config.server.port == 1234
    assert [spec.name for spec in config.engines] == ["main", "gpu/1"]
    assert (config.engines[1].url, config.engines[1].key) == ("http://10.0.0.1:8000/v1", "sesame")
    assert [(spec.name, spec.engines) for spec in config.aliases] == [("chat", {"main": 9.0, "gpu/1": 1.0})]
    assert "sesame" not in repr(config)
    assert named(file=tmp_path / "config.toml", environ=NOWHERE) == {"server.port", "engine.cells"}


def test_an_engine_has_the_common_settings_but_for_its_own(tmp_path: Path) -> None:
    config = load(file=write(tmp_path, TABLES), environ=NOWHERE | {"GPU_KEY": "sesame"})
    own = for_engine(config, config.engines[0])
    assert (own.engine.cells, own.engine.threads, own.slo.ttft_ms) == (4096, 2, 300.0)
    assert (own.model.path, own.model.alias) == ("smollm2-135m", "main")
    assert own.engine.slots == config.engine.slots
    assert config.engine.cells == 8192
    assert (own.engines, own.aliases) == ((), ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("engine = {cells = 1}", "engines.a: engine.cells: 1 is outside 256 to 16777216"),
        ("engine = {cells = 'x'}", "engines.a: engine.cells: 'x' is not a whole number"),
        ("engine = {cels = 512}", "engines.a: unknown setting engine.cels; the nearest known one is engine.cells"),
        (
            "engine = {context = 20000}",
            "engines.a: engine.context: 20000 tokens do not fit engine.cells, which is 16384",
        ),
        ("slo = {profile = 'fast'}", "engines.a: slo.profile: 'fast' is not one of voice, chat-strict, chat, reading"),
        ("kynd = 1", "engines.a.kynd: there is no such key; did you mean kind?"),
    ],
)
def test_what_is_wrong_with_an_engine_is_one_line(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path, f"[engines.a]\nkind = 'llama'\nmodel = 'm'\n{line}\n")
    assert refusal(file=file) == message


def test_the_guide_s_example_is_a_configuration(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "engines.md").read_text()
    example = guide.split("```toml\n")[1].split("```")[0]
    config = load(file=write(tmp_path, example), environ=NOWHERE | {"GPU_KEY": "sesame"})
    assert [spec.name for spec in config.engines] == ["local", "gpu1", "gpu2", "next"]
    assert [(spec.name, spec.engines) for spec in config.aliases] == [
        ("chat", {"gpu1": 1.0, "gpu2": 1.0, "local": 0.0}),
        ("small", {"local": 1.0}),
    ]


def test_a_key_that_is_not_set_and_tables_that_are_none_are_refused(tmp_path: Path) -> None:
    assert refusal(file=write(tmp_path, TABLES)) == (
        "engines.gpu/1.key_env: the environment variable GPU_KEY is not set"
    )
    assert refusal(file=write(tmp_path, "engines = 3\n")) == "engines: 3 is not a table; write [engines.NAME]"
    assert "unknown setting engins.a.kind" in refusal(file=write(tmp_path, "[engins.a]\nkind = 'llama'\n"))


# --- the rest


def test_models_are_kept_under_the_cache_directory(tmp_path: Path) -> None:
    assert cache_home({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "headrace"
    assert cache_home({"HOME": str(tmp_path)}) == tmp_path / ".cache/headrace"


def test_no_home_at_all_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StartupError, match="set XDG_CACHE_HOME"):
        cache_home({})
    assert load(environ={}) == Config()


@pytest.mark.parametrize(
    ("spin", "given", "expected"),
    [
        (1000, {"A": "b"}, {"A": "b", "GOMP_SPINCOUNT": "1000"}),
        (0, {"A": "b"}, {"A": "b"}),
        (1000, {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        (1000, {"OMP_WAIT_POLICY": "passive"}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_what_the_user_set_for_openmp_wins(spin: int, given: dict[str, str], expected: dict[str, str]) -> None:
    assert engine_environment(spin, given) == {"GGML_NO_BACKTRACE": "1", **expected}
