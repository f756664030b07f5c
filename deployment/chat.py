"""Chat: the vendor's `deepseek_recipe` renders prompts and splits replies into reasoning and content."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import deepseek_recipe as recipe
import msgspec
from pydantic import BaseModel

from actors.messages import RequestOutput
from deployment.errors import InvalidRequestError
from deployment.generation import OutputReader, Piece, ReplyHeader, make_usage
from deployment.logprobs import AlignedToken, TokenAligner, chat_logprobs
from deployment.openai_types import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    ChatReplyMessage,
    ChatTokenLogprob,
    CompletionTokensDetails,
    Usage,
)
from deployment.tokenizer import Detokenizer, Tokenizer

VENDOR_MODEL_NAME = "DeepSeek-V4.1-Flash"
Channel = Literal["reasoning_content", "content"]
DROPPED_MARKER: str = recipe.SpecialToken.ThinkingEnd.default_str()
"""What the vendor's parser leaves out of a reply, besides some newlines."""


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

    def render(self, request: ChatCompletionRequest) -> ChatPrompt:
        """Render and encode; takes as long as the conversation is, so not on the event loop.

        Raises: InvalidRequestError for a conversation that the vendor's encoding does not have.
        """
        body = request.model_dump(
            include={"messages": {"__all__": {"role", "content", "reasoning_content", "prefix"}}}
            | dict.fromkeys(("thinking", "reasoning_effort"), True),
            exclude_none=True,
        )
        # Where several stop strings end at once, the vendor takes the first listed: let it be the longest.
        body |= {"model": VENDOR_MODEL_NAME, "stop": sorted(request.stop_strings, key=len, reverse=True)}
        try:
            conversation = recipe.ChatCompletionRequest(body).convert(self._options)
        except (recipe.ConversionError, ValueError) as error:
            raise InvalidRequestError(str(error), param="messages") from error
        return ChatPrompt(self._tokenizer.encode_conversation(conversation.conversation), conversation)


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Text of one of the two channels of a reply."""

    channel: Channel
    text: str
    tokens: list[AlignedToken] = field(default_factory=list)
    """The tokens of `text`, where log-probabilities are wanted."""


class _VendorDelta(msgspec.Struct):
    """What a chunk of the vendor's adds to the message."""

    reasoning_content: str | None = None
    content: str | None = None


class _VendorChoice(msgspec.Struct):
    """The one choice of a chunk."""

    delta: _VendorDelta
    finish_reason: str | None


class _VendorChunk(msgspec.Struct):
    """What we read of a chunk; its `choices` is a list of one."""

    choices: tuple[_VendorChoice]


class ReplyParser:
    """The vendor's stream parser, fed with text.

    It ends the content at a stop string, holds back what may become a marker, and leaves out the markers. How
    the text is cut into pieces makes no difference.
    """

    _decoder = msgspec.json.Decoder(_VendorChunk)

    def __init__(self, conversation: recipe.ConversationRequest) -> None:
        generator = recipe.ChatCompletionRequest.chunk_generator(conversation, "", VENDOR_MODEL_NAME)
        self._processor = recipe.StreamProcessor(generator, conversation.parsing_options)
        self._processor.push(recipe.InferenceChunk.ready())
        self.finish_reason: str | None = None
        """Set when the reply is over."""

    def push(self, text: str) -> list[ParsedText]:
        """Add text."""
        return self._read(self._processor.push(recipe.InferenceChunk.text(text)))

    def finish(self, finish_reason: str) -> list[ParsedText]:
        """End the reply for the engine's reason."""
        reason = (
            recipe.InferenceFinishReason.Stop
            if finish_reason == "stop"
            else recipe.InferenceFinishReason.Length
        )
        return self._read(self._processor.push(recipe.InferenceChunk.finish(reason)))

    def _read(self, chunks: list[recipe.ChatCompletionChunk]) -> list[ParsedText]:
        parsed = []
        for chunk in chunks:
            [choice] = self._decoder.decode(chunk.to_json()).choices
            if choice.delta.reasoning_content:
                parsed.append(ParsedText("reasoning_content", choice.delta.reasoning_content))
            if choice.delta.content:
                parsed.append(ParsedText("content", choice.delta.content))
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        return parsed


