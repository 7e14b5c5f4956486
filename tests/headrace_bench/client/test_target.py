from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench_servers import H2Server, H2Stream, Reader, Writer, by_hand, request, sized
from headrace_bench.client import target as module
from headrace_bench.client.request import Client
from headrace_bench.client.script import delta, ending
from headrace_bench.client.target import Target, check
from headrace_bench.fault import Fault, Misuse
from headrace_bench.load.schedule import Planned

JSON = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n"


def models(*names: str, owner: str = "someone", **more: Any) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "owned_by": owner, **more} for name in names]}).encode()


def on(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 20))


def checked(target: dict[str, Any], *responses: bytes, seen: list[bytes] | None = None) -> Target:
    """`check` of a server that gives these responses in turn."""
    rest = list(responses)
    found: list[Target] = []

    async def play(reader: Reader, writer: Writer) -> None:
        while data := await request(reader):
            if seen is not None:
                seen.append(data)
            if not rest:
                return
            writer.write(rest.pop(0))

    async def test() -> None:
        async with by_hand(play) as url:
            found.append(await check(Target(**{"url": url, "model": "m", **target})))

    on(test())
    return found[0]


def test_a_server_that_is_there() -> None:
    seen: list[bytes] = []
    target = checked({"key": "k"}, sized(models("a", "m"), JSON % 200), seen=seen)
    assert (target.model, target.headrace) == ("m", False)
    assert seen[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in seen[0]


def test_a_headrace_says_so_in_its_models() -> None:
    assert checked({}, sized(models("m", owner="headrace"), JSON % 200)).headrace


def test_the_only_model_need_not_be_named() -> None:
    assert checked({"model": ""}, sized(models("a"), JSON % 200)).model == "a"


def test_an_alias_is_a_name() -> None:
    assert checked({}, sized(models("a", aliases=["m", 3]), JSON % 200)).model == "m"


def test_a_server_that_lists_no_models_but_chats() -> None:
    seen: list[bytes] = []
    assert checked({}, sized(b"", JSON % 404), sized(b"{}", JSON % 422), seen=seen).model == "m"
    assert seen[1].startswith(b"POST /v1/chat/completions")


@pytest.mark.parametrize(
    ("target", "status", "body", "line"),
    [
        ({}, 401, b'{"error":{"message":"no"}}', "it wants an API key: give it with --key (status 401: no)"),
        ({"key": "k"}, 403, b"no", "it does not take this API key (status 403: no)"),
        ({}, 200, models("a", "b"), "it has no model 'm': there is a, b"),
        ({}, 200, models(), "it has no model 'm': there is none at all"),
        ({"model": ""}, 200, models("a", "b"), "it has 2 models, name one with --model: a, b"),
        ({}, 200, models(*(f"m{n}" for n in range(20))), "there is m0, m1, m2, m3, m4, m5, m6, m7, …"),
        ({}, 200, b"<html>", "not an OpenAI-compatible server"),
        ({}, 200, b'{"data":3}', "not an OpenAI-compatible server"),
        ({}, 302, b"", "it points elsewhere (status 302)"),
        ({}, 503, b"loading", "it cannot answer now (status 503: loading)"),
    ],
)
def test_one_line_that_says_what_to_do(target: dict[str, Any], status: int, body: bytes, line: str) -> None:
    with pytest.raises(Fault, match=re.escape(line)) as fault:
        checked(target, sized(body, JSON % status))
    assert fault.value.status == 1
    assert str(fault.value).startswith("http://127.0.0.1:")
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize("model", ["", "m"])
def test_a_headrace_that_is_still_loading(model: str) -> None:
    seen: list[bytes] = []
    refusal = b'{"error":{"message":"no model is ready yet","type":"engine_unavailable"}}'
    line = "it is not ready yet (no model is ready yet): wait until it has loaded its model"
    with pytest.raises(Fault, match=re.escape(line)):
        checked({"model": model}, sized(models(), JSON % 200), sized(refusal, JSON % 503), seen=seen)
    assert seen[1].startswith(b"GET /readyz HTTP/1.1\r\n")


def test_a_server_without_models_that_knows_nothing_of_readiness() -> None:
    with pytest.raises(Fault, match="it has no model 'm': there is none at all"):
        checked({}, sized(models(), JSON % 200), sized(b"", JSON % 404))
    with pytest.raises(Fault, match="it has 0 models, name one with --model: it lists none"):
        checked({"model": ""}, sized(models(), JSON % 200))  # and then it closes the connection


def test_not_an_openai_server() -> None:
    with pytest.raises(Fault, match=r"not an OpenAI-compatible server: .*/v1/models gives status 404"):
        checked({}, sized(b"", JSON % 404), sized(b"", JSON % 404))


@pytest.mark.parametrize(
    ("first", "line"),
    [(b"SSH-2.0-x\r\n", "not HTTP/1.1"), (b"", "gave no answer .* is it https")],
    ids=["ssh", "closes"],
)
def test_not_http(first: bytes, line: str) -> None:
    async def play(reader: Reader, writer: Writer) -> None:
        await request(reader)
        writer.write(first)

    async def test() -> None:
        async with by_hand(play) as url:
            with pytest.raises(Fault, match=line):
                await check(Target(url, "m"))

    on(test())


def test_no_server() -> None:
    async def test() -> None:
        async with by_hand(lambda reader, writer: asyncio.sleep(0)) as url:
            pass
        with pytest.raises(Fault, match=f"{url}: no server answers there .*is it running"):
            await check(Target(url, "m"))

    on(test())


def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.05)

    async def play(reader: Reader, writer: Writer) -> None:
        await reader.read()

    async def test() -> None:
        async with by_hand(play) as url:
            with pytest.raises(Fault, match=r"said nothing for 0\.05 s"):
                await check(Target(url, "m"))

    on(test())


