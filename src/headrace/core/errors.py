"""Every error Headrace can give, and whose fault it is.

    HeadraceError
     ├─ RequestError             the caller's request cannot be served as it stands: 4xx, says which field
     │   ├─ InvalidRequest       400  a field is wrong
     │   │   └─ Unsupported      400  this engine cannot do that; another one may
     │   ├─ ContextExceeded      400  prompt and answer do not fit the context; both numbers are in the message
     │   ├─ UpstreamRefused      4xx  the engine behind us says so, in its words
     │   ├─ Unauthorized         401
     │   ├─ Forbidden            403  the key may not do this
     │   │   └─ ModelNotAllowed  403  … use this model
     │   ├─ ModelNotFound        404
     │   ├─ RouteNotFound        404
     │   ├─ MethodNotAllowed     405
     │   ├─ Conflict             409  something else is being done to it
     │   ├─ BodyTooLarge         413
     │   └─ RateLimited          429  the key's own limit; `Retry-After` says when
     ├─ ServiceError             ours: 5xx, the same request may succeed later
     │   ├─ Overloaded           503  `Retry-After` says when
     │   ├─ EngineUnavailable    503  no engine can answer yet (loading, restarting)
     │   ├─ Draining             503  the server is shutting down
     │   ├─ EngineFailed         500  the engine broke while it worked on this request
     │   ├─ UpstreamFailed       502  a server behind us did not answer, or not in a way that makes sense
     │   ├─ TooSlow              504  the engine gave no text in time, and there is no other
     │   └─ LoadFailed           502  an engine that was to be switched to did not come up; nothing has changed
     ├─ InternalError            500  a fault of ours; details are in the log only
     └─ StartupError             the process cannot start: one line on stderr, exit code 2

A message is shown to the user as it is: one line, no path of ours, no traceback, none of the user's text.
"""

from __future__ import annotations

from typing import Literal, get_args

Reason = Literal["queue_full", "queue_tokens", "deadline", "queue_timeout"]
"""Why a request was refused although nothing is wrong with it."""
REASONS: tuple[Reason, ...] = get_args(Reason)
Limit = Literal["requests", "tokens", "streams"]
"""Of what a key has a limited amount."""
LIMITS: tuple[Limit, ...] = get_args(Limit)


class HeadraceError(Exception):
    """Base of all; never raised itself. `message` is one line for the user."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(HeadraceError):
    """The caller can mend it."""

    status = 400
    type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type or out of range."""


class Unsupported(InvalidRequest):
    """Right, and nothing that this engine can do; another one may."""


class ContextExceeded(RequestError):
    """The prompt leaves no room for an answer."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """The key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key is right and may not do this."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class ModelNotAllowed(Forbidden):
    """There is such a model, and it is not for this key."""

    code = "model_not_allowed"


class ModelNotFound(RequestError):
    """No engine serves a model of that name."""

    status = 404
    code = "model_not_found"


class RouteNotFound(RequestError):
    """There is no such path."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path exists, the method does not. `allow` lists those that do."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class Conflict(RequestError):
    """It cannot be done while something else is going on with the same thing."""

    status = 409
    code = "conflict"


class RateLimited(RequestError):
    """The caller is over a limit of its own. `retry_after` in whole seconds, at least 1; `limit`: which one."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int, limit: Limit | None = None, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = max(1, retry_after)
        self.limit = limit


class UpstreamRefused(RequestError):
    """The server behind us finds the request wrong; status, code and message are its own."""

    def __init__(self, message: str, *, status: int, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code


class ServiceError(HeadraceError):
    """Ours; `retry_after` (s) tells a client when to try again, None that it need not wait."""

    status = 503
    retry_after: int | None = 1

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message, param=param)
        if retry_after is not None:
            self.retry_after = retry_after


class Overloaded(ServiceError):
    """The queue is full, the deadline cannot be met, or waiting took too long."""

    code = "overloaded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        reason: Reason | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self.reason = reason


class EngineUnavailable(ServiceError):
    """The engine is loading or being restarted."""

    code = "engine_unavailable"


class Draining(ServiceError):
    """The server finishes what it has and takes nothing new."""

    code = "draining"


class EngineFailed(ServiceError):
    """The engine failed under this request."""

    status = 500
    type = "engine_error"
    code = "engine_failed"
    retry_after = None


class UpstreamFailed(ServiceError):
    """A server behind us broke off, answered nonsense, or could not be reached."""

    status = 502
    type = "engine_error"
    code = "upstream_failed"


class TooSlow(ServiceError):
    """No text within the engine's `ttft_timeout_ms`."""

    status = 504
    type = "engine_error"
    code = "ttft_timeout"


class LoadFailed(ServiceError):
    """An engine could not be loaded or warmed. The message is its reason."""

    status = 502
    type = "engine_error"
    code = "load_failed"
    retry_after = None


class InternalError(HeadraceError):
    """A fault of ours. The message names the request, the log the rest."""

    code = "internal_error"


class StartupError(HeadraceError):
    """The process cannot start: exit code 2."""
