"""Responses of POST /v1/responses: output items, the object that holds them, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from deployment.openai_base import ResponsePart, TypedEvent
from deployment.openai_responses import FlatTool, FlatToolChoice

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponsePart):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default=[], max_length=0)
    logprobs: list[Any] = Field(default=[], max_length=0)


class ReasoningText(ResponsePart):
    """The text of some reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageItem(ResponsePart):
    """What the model says."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(ResponsePart):
    """What the model thought."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: ItemStatus
    summary: list[Any] = Field(default=[], max_length=0)
    content: list[ReasoningText]


class CallItem(ResponsePart):
    """A call of a function."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it: incomplete if the status is."""
    status: ItemStatus


OutputItem = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(ResponsePart):
    """What became of the prompt's tokens. Not counted here."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(ResponsePart):
    """What the response's tokens were spent on."""

    reasoning_tokens: int


class ResponseUsage(ResponsePart):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(ResponsePart):
    """Why a response failed in mid-stream."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(ResponsePart):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningEcho(ResponsePart):
    """How much was to be thought."""

    effort: str | None
    summary: None = None


class TextFormat(ResponsePart):
    """What the text is."""

    type: Literal["text"] = "text"


class TextEcho(ResponsePart):
    """What the text should be like."""

    format: TextFormat = TextFormat()


class ResponseBody(ResponsePart):
    """A response, whole or as far as it is."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    system_fingerprint: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Any
    parallel_tool_calls: bool
    reasoning: ReasoningEcho
    service_tier: str
    temperature: float
    text: TextEcho = TextEcho()
    tool_choice: str | FlatToolChoice
    tools: list[FlatTool]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    user: Any


class ResponseEvent(TypedEvent):
    """An event that tells of the whole response."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseBody


class ItemEvent(TypedEvent):
    """An item begins or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(TypedEvent):
    """The text of an item begins or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDelta(TypedEvent):
    """A message goes on."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[Any] = Field(default=[], max_length=0)


class TextDone(TypedEvent):
    """The text of a message is complete."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[Any] = Field(default=[], max_length=0)


class ReasoningDelta(TypedEvent):
    """Reasoning goes on."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDone(TypedEvent):
    """The text of some reasoning is complete."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDelta(TypedEvent):
    """The arguments of a call go on."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(TypedEvent):
    """The arguments of a call are complete."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: int
    item_id: str
    output_index: int
    arguments: str


class StreamEvent(
    RootModel[
        ResponseEvent
        | ItemEvent
        | PartEvent
        | TextDelta
        | TextDone
        | ReasoningDelta
        | ReasoningDone
        | ArgumentsDelta
        | ArgumentsDone
    ]
):
    """Any event of a stream; it is sent under the name of its type."""
