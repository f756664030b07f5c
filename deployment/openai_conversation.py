"""What a chat prompt is rendered from: messages, and whether and how much to think."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from deployment.openai_base import RequestPart, only, text_or_list
from deployment.openai_tools import HistoryCall


class TextPart(RequestPart):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class ChatMessage(RequestPart):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool", "latest_reminder"]
    tool_calls: list[HistoryCall] | None = None
    """Assistant only: the calls that it made."""
    content: Content | None = Field(default=None, validate_default=True)
    """Only an assistant's message that has calls may leave it out."""
    tool_call_id: str | None = Field(default=None, validate_default=True)
    """Tool only: the call that this answers."""
    reasoning_content: str | None = None
    """Assistant only: the reasoning that came with this answer."""
    prefix: bool | None = None
    """Last assistant message only: the reply continues it."""
    function_call: Annotated[Any, only()] = None

    @field_validator("tool_calls")
    @classmethod
    def _check_may_call(
        cls, value: list[HistoryCall] | None, info: ValidationInfo
    ) -> list[HistoryCall] | None:
        if value and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("calls_of_another_role", "Only assistant messages have tool calls")
        return value or None

    @field_validator("content")
    @classmethod
    def _check_has_content(cls, value: Any, info: ValidationInfo) -> Any:
        has_calls = "tool_calls" not in info.data or info.data["tool_calls"]
        if value is None and not has_calls:
            raise PydanticCustomError(
                "missing_content",
                "Input should be a string or a list of text parts; only tool calls replace it",
            )
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _check_names_its_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise PydanticCustomError("missing_call_id", "A tool message names the call that it answers")
        return value


def _text_or_number(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<number>" if isinstance(value, int) else None


ReasoningEffort = Annotated[
    Annotated[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"], Tag("<text>")]
    | Annotated[int, Field(ge=1, le=100), Tag("<number>")],
    Discriminator(
        _text_or_number,
        custom_error_type="effort_type",
        custom_error_message="Input should be 'none', 'low', 'high', 'xhigh', 'max' or a number from 1 to 100",
    ),
]


class ThinkingSwitch(RequestPart):
    """The vendor's switch between its two modes."""

    type: Literal["enabled", "disabled", "adaptive"]


class TemplateOptions(RequestPart):
    """`chat_template_kwargs`, in which other servers' clients switch thinking."""

    model_config = ConfigDict(extra="forbid")

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
