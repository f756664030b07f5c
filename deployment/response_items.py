"""OutputItems: parts of a reply become the output items of a response, and events that tell how these grow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from deployment.openai_base import TypedEvent
from deployment.openai_response_parts import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    TextDelta,
    TextDone,
)
from deployment.reply_parser import Channel, Parsed, ParsedCall, ParsedText


class _GrowingItem(ABC):
    """An item that is not done.

    Args:
        source: what it is made of: a channel, or the number of a call.
        item_id: its id.
        index: its place in the output.
        sequence: numbers the events of the stream.
    """

    def __init__(self, source: Channel | int, item_id: str, index: int, sequence: Iterator[int]) -> None:
        self.source = source
        self._id = item_id
        self._index = index
        self._sequence = sequence
        self._texts: list[str] = []

    def begin(self) -> list[TypedEvent]:
        """The events that announce it."""
        added = ItemEvent(
            type="response.output_item.added",
            sequence_number=next(self._sequence),
            output_index=self._index,
            item=self.item("in_progress"),
        )
        part = self._part("")
        return [added] if part is None else [added, self._part_event("response.content_part.added", part)]

    def grow(self, text: str) -> TypedEvent:
        """The event that adds to it."""
        self._texts.append(text)
        return self._delta(text)

    def end(self, item: OutputItem) -> list[TypedEvent]:
        """The events that end it.

        Args:
            item: as it is when it is done.
        """
        events = [self._done()]
        if (part := self._part(self._text)) is not None:
            events.append(self._part_event("response.content_part.done", part))
        done = ItemEvent(
            type="response.output_item.done",
            sequence_number=next(self._sequence),
            output_index=self._index,
            item=item,
        )
        return [*events, done]

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """The item as it is now; one in progress has no content."""

    @abstractmethod
    def _part(self, text: str) -> OutputText | ReasoningText | None:
        """What its content consists of, if it has any."""

    @abstractmethod
    def _delta(self, text: str) -> TypedEvent:
        """`text` is new."""

    @abstractmethod
    def _done(self) -> TypedEvent:
        """All of the text is there."""

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _place(self) -> dict[str, Any]:
        """What the events inside an item have in common."""
        return {
            "sequence_number": next(self._sequence),
            "item_id": self._id,
            "output_index": self._index,
        }

    def _part_event(self, event_type: Any, part: OutputText | ReasoningText) -> PartEvent:
        return PartEvent(type=event_type, part=part, **self._place())


class _Message(_GrowingItem):
    def item(self, status: ItemStatus) -> MessageItem:
        content = [] if status == "in_progress" else [self._part(self._text)]
        return MessageItem(id=self._id, status=status, content=content)

    def _part(self, text: str) -> OutputText:
        return OutputText(text=text)

    def _delta(self, text: str) -> TextDelta:
        return TextDelta(delta=text, **self._place())

    def _done(self) -> TextDone:
        return TextDone(text=self._text, **self._place())


class _Reasoning(_GrowingItem):
    def item(self, status: ItemStatus) -> ReasoningItem:
        content = [] if status == "in_progress" else [self._part(self._text)]
        return ReasoningItem(id=self._id, status=status, content=content)

    def _part(self, text: str) -> ReasoningText:
        return ReasoningText(text=text)

    def _delta(self, text: str) -> ReasoningDelta:
        return ReasoningDelta(delta=text, **self._place())

    def _done(self) -> ReasoningDone:
        return ReasoningDone(text=self._text, **self._place())


class _Call(_GrowingItem):
    def __init__(self, call: ParsedCall, item_id: str, index: int, sequence: Iterator[int]) -> None:
        super().__init__(call.index, item_id, index, sequence)
        assert call.id is not None, f"{call=}"
        assert call.name is not None, f"{call=}"
        self._call_id = call.id
        self._name = call.name

    def item(self, status: ItemStatus) -> CallItem:
        return CallItem(
            id=self._id, call_id=self._call_id, name=self._name, arguments=self._text, status=status
        )

    def _part(self, text: str) -> None:
        return None

    def _delta(self, text: str) -> ArgumentsDelta:
        return ArgumentsDelta(delta=text, **self._place())

    def _done(self) -> ArgumentsDone:
        return ArgumentsDone(arguments=self._text, **self._place())


class OutputItems:
    """The output of one response.

    Invariant: at most one item grows; it comes after all of `done`.

    Args:
        name: what the ids of all items have in common.
        sequence: numbers the events of the stream.
    """

    def __init__(self, name: str, sequence: Iterator[int]) -> None:
        self.done: list[OutputItem] = []
        self._name = name
        self._sequence = sequence
        self._growing: _GrowingItem | None = None

    def add(self, part: Parsed) -> list[TypedEvent]:
        """Add a part of the reply; returns the events that tell of it."""
        source = part.channel if isinstance(part, ParsedText) else part.index
        events: list[TypedEvent] = []
        item = self._growing
        if item is None or item.source != source:
            events += self._end("completed")
            item = self._growing = self._create(part)
            events += item.begin()
        text = part.text if isinstance(part, ParsedText) else part.arguments
        return [*events, item.grow(text)] if text else events

    def finish(self, finish_reason: str) -> list[TypedEvent]:
        """End the reply; returns the events that tell of it. A reply without a part is an empty message."""
        events = [] if self._growing or self.done else self.add(ParsedText("content", ""))
        # Arguments that the reply ended in cannot be read, whatever ended it.
        is_cut_call = isinstance(self._growing, _Call) and finish_reason != "tool_calls"
        return [
            *events,
            *self._end("incomplete" if finish_reason == "length" or is_cut_call else "completed"),
        ]

    def _create(self, part: Parsed) -> _GrowingItem:
        index = len(self.done)
        if isinstance(part, ParsedCall):
            return _Call(part, f"fc_{self._name}_{index}", index, self._sequence)
        if part.channel == "content":
            return _Message(part.channel, f"msg_{self._name}_{index}", index, self._sequence)
        return _Reasoning(part.channel, f"rs_{self._name}_{index}", index, self._sequence)

    def _end(self, status: ItemStatus) -> list[TypedEvent]:
        if self._growing is None:
            return []
        growing, self._growing = self._growing, None
        self.done.append(growing.item(status))
        return growing.end(self.done[-1])
