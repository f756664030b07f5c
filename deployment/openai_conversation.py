"""What a chat prompt is rendered from: messages, tools, and whether and how much to think."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from deployment.openai_base import Ignored, RequestPart, only, text_or_list
from deployment.openai_tools import HistoryCall, NamedTool, Tool, ToolChoice


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
    name: Ignored = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Annotated[Any, only()] = None
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


class ChatPromptRequest(RequestPart):
    """The part of a chat request that decides its prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    thinking: ThinkingSwitch | None = None
    reasoning_effort: ReasoningEffort | None = None
    """`none` turns thinking off."""
    chat_template_kwargs: TemplateOptions | None = None
    """Counts where `thinking` and `reasoning_effort` are unset."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """Unset: `auto`."""

    continue_final_message: Annotated[Any, only(False)] = None
    add_generation_prompt: Annotated[Any, only(True)] = None

    @field_validator("tool_choice")
    @classmethod
    def _check_has_tool(cls, value: str | NamedTool | None, info: ValidationInfo) -> str | NamedTool | None:
        names = {tool.function.name for tool in info.data.get("tools") or []}
        if value == "required" and not names and "tools" in info.data:
            raise PydanticCustomError("missing_tools", "It needs `tools`")
        if isinstance(value, NamedTool) and value.function.name not in names and "tools" in info.data:
            raise PydanticCustomError("unknown_tool", "No function in `tools` has this name")
        return value

    @property
    def effort(self) -> str | int | None:
        """`reasoning_effort`, wherever it stands."""
        options = self.chat_template_kwargs
        return self.reasoning_effort or (options.reasoning_effort if options else None)

    @property
    def thinking_type(self) -> str | None:
        """The vendor's word for whether to think, if the request says so."""
        if self.thinking:
            return self.thinking.type
        options = self.chat_template_kwargs
        if options is None:
            return None
        is_wanted = options.enable_thinking if options.thinking is None else options.thinking
        return None if is_wanted is None else "enabled" if is_wanted else "disabled"
