"""Requests of POST /v1/responses.

Nothing is stored: what refers to an earlier response is refused, and the reasoning items of a response can be sent back
as they came.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from deployment.openai_base import Ignored, RequestPart, only, text_or_list
from deployment.openai_conversation import ReasoningEffort, ThinkingSwitch
from deployment.openai_generation import SampledRequest
from deployment.openai_tools import ToolName


class InputText(RequestPart):
    """One part of a message's content or of a call's output."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


InputContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[InputText], Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class InputMessage(RequestPart):
    """A message: of the user, of the application, or of an earlier response."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class InputCall(RequestPart):
    """A call of a function in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    namespace: Annotated[Any, only()] = None


class InputCallOutput(RequestPart):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent
    id: Ignored = None
    status: Ignored = None
    name: Ignored = None


class ReasoningPart(RequestPart):
    """One part of the reasoning of an earlier response."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(RequestPart):
    """The reasoning of an earlier response."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: list[ReasoningPart] | None = None
    """Counts where there is no content."""
    id: Ignored = None
    status: Ignored = None
    encrypted_content: Annotated[Any, only()] = None


_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _kind_of_item(value: object) -> str | None:
    """Which arm of `InputItem` a value belongs to; a message need not say what it is."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type", "message")
    return f"<{kind}>" if kind in _ITEM_TYPES else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item_type",
        custom_error_message="Input should be a message, a function_call, its output or reasoning",
    ),
]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[InputItem], Field(min_length=1), Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="input_type",
        custom_error_message="Input should be a string or a list of items",
    ),
]


class FlatTool(RequestPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Render the schema as the vendor does for strict tools. The arguments are not constrained by it."""


class FlatToolChoice(RequestPart):
    """The `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    name: str


def _text_or_object(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


class ReasoningOptions(RequestPart):
    """How much to think."""

    effort: ReasoningEffort | None = None
    """`none` turns thinking off."""
    summary: Ignored = None
    """Responses have the reasoning itself."""
    generate_summary: Ignored = None


class TextOptions(RequestPart):
    """What the text should be like."""

    format: Annotated[Any, only({"type": "text"})] = None
    verbosity: Annotated[Any, only("medium")] = None


class ResponseStreamOptions(RequestPart):
    """What a stream has besides the events."""

    include_obfuscation: Ignored = None


class ResponsesRequest(SampledRequest):
    """Body of POST /v1/responses."""

    input: Input
    instructions: str | None = None
    """A system message in front of `input`."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Largest number of new tokens. Unset: the rest of the context."""
    tools: list[FlatTool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<text>")]
            | Annotated[FlatToolChoice, Tag("<object>")],
            Discriminator(
                _text_or_object,
                custom_error_type="tool_choice_type",
                custom_error_message=(
                    "Input should be 'none', 'auto', 'required' or an object that names a function"
                ),
            ),
        ]
        | None
    ) = None
    """Unset: `auto`."""
    parallel_tool_calls: bool | None = None
    """false: the response ends after its first call."""
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingSwitch | None = None
    """The vendor's switch; OpenAI's API does not have it."""
    text: TextOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Reasoning is never encrypted here; the item's content can be sent back instead."""
    stream_options: ResponseStreamOptions | None = None

    top_logprobs: Annotated[Any, only(0)] = None
    truncation: Annotated[Any, only("disabled")] = None
    background: Annotated[Any, only(False)] = None
    previous_response_id: Annotated[Any, only()] = None
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    max_tool_calls: Annotated[Any, only()] = None
