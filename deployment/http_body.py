"""Reading a JSON request body: bounded, typed, and refused with a reason."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from deployment.errors import BodyTooLargeError
from deployment.http_errors import error_of_validation, field_name

logger = logging.getLogger(__name__)

_M = TypeVar("_M", bound=BaseModel)


async def read_json(
    request: Request, model: type[_M], max_bytes: int, unknown_parameters: Literal["ignore", "refuse"]
) -> _M:
    """The body of a request, validated.

    Args:
        request: not read yet.
        model: what the body should be.
        max_bytes: largest body that is read.
        unknown_parameters: what to do about fields that `model` does not have; see `ApiConfig`.

    Raises: HTTPException 415 if it does not claim to be JSON, BodyTooLargeError, InvalidRequestError naming
        the field that is wrong.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"The Content-Type is '{media_type}'; it should be 'application/json'.",
        )
    body = await _read_bounded(request, max_bytes)
    try:
        parsed = model.model_validate_json(body, extra="forbid" if unknown_parameters == "refuse" else None)
    except ValidationError as error:
        raise error_of_validation(error) from error
    if logger.isEnabledFor(logging.DEBUG) and (names := _unknown_parameters(model, body)):
        logger.debug("%s %s: ignored parameters: %r", request.method, request.url.path, names)
    return parsed


def _unknown_parameters(model: type[BaseModel], body: bytes) -> list[str]:
    """Names of the fields of a valid body that `model` does not have."""
    try:
        model.model_validate_json(body, extra="forbid")
    except ValidationError as error:
        return [field_name(detail["loc"]) for detail in error.errors(include_url=False, include_input=False)]
    return []


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    """The body, of which no more than `max_bytes` are kept, whatever its Content-Length says."""
    too_large = BodyTooLargeError(f"The body is larger than {max_bytes} bytes.", param="body")
    claimed = request.headers.get("content-length", "")
    if claimed.isdecimal() and int(claimed) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > max_bytes:
            raise too_large
        body += part
    return bytes(body)