def test_what_a_target_cannot_be() -> None:
    for fields, line in (
        ({"url": "x"}, "URL"),
        ({"key": ""}, "API key"),
        ({"key": "a\r\nX: 1"}, "API key"),
        ({"timeout_s": 0.0}, "timeout"),
        ({"timeout_s": float("nan")}, "timeout"),
    ):
        with pytest.raises(Misuse, match=line):
            Target(**{"url": "http://h", "model": "m", **fields})  # type: ignore[arg-type]
    assert Target("http://h:1/v1", "m").place == Target("http://h:1", "m").place


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's key and certificate for 127.0.0.1, its own authority."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl to make a certificate with")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *names]
    subprocess.run([*made, "-keyout", file, "-out", file.with_suffix(".crt")], check=True, capture_output=True)
    file.write_text(file.read_text() + file.with_suffix(".crt").read_text())
    return file


def tls(certificate: Path, *protocols: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(list(protocols))
    return context


def answer(stream: H2Stream) -> None:
    if stream.headers[":path"] == "/v1/models":
        stream.head(200, content_type="application/json")
        stream.data(models("m"), end=True)
    else:
        stream.head(200, content_type="text/event-stream")
        stream.data(delta(content="x") + ending(1), end=True)


async def models_by_hand(reader: Reader, writer: Writer) -> None:
    while await request(reader):
        writer.write(sized(models("m"), JSON % 200))


async def plain_words(reader: Reader, writer: Writer) -> None:
    """As a server of HTTP answers to TLS."""
    await reader.read(10)
    writer.write(sized(b"", b"HTTP/1.1 400 Bad Request\r\n"))
    await reader.read()


def test_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with by_hand(models_by_hand, tls(certificate, "http/1.1")) as url:
            with pytest.raises(Fault, match=r"certificate is not trusted .*SSL_CERT_FILE"):
                await check(Target(url, "m"))
            with pytest.raises(Fault, match="is it https"):
                await check(Target(url.replace("https", "http"), "m"))
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            assert (await check(Target(url, "m"))).model == "m"
            with pytest.raises(Fault, match="does not speak HTTP/2"):
                await check(Target(url, "m", http2=True))
        async with by_hand(plain_words) as url:
            with pytest.raises(Fault, match=r"no TLS with it .*http://"):
                await check(Target(url.replace("http", "https"), "m"))

    on(test())


def test_http2_over_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def test() -> None:
        async with H2Server(answer, tls=tls(certificate, "h2")) as url:
            target = await check(Target(url, "m", http2=True))
            client = Client(target, time.monotonic)
            plan = Planned(index=0, at=None, messages=(), max_tokens=1, prompt_tokens=1)
            record = await client.send(plan, [{"role": "user", "content": "x" * 200_000}])
            await client.close()
            assert record.outcome == "ok"
            assert record.sent is not None
            assert record.sent < record.chunks[0].at

    on(test())


def test_http2_by_prior_knowledge() -> None:
    async def test() -> None:
        async with H2Server(answer) as url:
            assert (await check(Target(url, "m", http2=True))).model == "m"
        async with by_hand(models_by_hand) as url:
            with pytest.raises(Fault, match="leave HTTP/2 out"):
                await check(Target(url, "m", http2=True, timeout_s=1.0))

    on(test())
