"""What POST /v1/responses asks for, as the chat request that asks for the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from deployment.errors import InvalidRequestError
from deployment.http_errors import error_of_validation
from deployment.openai_chat import ChatCompletionRequest
from deployment.openai_responses import (
    FlatTool,
    FlatToolChoice,
    InputCall,
    InputContent,
    InputItem,
    InputMessage,
    InputReasoning,
    ResponsesRequest,
)

_SHARED_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stream",
    "service_tier",
    "parallel_tool_calls",
)


class ChatOfResponse(ChatCompletionRequest):
    """A chat request that came as POST /v1/responses, where its fields have other names."""

    @property
    def prompt_field(self) -> str:
        """Name of the field that has the prompt."""
        return "input"

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """Largest number of new tokens, with the name of the field that says so."""
        return "max_output_tokens", self.max_completion_tokens


def as_chat(request: ResponsesRequest) -> ChatOfResponse:
    """The chat request that asks for the same.

    Raises: InvalidRequestError naming the field of `request`.
    """
    body: dict[str, Any] = {name: getattr(request, name) for name in _SHARED_FIELDS}
    body |= {
        "messages": _messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "thinking": request.thinking,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "tools": [_tool(tool) for tool in request.tools or []],
        "tool_choice": _tool_choice(request.tool_choice),
    }
    try:
        return ChatOfResponse.model_validate(body)
    except ValidationError as error:
        raise named_as_in_response(error_of_validation(error)) from error


def named_as_in_response(error: InvalidRequestError) -> InvalidRequestError:
    """An error of a chat request, with the field of the Responses request that it is about."""
    if error.param is None or not error.param.startswith("messages"):
        return error
    return InvalidRequestError(f"'input', as a conversation: {error.message}", param="input")


def _tool(tool: FlatTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(choice: str | FlatToolChoice | None) -> Any:
    if isinstance(choice, FlatToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    return messages + _messages_of_items(request.input)


def _messages_of_items(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """One message for each item, but what the assistant did in one turn is one message.

    A turn is reasoning, then a message, then calls, of which any may be missing.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] = {}
    """The assistant's message that may go on; empty if none may."""

    def take_turn(*begun: str) -> dict[str, Any]:
        """The assistant's message, a new one if the last has any of the parts that end what comes before."""
        nonlocal turn
        if not turn or any(name in turn for name in begun):
            turn = {"role": "assistant"}
            messages.append(turn)
        return turn

    for item in items:
        if isinstance(item, InputReasoning):
            take_turn("reasoning_content", "content", "tool_calls")["reasoning_content"] = _reasoning(item)
        elif isinstance(item, InputCall):
            take_turn().setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, InputMessage) and item.role == "assistant":
            take_turn("content", "tool_calls")["content"] = _content(item.content)
        elif isinstance(item, InputMessage):
            turn = {}
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _content(item.content)})
        else:
            turn = {}
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    for message in messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")  # a turn that ended in its reasoning
    return messages


def _content(content: InputContent) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _reasoning(item: InputReasoning) -> str:
    return "".join(part.text for part in item.content or item.summary or [])


def _call(item: InputCall) -> dict[str, Any]:
    return {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments},
    }
