"""Tools, the choice among them, and calls of them, as a client sends and receives them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from deployment.openai_base import RequestPart, ResponsePart, is_none

# --- requests ---


ToolName = Annotated[str, Field(pattern=r"\A[a-zA-Z0-9_-]+\z")]


class FunctionTool(RequestPart):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Render the schema as the vendor does for strict tools. The arguments are not constrained by it."""


class Tool(RequestPart):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(RequestPart):
    """Which function."""

    name: str


class NamedTool(RequestPart):
    """The `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    function: FunctionName


def _text_or_object(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<object>" if isinstance(value, dict | NamedTool) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[NamedTool, Tag("<object>")],
    Discriminator(
        _text_or_object,
        custom_error_type="tool_choice_type",
        custom_error_message="Input should be 'none', 'auto', 'required' or an object that names a function",
    ),
]


class CalledFunction(RequestPart):
    """A function and the arguments that it was called with."""

    name: str
    arguments: str
    """A JSON object as text; other text is passed to the model as it is."""


class HistoryCall(RequestPart):
    """A call in an assistant's earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


# --- responses ---


class ReplyFunction(ResponsePart):
    """The function that the model calls."""

    name: str
    arguments: str
    """JSON text, as the model wrote it: incomplete if the reply ended inside the call."""


class ReplyCall(ResponsePart):
    """A call in a whole reply."""

    id: str
    type: Literal["function"] = "function"
    function: ReplyFunction


class FunctionDelta(ResponsePart):
    """What a chunk adds to a call."""

    name: str | None = Field(default=None, exclude_if=is_none)
    arguments: str


class CallDelta(ResponsePart):
    """A part of a call in a stream; only the first one has id, type and name."""

    index: int
    id: str | None = Field(default=None, exclude_if=is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=is_none)
    function: FunctionDelta
