"""Reading a JSON request body: bounded, typed, and refused with a reason."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from deployment.errors import BodyTooLargeError
from deployment.http_errors import error_of_validation

_M = TypeVar("_M", bound=BaseModel)


async def read_json(request: Request, model: type[_M], max_bytes: int) -> _M:
    """The body of a request, validated.

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
        return model.model_validate_json(body)
    except ValidationError as error:
        raise error_of_validation(error) from error


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    """The body, of which no more than `max_bytes` are kept, whatever its Content-Length says."""
    too_large = BodyTooLargeError(f"The body is larger than {max_bytes} bytes.", param="body")
    claimed = request.headers.get("content-length", "")
    if claimed.isdecimal() and int(claimed) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)
