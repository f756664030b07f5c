"""ReplyParser: the text of a reply in, deltas of reasoning, content and tool calls out. The vendor's parser at work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import deepseek_recipe as recipe
import msgspec

from deployment.logprobs import AlignedToken
from deployment.stop_strings import StopStrings

VENDOR_MODEL_NAME = "DeepSeek-V4.1-Flash"
Channel = Literal["reasoning_content", "content"]
_DSML: str = recipe.SpecialToken.Dsml.default_str()
_THINKING_END: str = recipe.SpecialToken.ThinkingEnd.default_str()
STRAY_MARKERS = (f"</{_DSML}", f"<{_DSML}", _DSML, _THINKING_END)
"""What may be left of malformed calls in a text; the reply ends before it."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Text of one of the two channels of a reply."""

    channel: Channel
    text: str
    tokens: list[AlignedToken] = field(default_factory=list)
    """The tokens of `text`, where log-probabilities are wanted."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A part of a tool call; the first part of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Parsed = ParsedText | ParsedCall


class _VendorFunction(msgspec.Struct):
    """What a chunk of the vendor's adds to a call's function."""

    name: str | None = None
    arguments: str = ""


class _VendorCall(msgspec.Struct):
    """What a chunk of the vendor's adds to a call."""

    index: int
    function: _VendorFunction
    id: str | None = None


class _VendorDelta(msgspec.Struct):
    """What a chunk of the vendor's adds to the message."""

    reasoning_content: str | None = None
    content: str | None = None
    tool_calls: list[_VendorCall] = []


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

    The reply also ends where the request forbids what comes: at a call without tools, at a second call if they
    may not be parallel, and at markup that belongs to no call.

    Args:
        conversation: as the prompt was rendered from.
        max_calls: tool calls that the reply may have; None: any number.
    """

    _decoder = msgspec.json.Decoder(_VendorChunk)

    def __init__(self, conversation: recipe.ConversationRequest, *, max_calls: int | None = 0) -> None:
        generator = recipe.ChatCompletionRequest.chunk_generator(conversation, "", VENDOR_MODEL_NAME)
        options = conversation.parsing_options
        options.parse_tool_calls = True  # without it, markup of calls would be content
        self._processor = recipe.StreamProcessor(generator, options)
        self._processor.push(recipe.InferenceChunk.ready())
        self._max_calls = max_calls
        self._channel: Channel = "content"
        self._stray_markers = StopStrings(STRAY_MARKERS)
        self._arguments: list[str] = []
        """Of every call so far."""
        self.finish_reason: str | None = None
        """Set when the reply is over."""

    @property
    def is_finished(self) -> bool:
        """Whether the reply is over."""
        return self.finish_reason is not None

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun; no text comes after it."""
        return bool(self._arguments)

    def push(self, text: str) -> list[Parsed]:
        """Add text."""
        return self._read(recipe.InferenceChunk.text(text))

    def finish(self, finish_reason: str) -> list[Parsed]:
        """End the reply for the engine's reason."""
        is_stop = finish_reason == "stop"
        reason = recipe.InferenceFinishReason.Stop if is_stop else recipe.InferenceFinishReason.Length
        parsed = self._read(recipe.InferenceChunk.finish(reason))
        if not is_stop and self.finish_reason == "tool_calls":
            self.finish_reason = finish_reason
        return parsed

    def _read(self, chunk: recipe.InferenceChunk) -> list[Parsed]:
        if self.is_finished:
            return []
        parsed: list[Parsed] = []  # what comes after an end adds nothing to it
        for made in self._processor.push(chunk):
            [choice] = self._decoder.decode(made.to_json()).choices
            delta = choice.delta
            if delta.reasoning_content:
                parsed += self._read_text("reasoning_content", delta.reasoning_content)
            if delta.content:
                parsed += self._read_text("content", delta.content)
            for call in delta.tool_calls:
                parsed += self._read_call(call)
            if choice.finish_reason is not None:
                parsed += self._read_end(choice.finish_reason)
        return parsed

    def _read_text(self, channel: Channel, text: str) -> list[Parsed]:
        if self.is_finished:
            return []
        held = self._release_text() if channel != self._channel else []
        self._channel = channel
        text = self._stray_markers.push(text)
        if self._stray_markers.is_found:
            self._finish("stop")
        return [*held, ParsedText(channel, text)] if text else held

    def _read_call(self, call: _VendorCall) -> list[Parsed]:
        if self.is_finished:
            return []
        held = self._release_text()
        if self._max_calls is not None and call.index >= self._max_calls:
            self._finish("tool_calls" if self._max_calls else "stop")
            return held
        if call.index == len(self._arguments):
            self._arguments.append("")
        self._arguments[call.index] += call.function.arguments
        return [*held, ParsedCall(call.index, call.function.arguments, call.id, call.function.name)]

    def _read_end(self, reason: str) -> list[Parsed]:
        if self.is_finished:
            return []
        held = self._release_text()
        self._finish(reason)
        return held

    def _release_text(self) -> list[Parsed]:
        held = self._stray_markers.flush()
        self._stray_markers = StopStrings(STRAY_MARKERS)
        return [ParsedText(self._channel, held)] if held else []

    def _finish(self, reason: str) -> None:
        """End the reply; calls are only announced to the client if it can read all of their arguments."""
        is_readable = all(map(_is_object, self._arguments))
        self.finish_reason = "stop" if reason == "tool_calls" and not is_readable else reason


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
