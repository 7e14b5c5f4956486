"""OC-54: pages of other origins."""

from __future__ import annotations

import pytest

from acceptance.asking import CHAT, Answer, chat_fields, dumps, envelope, on_loop
from acceptance.scene import MODEL, Scene, scripted
from headrace.server.cors import Cors
from headrace.server.exchange import Exchange
from headrace.server.route import Route, Routes

PAGE = "https://chat.example.org"
OTHER = "https://other.example.org"
SENT = ("authorization", "content-type", "last-event-id", "x-request-id")
STREAMS = "/v1/streams/{name}"


async def preflight(scene: Scene, path: str, method: str, origin: str) -> Answer:
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": ", ".join(SENT),
    }
    key, scene.key = scene.key, None
    try:
        return await scene.send("OPTIONS", path, headers=headers)
    finally:
        scene.key = key


def listed(answer: Answer, header: str) -> set[str]:
    return {part.strip().lower() for part in answer.headers.get(header, "").split(",")}


async def _nothing(exchange: Exchange) -> None:
    raise AssertionError("a preflight asks for nothing")


def rows(scene: Scene) -> list[Route]:
    """Every row of the path table, resumable streams among them: what is added to it later is allowed as well."""
    if STREAMS not in {row.path for row in scene.app.routes}:
        scene.app.routes = Routes(*scene.app.routes, Route(STREAMS, {"GET": _nothing, "DELETE": _nothing}))
    return list(scene.app.routes)


@on_loop
async def test_oc_54_preflights_of_every_row() -> None:
    async with scripted([[b"a"]], key="k", cors=Cors([PAGE])) as scene:
        found = {row.path: row for row in rows(scene)}
        assert {CHAT, "/v1/models", STREAMS} <= set(found)
        assert {"GET", "DELETE"} <= set(found[STREAMS].handlers)
        for path, row in found.items():
            for method in row.handlers:
                answer = await preflight(scene, path.replace("{name}", "abc"), method, PAGE)
                assert answer.status == 204
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert answer.headers["vary"] == "Origin"
                assert method.lower() in listed(answer, "access-control-allow-methods")
                assert set(SENT) <= listed(answer, "access-control-allow-headers")
                assert "access-control-allow-credentials" not in answer.headers
                assert "content-length" not in answer.headers, "204 has no body"
        assert not scene.scripted.prompts
        await scene.alive()


@on_loop
async def test_oc_54_an_origin_that_is_not_allowed() -> None:
    async with scripted([[b"a"]], key="k", cors=Cors([PAGE])) as scene:
        for row in rows(scene):
            answer = await preflight(scene, row.path.replace("{name}", "abc"), "POST", OTHER)
            assert answer.status == 204
            assert not [name for name in answer.headers if name.startswith("access-control-")]
            assert answer.headers["vary"] == "Origin"
        answer = await scene.chat(headers={"origin": OTHER})
        assert answer.status == 200, "it is the browser's business"
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["vary"] == "Origin"


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_oc_54_answers_and_errors_can_be_read(stream: bool) -> None:
    async with scripted([[b"a"]], key="k", cors=Cors([PAGE])) as scene:

        def check(answer: Answer) -> None:
            assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
            assert answer.headers.get_list("vary") == ["Origin"]
            assert {"x-request-id", "retry-after"} <= listed(answer, "access-control-expose-headers")
            assert "access-control-allow-credentials" not in answer.headers

        page = {"origin": PAGE}
        good = await scene.chat(headers=page, stream=stream)
        assert good.status == 200
        check(good)
        errors = {
            400: await scene.chat(headers=page, stream=stream, temperature="hot"),
            404: await scene.chat(headers=page, stream=stream, model="other"),
            405: await scene.send("PUT", CHAT, headers=page),
        }
        no_route = await scene.send("GET", "/v1/nothing", headers=page)
        check(no_route)
        envelope(no_route, 404)
        scene.app.drain()
        errors[503] = await scene.chat(headers=page, stream=stream)
        assert errors[503].headers["retry-after"]
        scene.key = None
        errors[401] = await scene.chat(headers=page, stream=stream)
        for status, answer in errors.items():
            envelope(answer, status)
            check(answer)


@on_loop
async def test_oc_54_a_star_goes_without_credentials() -> None:
    async with scripted([[b"a"]], cors=Cors(["*"])) as scene:
        asked = await preflight(scene, CHAT, "POST", OTHER)
        answer = await scene.chat(headers={"origin": OTHER, "cookie": "a=b"})
        for found in (asked, answer):
            assert found.headers["access-control-allow-origin"] == "*"
            assert found.headers["vary"] == "Origin"
            assert "access-control-allow-credentials" not in found.headers


@on_loop
async def test_oc_54_without_origins_there_is_none_of_it() -> None:
    async with scripted([[b"a"]], key="k") as scene:
        asked = await preflight(scene, CHAT, "POST", PAGE)
        envelope(asked, 401)
        body = dumps(chat_fields(MODEL, {}))
        answer = await scene.post(CHAT, body, headers={"origin": PAGE})
        assert answer.status == 200
        for found in (asked, answer):
            assert not [name for name in found.headers if name.startswith("access-control-")]
