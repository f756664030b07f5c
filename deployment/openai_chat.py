"""Requests and responses of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from deployment.openai_base import ResponsePart, check_needs, is_none, only
from deployment.openai_conversation import ChatMessage, ReasoningEffort, TemplateOptions, ThinkingSwitch
from deployment.openai_generation import MAX_LOGPROBS, GenerationRequest, Usage
from deployment.openai_tools import CallDelta, NamedTool, ReplyCall, Tool, ToolChoice


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """OpenAI's newer name of `max_tokens`; it wins where both are given."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    thinking: ThinkingSwitch | None = None
    reasoning_effort: ReasoningEffort | None = None
    """`none` turns thinking off."""
    chat_template_kwargs: TemplateOptions | None = None
    """Counts where `thinking` and `reasoning_effort` are unset."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """Unset: `auto`."""
    parallel_tool_calls: bool | None = None
    """false: the reply ends after its first call."""

    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
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

    @field_validator("top_logprobs")
    @classmethod
    def _check_has_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        return check_needs("logprobs", value, info)

    @property
    def max_calls(self) -> int | None:
        """Tool calls that the reply may have; None: any number."""
        if not self.tools or self.tool_choice == "none":
            return 0
        return 1 if self.parallel_tool_calls is False else None

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

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report at each position; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_field(self) -> str:
        """Name of the field that has the prompt."""
        return "messages"

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """Largest number of new tokens, with the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().output_limit


class TopLogprob(ResponsePart):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A chosen token and its strongest rivals."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponsePart):
    """Log-probabilities of the tokens whose text stands beside this."""

    content: list[ChatTokenLogprob] | None = None
    reasoning_content: list[ChatTokenLogprob] | None = Field(default=None, exclude_if=is_none)
    refusal: None = None


class ChatReplyMessage(ResponsePart):
    """The assistant's whole message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """null: there are tool calls and nothing else."""
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[ReplyCall] | None = Field(default=None, exclude_if=is_none)
    refusal: None = None


class ChatChoice(ResponsePart):
    """The one choice of a whole chat reply."""

    index: int = 0
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(ResponsePart):
    """A whole chat reply."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(ResponsePart):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=is_none)
    content: str | None = Field(default=None, exclude_if=is_none)
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[CallDelta] | None = Field(default=None, exclude_if=is_none)


class ChatChunkChoice(ResponsePart):
    """The one choice of a chat chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(ResponsePart):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
