"""The body of every response that is not a success."""

from __future__ import annotations

from deployment.openai_base import ResponsePart


class ErrorDetail(ResponsePart):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponsePart):
    """Body of every response that is not a success."""

    error: ErrorDetail
