"""What the request and response models share: strictness, and fields that are refused unless neutral."""

from __future__ import annotations

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class RequestPart(BaseModel):
    """Base of what a client sends."""

    model_config = ConfigDict(
        extra="ignore", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ResponsePart(BaseModel):
    """Base of what the server sends."""


def is_none(value: object) -> bool:
    """For `Field(exclude_if=is_none)`: leave a field out instead of sending null."""
    return value is None


def only(*neutral: object) -> AfterValidator:
    """For a parameter that is not served yet: lets null and the neutral values through."""

    def refuse(value: object) -> object:
        # By type too: in Python, True == 1.
        if value is None or any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            return value
        raise PydanticCustomError("unsupported_parameter", "This server does not support it yet")

    return AfterValidator(refuse)
