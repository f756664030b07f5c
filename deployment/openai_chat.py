"""Requests and responses of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from deployment.openai_base import ResponsePart, check_needs, is_none, only
from deployment.openai_conversation import ChatPromptRequest
from deployment.openai_generation import MAX_LOGPROBS, GenerationRequest, Usage
from deployment.openai_tools import CallDelta, ReplyCall


class ChatCompletionRequest(ChatPromptRequest, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    """OpenAI's newer name of `max_tokens`; it wins where both are given."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool | None = None
    """false: the reply ends after its first call."""

    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    verbosity: Annotated[Any, only("medium")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None

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
    system_fingerprint: str
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
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
