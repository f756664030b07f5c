"""Every exception of hotset that a caller may want to tell apart, with the HTTP status an `ApiError` answers.

    HotsetError
    ├── ApiError                        status  type                   code
    │   ├── InvalidRequestError           400   invalid_request_error
    │   │   ├── ContextLengthError        400   invalid_request_error  context_length_exceeded
    │   │   └── UnknownParameterError     400   invalid_request_error  unknown_parameter
    │   ├── AuthenticationError           401   invalid_request_error  invalid_api_key (WWW-Authenticate)
    │   ├── ModelNotFoundError            404   invalid_request_error  model_not_found
    │   ├── BodyTooLargeError             413   invalid_request_error  body_too_large
    │   ├── OverloadedError               429   rate_limit_exceeded    (Retry-After)
    │   ├── RateLimitError                429   rate_limit_exceeded    rate_limit_exceeded (Retry-After)
    │   ├── InternalError                 500   internal_error
    │   └── EngineDeadError               503   internal_error         engine_dead (Retry-After)
    ├── SettingsError                   the engine does not start
    └── ShardsLostError                 ends the engine core, which answers every open request

An `ApiError` is what a client may read: its message names the field, the value, the limit and what to do.
"""

from __future__ import annotations

import math
from typing import ClassVar


class HotsetError(Exception):
    """Base of all exceptions raised on purpose."""


class ApiError(HotsetError):
    """An error with an OpenAI-shaped body: `{"error": {"message", "type", "code", "param"}}`.

    Attributes:
        status: HTTP status.
        error_type: OpenAI's `type`.
        code: OpenAI's `code`, or None.
        param: the field of the request that is at fault, or None.
        message: one or two sentences for the client.
        retry_after_s: seconds for a Retry-After header, or None; each class has a default.
    """

    status: ClassVar[int]
    error_type: ClassVar[str]
    code: ClassVar[str | None] = None
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {} if self.retry_after_s is None else {"Retry-After": str(math.ceil(self.retry_after_s))}


class InvalidRequestError(ApiError):
    """The request can never be served as it is."""

    status = 400
    error_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt and output, longer than the context or the KV memory."""

    code = "context_length_exceeded"


class UnknownParameterError(InvalidRequestError):
    """A parameter that this server does not know, where such are refused."""

    code = "unknown_parameter"


class AuthenticationError(ApiError):
    """The request has no API key, or none that is accepted."""

    status = 401
    error_type = "invalid_request_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        """See ApiError."""
        return super().headers | {"WWW-Authenticate": "Bearer"}


class ModelNotFoundError(ApiError):
    """The request names a model that is not served here."""

    status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"


class BodyTooLargeError(ApiError):
    """The request body exceeds `max_body_bytes`."""

    status = 413
    error_type = "invalid_request_error"
    code = "body_too_large"


class OverloadedError(ApiError):
    """Too many requests wait already; the same request may succeed later."""

    status = 429
    error_type = "rate_limit_exceeded"


class RateLimitError(ApiError):
    """This API key has sent too many requests lately."""

    status = 429
    error_type = "rate_limit_exceeded"
    code = "rate_limit_exceeded"


class InternalError(ApiError):
    """The request failed for a reason that is not the client's."""

    status = 500
    error_type = "internal_error"


class EngineDeadError(ApiError):
    """No engine runs: it comes up, or has lost its shards and is being replaced."""

    status = 503
    error_type = "internal_error"
    code = "engine_dead"
    default_retry_after_s = 10.0  # to load the model again from files in the page cache


class SettingsError(HotsetError):
    """Settings that contradict each other, the checkpoint or the machine."""


class ShardsLostError(HotsetError):
    """A shard died, failed or did not reply in time; the whole gang must be rebuilt."""
