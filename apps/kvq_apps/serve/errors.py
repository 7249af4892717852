"""Errors of requests, in the form that OpenAI's clients read."""

from collections.abc import Mapping
from typing import Any

from kvq.errors import BackendError, CacheError, KvqError, argument
from kvq_runtime.serving.request import PoolError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
# An error that repeats what a client sent does not repeat all of it.
_MOST_CHARACTERS = 1000
_POOL_STATUS = {"not_read": 408, "queue_full": 429, "shutting_down": 503}


class RequestError(KvqError):
    """Refuses a request with an HTTP `status`, the field `param` and a stable `code`.

    The same request may succeed `retry_s` seconds later. `numbers` say by how much it failed.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s
        self.numbers = dict(numbers or {})


def as_request_error(error: BaseException) -> RequestError:
    """Returns `error` with its status: 400 for the user's mistakes, 500 for faults of kvq."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PoolError):
        status = _POOL_STATUS[error.code]
        return RequestError(str(error), status=status, code=error.code, retry_s=error.retry_s)
    if isinstance(error, BackendError | CacheError):
        return RequestError(str(error), status=500, code="engine_error")
    if isinstance(error, KvqError):
        return RequestError(str(error))
    return RequestError(
        f"internal error: {type(error).__name__}; the server's log says more",
        status=500,
        code="internal_error",
    )


def too_long(
    subject: str, param: str, count: int, context_tokens: int, advice: str
) -> RequestError:
    """Returns the error for a text of more tokens than the context holds."""
    # The tokens of a text that is much too long are not all counted.
    return RequestError(
        f"{subject} has at least {count} tokens and this model's context holds "
        f"{context_tokens}; {advice}, or serve with a larger {argument('--ctx-size')}",
        param=param,
        code="context_length_exceeded",
        numbers={"n_prompt_tokens": count, "n_ctx": context_tokens},
    )


def error_body(error: RequestError) -> dict[str, Any]:
    """Returns the JSON body of the answer to a failed request."""
    message, half = str(error), _MOST_CHARACTERS // 2
    if len(message) > _MOST_CHARACTERS:
        # Its end says what to do.
        message = f"{message[:half]} ... {message[-half:]}"
    return {
        "error": {
            "message": message,
            "type": _TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
            **error.numbers,
        }
    }
