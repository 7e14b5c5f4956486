from __future__ import annotations

import pytest

from headrace.core import errors
from headrace.core.errors import HeadraceError, MethodNotAllowed, Overloaded, RequestError, ServiceError, StartupError

TABLE = [
    ("InvalidRequest", 400, "invalid_request_error", None),
    ("ContextExceeded", 400, "invalid_request_error", "context_length_exceeded"),
    ("Unauthorized", 401, "authentication_error", "invalid_api_key"),
    ("Forbidden", 403, "permission_error", "forbidden"),
    ("ModelNotAllowed", 403, "permission_error", "model_not_allowed"),
    ("ModelNotFound", 404, "invalid_request_error", "model_not_found"),
    ("RouteNotFound", 404, "invalid_request_error", "not_found"),
    ("MethodNotAllowed", 405, "invalid_request_error", "method_not_allowed"),
    ("Conflict", 409, "invalid_request_error", "conflict"),
    ("StreamNotFound", 404, "invalid_request_error", "stream_not_found"),
    ("Gone", 410, "invalid_request_error", "gone"),
    ("Stopped", 409, "invalid_request_error", "stopped"),
    ("Abandoned", 409, "invalid_request_error", "abandoned"),
    ("BodyTooLarge", 413, "invalid_request_error", "body_too_large"),
    ("RateLimited", 429, "rate_limit_error", "rate_limit_exceeded"),
    ("Overloaded", 503, "server_error", "overloaded"),
    ("EngineUnavailable", 503, "server_error", "engine_unavailable"),
    ("Draining", 503, "server_error", "draining"),
    ("EngineFailed", 500, "engine_error", "engine_failed"),
    ("UpstreamFailed", 502, "engine_error", "upstream_failed"),
    ("TooSlow", 504, "engine_error", "ttft_timeout"),
    ("LoadFailed", 502, "engine_error", "load_failed"),
    ("InternalError", 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize(("name", "status", "type_", "code"), TABLE)
def test_what_the_caller_sees(name: str, status: int, type_: str, code: str | None) -> None:
    kind = getattr(errors, name)
    assert (kind.status, kind.type, kind.code) == (status, type_, code)
    assert issubclass(kind, RequestError if status < 500 else HeadraceError)
    assert issubclass(kind, ServiceError) == (status >= 500 and name != "InternalError")


def test_the_table_is_complete() -> None:
    def below(kind: type[HeadraceError]) -> set[str]:
        kinds = [] if kind is StartupError else kind.__subclasses__()  # all of them are told before there are clients
        return {kind.__name__}.union(*map(below, kinds))

    groups = {"HeadraceError", "RequestError", "ServiceError", "StartupError", "UpstreamRefused", "Unsupported"}
    assert below(HeadraceError) == {row[0] for row in TABLE} | groups


def test_codes_tell_errors_apart() -> None:
    codes = [row[3] for row in TABLE if row[3]]
    assert len(codes) == len(set(codes))


def test_message_and_field() -> None:
    error = errors.InvalidRequest("n is 0; give 1 to 16", param="n")
    assert (str(error), error.message, error.param) == ("n is 0; give 1 to 16", "n is 0; give 1 to 16", "n")
    assert errors.StartupError("no").param is None


def test_methods_that_would_do() -> None:
    assert MethodNotAllowed("PUT is not for this path", allow=("GET", "HEAD")).allow == ("GET", "HEAD")


def test_when_to_try_again() -> None:
    assert Overloaded("full").retry_after == 1
    assert Overloaded("full", retry_after=7).retry_after == 7
    assert Overloaded("full", retry_after=0).retry_after == 0
    assert Overloaded.retry_after == 1, "one error's wait is its own"
    assert errors.EngineFailed("broke").retry_after is None


def test_another_server_s_refusal_keeps_its_status_and_code() -> None:
    error = errors.UpstreamRefused("too long", status=413, param="messages", code="context_length_exceeded")
    assert (error.status, error.code, error.param) == (413, "context_length_exceeded", "messages")
    assert errors.UpstreamRefused("no", status=422).code is None


def test_whoever_is_over_its_limit_waits_at_least_a_second() -> None:
    assert errors.RateLimited("slow down", retry_after=0).retry_after == 1
    assert errors.RateLimited("slow down", retry_after=9).retry_after == 9
