from __future__ import annotations

import pytest

from gateway.hand_pool import HandBackend
from headrace.core.errors import EngineUnavailable, ModelNotFound, Unsupported
from headrace.core.request import Ask, Options
from headrace.gateway.fixed import FixedFleet
from headrace.gateway.spec import EngineSpec
from server.asgi_driver import on_loop
from server.hand_engine import HandEngine, model


def ask(name: str = "m") -> Ask:
    return Ask(True, name, {}, 0, Options(), 1)


def test_a_model_is_its_own_alias_while_it_is_there() -> None:
    engine = HandEngine()
    models = {"m": model(engine)}
    fleet = FixedFleet(models)
    assert list(fleet.aliases) == ["m"]
    assert fleet.ready("m")
    assert fleet.created("m") == 7
    assert fleet.sampling("m") == models["m"].sampling
    lease = fleet.lease(ask())
    assert (lease.engine, lease.family, lease.ttft_timeout_s) == ("m", "m", None)
    assert lease.backend is models["m"]
    assert fleet.others(ask(), without=())
    models.clear()
    assert list(fleet.aliases) == []
    with pytest.raises(ModelNotFound):
        fleet.lease(ask())


def test_what_tells_tokens_is_one_of_ours() -> None:
    engine = HandEngine()
    ours = model(engine)
    fleet = FixedFleet({"m": ours, "other": HandBackend(EngineSpec("other", "openai", "x", "x"))})
    assert fleet.own("m") is ours
    with pytest.raises(Unsupported, match="does not tell tokens"):
        fleet.own("other")
    engine.ready = False
    with pytest.raises(EngineUnavailable):
        fleet.own("m")


def test_there_is_no_second_engine() -> None:
    fleet = FixedFleet({"m": model(HandEngine())})
    assert not fleet.others(ask(), without={"m"})
    for excluded, family in (({"m"}, None), (set[str](), "another")):
        with pytest.raises(EngineUnavailable):
            fleet.lease(ask(), without=excluded, family=family)


def test_one_that_is_not_ready_takes_nothing() -> None:
    with pytest.raises(EngineUnavailable, match="not ready"):
        FixedFleet({"m": model(HandEngine(ready=False))}).lease(ask())


@on_loop
async def test_every_engine_is_closed_although_one_breaks(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(HandEngine):
        async def close(self) -> None:
            raise OSError

    engine = HandEngine()
    await FixedFleet({"a": model(Broken()), "b": model(engine)}).close()
    assert engine.closed
    assert "OSError" in caplog.text
