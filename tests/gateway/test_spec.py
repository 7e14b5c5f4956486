from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import StartupError
from headrace.gateway.spec import OURS, AliasSpec, EngineSpec, MirrorSpec, parse_alias, parse_engine, parse_fleet
from headrace.settings import PREFIX

SECRETS = {"KEY": "sesame", "BAD": "two words"}
LLAMA = {"kind": "llama", "model": "smollm2-135m"}
OTHER = {"kind": "openai", "model": "big", "url": "http://10.0.0.1:8000"}


def engine(table: Any, name: str = "main") -> EngineSpec:
    return parse_engine(name, table, secret=SECRETS.get)


def refusal(engines: Any = None, aliases: Any = None) -> str:
    with pytest.raises(StartupError) as caught:
        parse_fleet({"main": LLAMA} if engines is None else engines, aliases or {}, secret=SECRETS.get)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_the_least_that_an_engine_of_ours_needs() -> None:
    spec = engine(LLAMA)
    assert spec == EngineSpec("main", "llama", "smollm2-135m", "smollm2-135m")
    assert (spec.ttft_timeout_s, spec.max_concurrency, spec.probe_s, spec.load) == (None, 0, 10.0, True)


def test_all_that_an_engine_of_ours_may_say() -> None:
    spec = engine(
        {
            **LLAMA,
            "family": "f",
            "ttft_timeout_ms": 1500,
            "load": False,
            "engine": {"cells": 4096},
            "slo": {"ttft_ms": 9},
        }
    )
    assert (spec.family, spec.ttft_timeout_s, spec.load) == ("f", 1.5, False)
    assert spec.settings == {"engine.cells": 4096, "slo.ttft_ms": 9}


def test_all_that_another_server_may_say() -> None:
    spec = engine({**OTHER, "key_env": "KEY", "flavour": "vllm", "max_concurrency": 4, "probe_s": 0}, "a/b:c.d-e_f")
    assert (spec.name, spec.url, spec.key, spec.flavour) == ("a/b:c.d-e_f", "http://10.0.0.1:8000/v1", "sesame", "vllm")
    assert (spec.max_concurrency, spec.probe_s, spec.family) == (4, 0.0, "big")


def test_a_key_is_not_shown() -> None:
    assert "sesame" not in repr(engine({**OTHER, "key_env": "KEY"}))
    assert "two words" not in refusal({"main": {**OTHER, "key_env": "BAD"}})


def test_only_variables_that_are_known_are_read_where_there_is_a_list() -> None:
    asked: list[str] = []

    def secret(variable: str) -> str:
        asked.append(variable)
        return "sesame"

    table = {**OTHER, "key_env": "KEY"}
    assert parse_engine("x", table, secret=secret, named={"KEY"}).key_env == "KEY"
    asked.clear()
    for named, known in ((set[str](), "there is none"), ({"B", "A"}, "known are A, B")):
        with pytest.raises(StartupError, match=rf"key_env: only a variable .* is read here; {known}"):
            parse_engine("x", table, secret=secret, named=named)
    with pytest.raises(StartupError, match="kept for settings"):
        parse_engine("x", {**OTHER, "key_env": "HEADRACE_X"}, secret=secret, named={"HEADRACE_X"})
    assert asked == []
    assert PREFIX == OURS


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("http://h", "http://h/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://[::1]:8000/api/v1", "http://[::1]:8000/api/v1"),
        ("http://h/openai", "http://h/openai/v1"),
        ("https://g.com/v1beta/openai/", "https://g.com/v1beta/openai"),
        ("https://x.cn/api/paas/v4", "https://x.cn/api/paas/v4"),
    ],
)
def test_a_url_ends_with_its_version(given: str, read: str) -> None:
    assert engine({**OTHER, "url": given}).url == read


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "engines.main.kind: is missing"),
        ({"kind": "vllm"}, "engines.main.kind: 'vllm' is not one of llama, openai"),
        ({"kind": "llama"}, "engines.main.model: is missing"),
        ({**LLAMA, "model": " "}, "engines.main.model: is empty"),
        ({**LLAMA, "model": 3}, "engines.main.model: 3 is not text"),
        ({**LLAMA, "load": 1}, "engines.main.load: 1 is not true or false"),
        ({**LLAMA, "probe_s": "1"}, "engines.main.probe_s: '1' is not a number"),
        ({**LLAMA, "probe_s": True}, "engines.main.probe_s: True is not a number"),
        ({**LLAMA, "probe_s": float("nan")}, "engines.main.probe_s: nan is not a number"),
        ({**LLAMA, "ttft_timeout_ms": -1}, "engines.main.ttft_timeout_ms: -1.0 is outside 0 to 3600000"),
        ({**LLAMA, "engine": 3}, "engines.main.engine: 3 is not a table"),
        ({**LLAMA, "url": "http://h"}, "engines.main.url: only engines of kind openai have one"),
        ({**LLAMA, "modle": "x"}, "engines.main.modle: there is no such key; did you mean model?"),
        ({**OTHER, "engine": {}}, "engines.main.engine: only engines of kind llama have one"),
        ({**OTHER, "flavor": "vllm"}, "engines.main.flavor: there is no such key; did you mean flavour?"),
        ({**OTHER, "url": "h:1"}, "engines.main.url: should read http://HOST:PORT/v1 or https://…"),
        ({**OTHER, "url": "http://h:99999"}, "engines.main.url: should read http://HOST:PORT/v1 or https://…"),
        (
            {**OTHER, "url": "http://u:pw@h"},
            "engines.main.url: holds a user or a password; give the key through key_env",
        ),
        ({**OTHER, "url": "http://h/a b"}, "engines.main.url: holds characters that a URL cannot have"),
        ({**OTHER, "url": "http://h/?a=1"}, "engines.main.url: should read http://HOST:PORT/v1 or https://…"),
        ({**OTHER, "key_env": "NONE"}, "engines.main.key_env: the environment variable NONE is not set"),
        (
            {**OTHER, "key_env": "HEADRACE_SERVER_KEY"},
            "engines.main.key_env: HEADRACE_SERVER_KEY is kept for settings of this server; name another variable",
        ),
        ({**OTHER, "max_concurrency": 1.5}, "engines.main.max_concurrency: 1.5 is not a whole number"),
        (3, "engines.main: 3 is not a table"),
    ],
)
def test_what_is_wrong_with_an_engine_is_one_line_with_its_field(table: Any, message: str) -> None:
    assert refusal({"main": table}) == message


