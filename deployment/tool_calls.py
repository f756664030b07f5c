"""Parsed tool calls in the shapes of a stream and of a whole reply."""

from __future__ import annotations

from collections.abc import Iterable

from deployment.openai_tools import CallDelta, FunctionDelta, ReplyCall, ReplyFunction
from deployment.reply_parser import Parsed, ParsedCall


def call_deltas(parsed: Iterable[Parsed]) -> list[CallDelta]:
    """What one chunk adds to the calls: one entry for each call, which its first part names."""
    return [
        CallDelta(
            index=call.index,
            id=call.id,
            type="function" if call.id is not None else None,
            function=FunctionDelta(name=call.name, arguments=call.arguments),
        )
        for call in _joined(parsed)
    ]


def whole_calls(parsed: Iterable[Parsed]) -> list[ReplyCall]:
    """The calls of a whole reply."""
    calls = []
    for call in _joined(parsed):
        assert call.id is not None, f"{call=}"
        assert call.name is not None, f"{call=}"
        calls.append(ReplyCall(id=call.id, function=ReplyFunction(name=call.name, arguments=call.arguments)))
    return calls


def _joined(parsed: Iterable[Parsed]) -> Iterable[ParsedCall]:
    """The parts of each call joined; the order is that of the calls."""
    parts: dict[int, list[ParsedCall]] = {}
    for part in parsed:
        if isinstance(part, ParsedCall):
            parts.setdefault(part.index, []).append(part)
    for index, [first, *rest] in parts.items():
        arguments = "".join([first.arguments, *(part.arguments for part in rest)])
        yield ParsedCall(index, arguments, first.id, first.name)
