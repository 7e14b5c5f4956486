from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.core.errors import EngineUnavailable
from headrace.engines.base import EngineStats
from headrace.gateway.fixed import FixedFleet
from headrace.kv.tiers import TierStats
from headrace.server import app as app_module
from headrace.server.page import Page
from server.asgi_driver import Call, Client, on_loop
from server.hand_engine import INFO, HandEngine, model, server

PAGE = Page(b"<p>hi", ((b"content-security-policy", b"default-src 'none'"), (b"cache-control", b"no-cache")))


def envelope(call: Call) -> dict[str, Any]:
    """The error; whole, typed and of the right length."""
    assert call.headers["content-type"] == "application/json"
    assert int(call.headers["content-length"]) == len(call.body)
    assert call.ended
    error = call.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


# Routes ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_lists_and_shows_models() -> None:
    client = Client(server(HandEngine()))
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    ours = {"sampling": sampling}
    card = {"id": "m", "object": "model", "created": 7, "owned_by": "headrace", "headrace": ours}
    async with client.get("/v1/models") as call:
        assert call.json() == {"object": "list", "data": [card]}
    async with client.get("/v1/models/m") as call:
        assert call.json() == card
    async with client.get("/v1/models/nope") as call:
        assert call.status == 404
        assert envelope(call)["code"] == "model_not_found"
        assert "nope" not in call.body.decode()


@on_loop
async def test_a_model_name_may_have_slashes() -> None:
    engine = HandEngine(info=msgspec.structs.replace(INFO, name="org/m"))
    async with Client(server(engine)).get("/v1/models/org/m") as call:
        assert call.json()["id"] == "org/m"


@pytest.mark.parametrize("path", ["/healthz", "/health"])
@on_loop
async def test_health_is_about_the_process(path: str) -> None:
    engine = HandEngine(ready=False)
    app = server(engine)
    async with Client(app).get(path) as call:
        assert call.status == 200
        assert call.json()["status"] == "ok"
    app.drain()
    async with Client(app).get(path) as call:
        assert call.status == 200
        assert call.json()["status"] == "draining"


@pytest.mark.parametrize("path", ["/healthz", "/health"])
@on_loop
async def test_health_names_the_tiers_that_are_done_without(path: str) -> None:
    engine, other = HandEngine(), HandEngine()
    app = server(engine)
    app.fleet = FixedFleet({**app.fleet.backends, "other": model(other)})
    for mine, theirs, names in (
        (TierStats(), TierStats(), []),
        (TierStats(redis_down=True), TierStats(), ["redis"]),
        (TierStats(redis_down=True), TierStats(redis_down=True, ssd_down=True), ["redis", "ssd"]),
        (TierStats(), TierStats(ssd_down=True), ["ssd"]),
    ):
        engine.stats, other.stats = EngineStats(tiers=mine), EngineStats(tiers=theirs)
        async with Client(app).get(path) as call:
            assert call.status == 200
            assert call.json()["status"] == "ok"
            assert call.json()["degraded"] == names


@on_loop
async def test_readiness_is_about_answers() -> None:
    engine = HandEngine()
    app = server(engine)
    async with Client(app).get("/readyz") as call:
        assert call.status == 200
    engine.ready = False
    async with Client(app).get("/readyz") as call:
        assert call.status == 503
        assert envelope(call)["code"] == "engine_unavailable"
    engine.ready = True
    app.drain()
    async with Client(app).get("/readyz") as call:
        assert call.status == 503
        assert envelope(call)["code"] == "draining"
    async with Client(server()).get("/readyz") as call:
        assert call.status == 503


@on_loop
async def test_metrics_are_prometheus_text() -> None:
    async with Client(server(HandEngine())).get("/metrics") as call:
        assert call.status == 200
        assert call.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b"headrace_build_info" in call.body


@on_loop
async def test_the_page() -> None:
    async with Client(server(HandEngine(), page=PAGE)).get("/") as call:
        assert (call.status, call.body) == (200, b"<p>hi")
        assert call.headers["content-type"] == "text/html; charset=utf-8"
        assert call.headers["cache-control"] == "no-cache"
        assert "content-security-policy" in call.headers
    async with Client(server(HandEngine())).get("/") as call:
        assert call.status == 404
        envelope(call)


@on_loop
async def test_head_is_get_without_a_body() -> None:
    client = Client(server(HandEngine(), page=PAGE))
    for path in ("/", "/healthz", "/v1/models", "/metrics"):
        async with client.call("HEAD", path) as call:
            assert call.status == 200
            assert call.body == b""
            assert int(call.headers["content-length"]) > 0
    async with client.call("HEAD", "/v1/completions") as call:
        assert call.status == 405
        assert call.body == b""


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "//v1/models", "/v1/chat/completions/", "/v1/../metrics", "/favicon.ico"]
)
@on_loop
async def test_unknown_paths(path: str) -> None:
    async with Client(server(HandEngine())).get(path) as call:
        assert call.status == 404
        assert envelope(call)["code"] == "not_found"


@on_loop
async def test_wrong_methods_are_told_the_right_ones() -> None:
    client = Client(server(HandEngine()))
    for method, path, allow in (
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/", "GET, HEAD"),
    ):
        async with client.call(method, path) as call:
            assert call.status == 405
            assert call.headers["allow"] == allow
            assert envelope(call)["code"] == "method_not_allowed"


@on_loop
async def test_only_http_is_served() -> None:
    async def nothing(*args: Any) -> Any:
        raise AssertionError

    with pytest.raises(NotImplementedError):
        await server()({"type": "lifespan"}, nothing, nothing)


