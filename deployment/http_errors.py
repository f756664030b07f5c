"""Errors as OpenAI-shaped HTTP responses, whoever raised them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from actors.messages import RequestError
from deployment.errors import (
    ApiError,
    EngineDeadError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnknownParameterError,
)
from deployment.openai_errors import ErrorBody, ErrorDetail

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody receives it, but logs show it."""


def error_body(error: ApiError) -> ErrorBody:
    """The body that tells a client of `error`."""
    detail = ErrorDetail(message=error.message, type=error.error_type, param=error.param, code=error.code)
    return ErrorBody(error=detail)


def error_response(error: ApiError) -> Response:
    """The response that tells a client of `error`."""
    return _json(error.status, error_body(error), error.headers)


def internal_error() -> InternalError:
    """What a client may know about an error that nobody expected: nothing."""
    return InternalError("The server failed while it worked on this request. Its log says why.")


def error_of_request(error: RequestError) -> ApiError:
    """The engine's reason for ending a request, as an API error."""
    match error.kind:
        case "overloaded":
            return OverloadedError(error.message, retry_after_s=error.retry_after_s)
        case "invalid":
            return InvalidRequestError(error.message)
        case "unavailable":
            return EngineDeadError(error.message, retry_after_s=error.retry_after_s)
        case "internal":
            return InternalError(error.message)


def error_of_validation(error: ValidationError) -> InvalidRequestError:
    """The first thing that is wrong with a request body, as an API error."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"The body is not valid JSON in UTF-8. {first['msg']}.", param="body")
    name = field_name(first["loc"])
    if first["type"] == "extra_forbidden":
        return UnknownParameterError(f"'{name}': This server does not know this parameter.", param=name)
    return InvalidRequestError(f"'{name}': {first['msg']}.", param=name)


def field_name(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` for pydantic's ("messages", 0, "content", "<list>"); `body` for the whole.

    The arms of the unions in `openai_*.py` have names in angle brackets, which mean nothing to a client.
    """
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith("<"):
            name += f".{part}"
    return name.removeprefix(".") or "body"


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), f"{error=}"
    return error_response(error)


async def _answer_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"{error=}"
    status = HTTPStatus(error.status_code)
    error_type = InternalError.error_type if status >= 500 else InvalidRequestError.error_type
    detail = ErrorDetail(message=error.detail, type=error_type, param=None, code=status.name.lower())
    return _json(status, ErrorBody(error=detail), error.headers)


async def _answer_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(internal_error())


def _json(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        body.model_dump_json(), status_code=status, media_type="application/json", headers=headers
    )


EXCEPTION_HANDLERS: dict[Any, Any] = {
    ApiError: _answer_api_error,
    HTTPException: _answer_http_exception,
    ClientDisconnect: _answer_disconnect,
    Exception: _answer_unexpected,
}
"""For `Starlette(exception_handlers=...)`."""