class ChatReply:
    """A chat reply; see `generation.Reply`. A delta is the texts that one engine output gave."""

    def __init__(
        self, header: ReplyHeader, request: ChatCompletionRequest, prompt: ChatPrompt, tokenizer: Tokenizer
    ) -> None:
        self._header = header
        self._include_usage = request.include_usage
        self._num_prompt_tokens = len(prompt.token_ids)
        self._is_thinking = prompt.conversation.conversation.thinking_mode
        self._tokenizer = tokenizer
        self._reader = OutputReader(Detokenizer(tokenizer, show_markers=True))
        self._parser = ReplyParser(prompt.conversation)
        self._num_reasoning_tokens = 0
        """Tokens up to the last one that gave reasoning."""
        self._aligner = TokenAligner(DROPPED_MARKER) if request.num_logprobs is not None else None

    @property
    def is_finished(self) -> bool:
        """Whether the reply ended, at a stop string or with the engine's last output."""
        return self._parser.finish_reason is not None

    def push(self, output: RequestOutput) -> list[ParsedText] | None:
        """Add an engine output."""
        texts: list[ParsedText] = []
        for piece in self._reader.read(output):
            texts += self._parse(piece)
            if self.is_finished:
                break
        if output.finish_reason is not None and not self.is_finished:
            texts += self._with_tokens(self._parser.finish(output.finish_reason))
        return texts or None

    def opening_chunks(self) -> list[BaseModel]:
        """The chunk that names the role."""
        return [self._chunk(ChatDelta(role="assistant", content=""))]

    def chunk(self, delta: list[ParsedText]) -> BaseModel:
        """One chunk for all texts of an engine output: the reasoning always comes first."""
        message = ChatDelta(
            reasoning_content=_join(delta, "reasoning_content") or None,
            content=_join(delta, "content") or None,
        )
        return self._chunk(message, logprobs=self._logprobs(delta))

    def closing_chunks(self) -> list[BaseModel]:
        """The finish reason, then the token counts if they are wanted."""
        chunks: list[BaseModel] = [self._chunk(ChatDelta(), finish_reason=self._parser.finish_reason)]
        if self._include_usage:
            chunks.append(ChatCompletionChunk(**self._header, choices=[], usage=self._usage()))
        return chunks

    def response(self, deltas: list[list[ParsedText]]) -> BaseModel:
        """The whole reply."""
        texts = [text for delta in deltas for text in delta]
        message = ChatReplyMessage(
            content=_join(texts, "content"),
            reasoning_content=_join(texts, "reasoning_content") if self._is_thinking else None,
        )
        assert self._parser.finish_reason is not None, "the reply is finished"
        choice = ChatChoice(
            message=message, logprobs=self._logprobs(texts), finish_reason=self._parser.finish_reason
        )
        return ChatCompletion(**self._header, choices=[choice], usage=self._usage())

    def _parse(self, piece: Piece) -> list[ParsedText]:
        if self._aligner:
            self._aligner.push(piece.text, piece.token)
        texts = self._parser.push(piece.text) if piece.text else []
        if any(text.channel == "reasoning_content" for text in texts):
            self._num_reasoning_tokens = self._reader.num_tokens
        return self._with_tokens(texts)

    def _with_tokens(self, texts: list[ParsedText]) -> list[ParsedText]:
        if self._aligner is None:
            return texts
        return [replace(text, tokens=self._aligner.take(text.text)) for text in texts]

    def _chunk(
        self, delta: ChatDelta, *, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None
    ) -> ChatCompletionChunk:
        choice = ChatChunkChoice(delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return ChatCompletionChunk(**self._header, choices=[choice])

    def _logprobs(self, texts: list[ParsedText]) -> ChatLogprobs | None:
        if self._aligner is None:
            return None
        reasoning = self._channel_logprobs(texts, "reasoning_content") if self._is_thinking else None
        return ChatLogprobs(content=self._channel_logprobs(texts, "content"), reasoning_content=reasoning)

    def _channel_logprobs(self, texts: list[ParsedText], channel: Channel) -> list[ChatTokenLogprob]:
        tokens = [token for text in texts if text.channel == channel for token in text.tokens]
        return chat_logprobs(self._tokenizer, tokens)

    def _usage(self) -> Usage:
        details = None
        if self._is_thinking:
            details = CompletionTokensDetails(reasoning_tokens=self._num_reasoning_tokens)
        return make_usage(self._num_prompt_tokens, self._reader.num_tokens, details)


def _join(texts: list[ParsedText], channel: Channel) -> str:
    return "".join(text.text for text in texts if text.channel == channel)