# The key ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@on_loop
async def test_every_route_but_the_public_ones_asks_for_the_key() -> None:
    app = server(HandEngine(), key="s3cret", page=PAGE)
    public = {"/healthz", "/health", "/readyz", "/"}
    paths = {row.path.replace("{name}", "m") for row in app.routes} | {"/nothing", "//v1/models"}
    assert public < paths
    for path in paths:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
            for headers in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"\xff\xfe")]):
                async with Client(app).call(method, path, headers=headers) as call:
                    assert (call.status == 401) == (path not in public), (method, path)
                    if call.status == 401:
                        assert call.headers["www-authenticate"] == "Bearer"
                        assert method == "HEAD" or envelope(call)["code"] == "invalid_api_key"


@on_loop
async def test_the_key_opens() -> None:
    app = server(HandEngine(), key="s3cret")
    async with Client(app).get("/v1/models", headers=[(b"authorization", b"bearer s3cret")]) as call:
        assert call.status == 200
    twice = [(b"authorization", b"Bearer s3cret")] * 2
    async with Client(app).get("/v1/models", headers=twice) as call:
        assert call.status == 401


@on_loop
async def test_a_wrong_key_is_refused_before_the_body_is_read() -> None:
    async with Client(server(HandEngine(), key="k")).chat(stream=True) as call:
        assert call.status == 401
        assert call.receives == 0


# Refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"n": 0}, 400, "n", None),
        ({"temperature": 3}, 400, "temperature", None),
        ({"messages": []}, 400, "messages", None),
        ({"model": "does-not-exist"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", None),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, 400, "messages", "context_length_exceeded"),
    ],
)
@on_loop
async def test_bad_requests_are_refused_with_their_field(
    fields: dict[str, Any], status: int, param: str, code: str | None, stream: bool
) -> None:
    engine = HandEngine()
    async with Client(server(engine)).chat(stream=stream, **fields) as call:
        assert call.status == status
        error = envelope(call)
        assert (error["param"], error["code"]) == (param, code)
        assert engine.generations == []


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"model":"m"}{}', b"\xff\xfe{\x00}\x00", b'{"model":"\\ud800"}']
)
@on_loop
async def test_bodies_that_are_no_request(body: bytes) -> None:
    async with Client(server(HandEngine())).post("/v1/chat/completions", body) as call:
        assert call.status == 400
        envelope(call)


@on_loop
async def test_a_lone_surrogate_is_not_a_fault_of_ours() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}'
    async with Client(server(HandEngine())).post("/v1/chat/completions", body) as call:
        assert call.status == 400


@on_loop
async def test_no_content_type_is_needed_and_odd_headers_do_not_matter() -> None:
    engine = HandEngine()
    odd = [(b"x-odd", b"\x80\xff"), (b"content-type", b"\xff"), (b"authorization", b"\xd0\xba")]
    async with Client(server(engine)).chat(headers=odd) as call:
        engine.finish()
        await call.task
        assert call.status == 200


@on_loop
async def test_a_body_over_the_limit() -> None:
    app = server(HandEngine(), body_limit=1000)
    async with Client(app).chat(user="x" * 2000) as call:
        await call.task
        assert call.status == 413
        assert call.headers["connection"] == "close"
        assert envelope(call)["code"] == "body_too_large"
    pieces = [b"x" * 300] * 10
    async with Client(app).call("POST", "/v1/chat/completions", chunks=pieces) as call:
        await call.task
        assert call.status == 413
        envelope(call)


@on_loop
async def test_a_client_that_leaves_while_sending_its_body() -> None:
    app = server(HandEngine())
    call = Client(app).call("POST", "/v1/chat/completions", chunks=[])
    call.hang_up()
    await call.task
    assert call.sent == []
    assert 'outcome="cancelled"' in app.metrics.render().decode()


@on_loop
async def test_an_engine_that_is_not_ready() -> None:
    engine = HandEngine(ready=False)
    async with Client(server(engine)).chat(stream=True) as call:
        assert call.status == 503
        assert int(call.headers["retry-after"]) >= 1
        assert envelope(call)["code"] == "engine_unavailable"
    async with Client(server()).chat() as call:
        assert call.status == 503, "no model is loaded yet"


@on_loop
async def test_a_bad_request_is_told_so_even_if_the_engine_is_not_ready() -> None:
    async with Client(server(HandEngine(ready=False))).chat(n=0) as call:
        assert call.status == 400


@on_loop
async def test_an_engine_that_refuses() -> None:
    engine = HandEngine(refusal=EngineUnavailable("restarting", retry_after=3))
    app = server(engine)
    async with Client(app).chat(stream=True) as call:
        assert call.status == 503
        assert call.headers["retry-after"] == "3"
    assert app.running == 0


@on_loop
async def test_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    words = "what the user wrote"

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError(words)

    monkeypatch.setattr(app_module, "read", broken)
    app = server(HandEngine())
    async with Client(app).chat(headers=[(b"x-request-id", b"mine")]) as call:
        assert call.status == 500
        assert envelope(call) == {
            "message": "internal error; request mine", "type": "server_error", "param": None, "code": "internal_error",
        }  # fmt: skip
    assert "KeyError" in caplog.text
    assert "mine" in caplog.text
    assert words not in caplog.text
    monkeypatch.undo()
    async with Client(app).get("/v1/models") as call:
        assert call.status == 200