@pytest.mark.parametrize("name", ["", "-a", "a b", "a" * 129, "ä", 'a"b', "a\nb"])
def test_a_name_must_be_one(name: str) -> None:
    assert refusal({name: LLAMA}).startswith("engines.")
    assert refusal(None, {name: {"engines": {"main": 1}}}).startswith("aliases.")


NO_WEIGHT = "engines: name at least one engine with a weight above 0, for example { main = 1 }"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, NO_WEIGHT),
        ({"engines": {"main": 0}}, NO_WEIGHT),
        ({"engines": {"gpu9": 1}}, "engines: no engine is named gpu9; declared are main, canary"),
        ({"engines": {"main": -1}}, "engines.main: -1.0 is outside 0 to 1000000"),
        ({"engines": {"main": "1"}}, "engines.main: '1' is not a number"),
        ({"engines": ["main"]}, "engines: ['main'] is not a table"),
        ({"engine": {"main": 1}}, "engine: there is no such key; did you mean engines?"),
        ({"engines": {"main": 1}, "miror": {}}, "miror: there is no such key; did you mean mirror?"),
    ],
)
def test_what_is_wrong_with_an_alias_is_one_line_with_its_field(table: Any, message: str) -> None:
    assert refusal({"main": LLAMA, "canary": OTHER}, {"chat": table}) == f"aliases.chat.{message}"


@pytest.mark.parametrize(
    ("mirror", "message"),
    [
        ({}, ".to: is missing"),
        (1, ": 1 is not a table"),
        ({"to": "x"}, ".to: no engine is named x; declared are main, canary"),
        ({"to": "main"}, ".to: main answers already; only one of weight 0 can be mirrored to"),
        ({"to": "canary", "share": 2}, ".share: 2.0 is outside 0 to 1"),
        ({"to": "canary", "promote": "yes"}, ".promote: 'yes' is not one of off, auto"),
        ({"to": "canary", "requests": 0}, ".requests: 0 is outside 1 to 1000000"),
        ({"to": "canary", "shar": 1}, ".shar: there is no such key; did you mean share?"),
    ],
)
def test_what_is_wrong_with_a_mirror_is_one_line_with_its_field(mirror: Any, message: str) -> None:
    table = {"engines": {"main": 1}, "mirror": mirror}
    assert refusal({"main": LLAMA, "canary": OTHER}, {"chat": table}) == f"aliases.chat.mirror{message}"


def test_an_alias_has_weights_and_may_have_a_mirror() -> None:
    mirror = {"to": "b", "share": 0.5, "compare": True, "promote": "auto", "requests": 7, "tolerance": 1}
    spec = parse_alias("chat", {"engines": {"a": 90, "b": 0}, "mirror": mirror}, declared=["a", "b"])
    assert spec == AliasSpec("chat", {"a": 90.0, "b": 0.0}, MirrorSpec("b", 0.5, True, "auto", 7, 1.0))
    plain = parse_alias("chat", {"engines": {"a": 1}, "mirror": {"to": "b"}}, declared=["a", "b"])
    assert plain.mirror == MirrorSpec("b", 0.01, False, "off", 200, 0.1)


def test_without_aliases_each_loaded_engine_is_one() -> None:
    engines, aliases = parse_fleet({"a": LLAMA, "b": OTHER, "c": {**LLAMA, "load": False}}, {}, secret=SECRETS.get)
    assert [spec.name for spec in engines] == ["a", "b", "c"]
    assert aliases == (AliasSpec("a", {"a": 1.0}), AliasSpec("b", {"b": 1.0}))


def test_tables_must_be_tables() -> None:
    assert refusal(3) == "engines: 3 is not a table; write [engines.NAME]"
    assert refusal(None, [1]) == "aliases: [1] is not a table; write [aliases.NAME]"
    assert (
        refusal({}, {"chat": {"engines": {"a": 1}}}) == "aliases.chat.engines: no engine is named a; none is declared"
    )
