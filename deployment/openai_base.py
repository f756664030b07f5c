"""What the request and response models share: strictness, and fields that are refused unless neutral.

The models of an endpoint are in its `openai_*.py`, in the shape that the official `openai` client sends and expects.
Requests are strict about what they know: a wrong type or range is refused with the name of the field. A parameter that
would change the output and is not served yet is refused unless it has a neutral value. One that no output depends on
is `Ignored`; what becomes of those that no model knows is the setting `unknown_parameters`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo
from pydantic_core import PydanticCustomError

_T = TypeVar("_T")


class RequestPart(BaseModel):
    """Base of what a client sends."""

    model_config = ConfigDict(
        extra="ignore", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ResponsePart(BaseModel):
    """Base of what the server sends."""


class TypedEvent(ResponsePart):
    """Base of events of a stream that are sent under the name of their type."""

    type: str


Ignored = Any
"""Type of a parameter that OpenAI's API knows and that changes nothing here."""


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


def text_or_list(value: object) -> str | None:
    """Which arm of "one text or a list" a value belongs to.

    Names of union arms stand in angle brackets, so that `field_name` can leave them out.
    """
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def check_needs(switch: str, value: _T, info: ValidationInfo) -> _T:
    """Refuse a field that means nothing while an earlier one is not true."""
    if value is not None and not info.data.get(switch):
        raise PydanticCustomError("missing_switch", "It needs `{switch}` to be true", {"switch": switch})
    return value
