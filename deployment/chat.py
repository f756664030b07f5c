"""Chat: the vendor's `deepseek_recipe` renders prompts and splits replies into reasoning, content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe
from pydantic import BaseModel

from actors.messages import RequestOutput
from deployment.chat_reader import ChatReader
from deployment.errors import InvalidRequestError
from deployment.generation import CompletionStream, ReplyHeader, make_usage
from deployment.logprobs import chat_logprobs
from deployment.openai_chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatReplyMessage,
    ChatTokenLogprob,
)
from deployment.openai_conversation import ChatPromptRequest
from deployment.openai_generation import CompletionTokensDetails, Usage
from deployment.reply_parser import VENDOR_MODEL_NAME, Channel, Parsed, ParsedText
from deployment.tokenizer import Tokenizer
from deployment.tool_calls import call_deltas, whole_calls


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat request, rendered."""

    token_ids: list[int]
    conversation: recipe.ConversationRequest
    """The vendor's view of it; the reply parser starts from there."""


class ChatRenderer:
    """Renders chat requests into prompts."""

    def __init__(self, tokenizer: Tokenizer, *, thinks_by_default: bool) -> None:
        self._tokenizer = tokenizer
        self._options = recipe.ConversionOptions().with_default_thinking_mode(thinks_by_default)

    def render(self, request: ChatPromptRequest, stop_strings: Sequence[str] = ()) -> ChatPrompt:
        """Render and encode; takes as long as the conversation is, so not on the event loop.

        Args:
            request: what to render.
            stop_strings: for the reply's parser; the prompt does not depend on them.

        Raises: InvalidRequestError for a conversation that the vendor's encoding does not have.
        """
        effort = request.effort
        # The vendor's conversion has names only; a number takes the place of the default's in the prompt.
        is_number = isinstance(effort, int)
        body = _vendor_body(request, stop_strings) | {"reasoning_effort": "high" if is_number else effort}
        try:
            conversation = recipe.ChatCompletionRequest(_without_none(body)).convert(self._options)
        except (OverflowError, RecursionError) as error:
            message = f"'tools': {error}."  # nothing else in the body has numbers or depth of its own
            raise InvalidRequestError(message, param="tools") from error
        except (recipe.ConversionError, ValueError) as error:
            raise _error_of_conversion(str(error)) from error
        token_ids = self._tokenizer.encode_conversation(
            conversation.conversation, effort=effort if isinstance(effort, int) else None
        )
        return ChatPrompt(token_ids, conversation)


def _vendor_body(request: ChatPromptRequest, stop_strings: Sequence[str]) -> dict[str, Any]:
    """A request as the vendor's conversion takes it."""
    message_fields = {"role", "content", "reasoning_content", "prefix", "tool_calls", "tool_call_id"}
    dumped = request.model_dump(
        include={"messages": {"__all__": message_fields}, "tools": True, "tool_choice": True},
        exclude_none=True,
    )
    thinking = request.thinking_type
    return {
        "model": VENDOR_MODEL_NAME,
        "messages": dumped["messages"],
        "tools": dumped.get("tools") or None,
        "tool_choice": dumped.get("tool_choice") if request.tools else None,
        "thinking": {"type": thinking} if thinking else None,
        # Where several stop strings end at once, the vendor takes the first listed: let it be the longest.
        "stop": sorted(stop_strings, key=len, reverse=True),
    }


def _without_none(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _error_of_conversion(message: str) -> InvalidRequestError:
    """The vendor's refusal, with the field that it is about."""
    if "tool_choice" in message:
        return InvalidRequestError(
            f"'tool_choice': {message}. Turn thinking off, or let the model choose.", param="tool_choice"
        )
    named = re.match(r"Invalid '(.*?)'", message)
    is_about_tools = message.startswith(("Tool names", "Invalid schema"))
    param = named[1] if named else "tools" if is_about_tools else "messages"
    return InvalidRequestError(message, param=param)


class ChatReply(CompletionStream):
    """A chat reply; see `generation.Reply`. A delta is what one engine output gave."""

    def __init__(
        self, header: ReplyHeader, request: ChatCompletionRequest, prompt: ChatPrompt, tokenizer: Tokenizer
    ) -> None:
        self._header = header
        self._include_usage = request.include_usage
        self._num_prompt_tokens = len(prompt.token_ids)
        self._tokenizer = tokenizer
        self._has_logprobs = request.num_logprobs is not None
        self._reader = ChatReader(
            prompt.conversation,
            tokenizer,
            max_calls=request.max_calls,
            wants_logprobs=self._has_logprobs,
        )

    @property
    def is_finished(self) -> bool:
        """Whether the reply ended, at a stop string or with the engine's last output."""
        return self._reader.finish_reason is not None

    def push(self, output: RequestOutput) -> list[Parsed] | None:
        """Add an engine output."""
        return self._reader.push(output) or None

    def opening_chunks(self) -> list[BaseModel]:
        """The chunk that names the role."""
        return [self._chunk(ChatDelta(role="assistant", content=""))]

    def chunks(self, delta: list[Parsed]) -> list[BaseModel]:
        """One chunk for all that an engine output gave: reasoning comes before content, that before calls."""
        message = ChatDelta(
            reasoning_content=_join(delta, "reasoning_content") or None,
            content=_join(delta, "content") or None,
            tool_calls=call_deltas(delta) or None,
        )
        return [self._chunk(message, logprobs=self._logprobs(delta))]

    def closing_chunks(self) -> list[BaseModel]:
        """The finish reason, then the token counts if they are wanted."""
        chunks: list[BaseModel] = [self._chunk(ChatDelta(), finish_reason=self._reader.finish_reason)]
        if self._include_usage:
            chunks.append(ChatCompletionChunk(**self._header, choices=[], usage=self._usage()))
        return chunks

    def response(self, deltas: list[list[Parsed]]) -> BaseModel:
        """The whole reply."""
        texts = [text for delta in deltas for text in delta]
        content, calls = _join(texts, "content"), whole_calls(texts)
        message = ChatReplyMessage(
            content=None if calls and not content else content,
            reasoning_content=_join(texts, "reasoning_content") if self._reader.is_thinking else None,
            tool_calls=calls or None,
        )
        assert self._reader.finish_reason is not None, "the reply is finished"
        choice = ChatChoice(
            message=message, logprobs=self._logprobs(texts), finish_reason=self._reader.finish_reason
        )
        return ChatCompletion(**self._header, choices=[choice], usage=self._usage())

    def _chunk(
        self, delta: ChatDelta, *, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatCompletionChunk(**self._header, choices=[choice])

    def _logprobs(self, texts: list[Parsed]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        reasoning = self._channel_logprobs(texts, "reasoning_content") if self._reader.is_thinking else None
        return ChatLogprobs(content=self._channel_logprobs(texts, "content"), reasoning_content=reasoning)

    def _channel_logprobs(self, texts: list[Parsed], channel: Channel) -> list[ChatTokenLogprob]:
        tokens = [token for text in _texts(texts, channel) for token in text.tokens]
        return chat_logprobs(self._tokenizer, tokens)

    def _usage(self) -> Usage:
        details = None
        if self._reader.is_thinking:
            details = CompletionTokensDetails(reasoning_tokens=self._reader.num_reasoning_tokens)
        return make_usage(self._num_prompt_tokens, self._reader.num_tokens, details)


def _texts(parsed: list[Parsed], channel: Channel) -> list[ParsedText]:
    return [part for part in parsed if isinstance(part, ParsedText) and part.channel == channel]


def _join(parsed: list[Parsed], channel: Channel) -> str:
    return "".join(part.text for part in _texts(parsed, channel))
