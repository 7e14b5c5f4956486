"""`/tokenize`: the tokens of a prompt, as vLLM's server tells them; for clients that count, and for a Headrace in front
of this one that has to continue an answer.

Rules: it is a request of its key, and its limits on requests hold; it costs no token. Whoever tells them is not chosen
as for an answer: no turn is taken, no engine's figures change, and other servers are not asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.request import Ask, Options
from headrace.gateway.backend import Fleet
from headrace.gateway.guard import Guard
from headrace.observe.record import Outcome, outcome_of
from headrace.protocol.openai import model_of
from headrace.server.exchange import ClientGone, Exchange
from headrace.server.route import Route


class Host(Protocol):
    """What is needed of the application."""

    async def body(self, exchange: Exchange) -> tuple[Mapping[str, Any], int]: ...

    def alias(self, name: str, exchange: Exchange) -> str:
        """`name`, which the caller may use. Raises ModelNotFound, ModelNotAllowed, EngineUnavailable."""
        ...


def token_routes(host: Host, fleet: Fleet, guard: Guard) -> tuple[Route, ...]:
    """The rows of the path table."""

    async def tokenize(exchange: Exchange) -> None:
        fields, _ = await host.body(exchange)
        alias, caller = host.alias(model_of(fields), exchange), exchange.caller
        # No size: nothing is put by of what the key may spend on tokens.
        ask = Ask("messages" in fields, alias, fields, 0, Options(max_tokens=0), 0, caller.salt)
        permit = await guard.admit(caller, ask)
        outcome: Outcome = "error"
        try:
            model = fleet.own(alias)
            tokens = await model.tokens(fields)
            body = {"count": len(tokens), "max_model_len": model.engine.info.n_ctx, "tokens": tokens}
            await exchange.answer(200, msgspec.json.encode(body))
            outcome = "ok"
        except HeadraceError as error:
            outcome = outcome_of(error)
            raise
        except (ClientGone, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            permit.close(0, 0, 0, outcome)

    return (Route("/tokenize", {"POST": tokenize}),)
