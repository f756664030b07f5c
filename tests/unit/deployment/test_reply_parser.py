"""Tool calls, reasoning and content of a reply, however its text is cut."""

import json
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.reply_parser import VENDOR_MODEL_NAME, Parsed, ParsedText, ReplyParser
from deployment.tool_calls import call_deltas, whole_calls

D = "｜DSML｜"
STOP = "stop"


def invoke(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    lines = [
        f'<{D} parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</{D} parameter>\n"
        for key, value in arguments.items()
    ]
    return f'<{D} invoke name="{name}">\n' + "".join(lines) + f"</{D} invoke>\n"


def block(*calls: str) -> str:
    return f"\n\n<{D} calls>\n" + "".join(calls) + f"</{D} calls>"


Outcome = tuple[str, str, list[tuple[str, str]], str | None]


def parse(*pieces: str, is_thinking: bool = False, end: str = STOP, max_calls: int | None = None) -> Outcome:
    """Reasoning, content, calls and finish reason of a reply that comes in these pieces."""
    thinking = {"type": "enabled" if is_thinking else "disabled"}
    body = {"model": VENDOR_MODEL_NAME, "messages": [{"role": "user", "content": "u"}], "thinking": thinking}
    conversation = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    parser = ReplyParser(conversation, max_calls=max_calls)
    parsed: list[Parsed] = []
    for piece in pieces:
        parsed += parser.push(piece)
    if not parser.is_finished:
        parsed += parser.finish(end)
    calls = [(call.function.name, call.function.arguments) for call in whole_calls(parsed)]
    assert [c.function.arguments for c in call_deltas(parsed)] == [arguments for _, arguments in calls]
    return _text(parsed, "reasoning_content"), _text(parsed, "content"), calls, parser.finish_reason


def _text(parsed: list[Parsed], channel: str) -> str:
    return "".join(part.text for part in parsed if isinstance(part, ParsedText) and part.channel == channel)


def test_content_and_calls():
    text = "Let me see." + block(invoke("f", a='x"y', b=[1, None]), invoke("g"))
    calls = [("f", '{"a": "x\\"y", "b": [1, null]}'), ("g", "{}")]
    assert parse(text) == ("", "Let me see.", calls, "tool_calls")


def test_reasoning_content_and_calls():
    text = "why</think>hm" + block(invoke("f"))
    assert parse(text, is_thinking=True) == ("why", "hm", [("f", "{}")], "tool_calls")


def test_calls_in_the_reasoning_end_it():
    text = "why" + block(invoke("f", a="b"))
    assert parse(text, is_thinking=True) == ("why", "", [("f", '{"a": "b"}')], "tool_calls")


def test_nothing_comes_after_the_calls():
    assert parse("a" + block(invoke("f")) + "b" + block(invoke("g"))) == (
        "",
        "a",
        [("f", "{}")],
        "tool_calls",
    )


def test_markers_in_an_argument_are_its_text():
    value = f"</think><{D} calls>"
    assert parse(block(invoke("f", a=value)))[2] == [("f", json.dumps({"a": value}, ensure_ascii=False))]


def test_without_tools_a_call_ends_the_reply():
    assert parse("a" + block(invoke("f")) + "b", max_calls=0) == ("", "a", [], "stop")


def test_a_second_call_ends_the_reply_if_there_may_be_one():
    text = block(invoke("f", a=1), invoke("g"))
    assert parse(text, max_calls=1) == ("", "", [("f", '{"a": 1}')], "tool_calls")


@pytest.mark.parametrize("num_missing", [1, 5, 30, 60])
@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_reply_that_ends_in_a_call_does_not_ask_for_it(num_missing: int, end: str):
    text = block(invoke("f", a="some words"))
    *_, calls, finish_reason = parse(
        text[: len(text) - len(f"</{D} invoke>\n</{D} calls>") - num_missing], end=end
    )
    assert finish_reason == end
    assert all("}" not in arguments for _, arguments in calls)


def test_arguments_that_are_no_json_are_passed_on_but_not_asked_for():
    text = block(
        f'<{D} invoke name="f">\n<{D} parameter name="a" string="false">{{bad</{D} parameter>\n</{D} invoke>\n'
    )
    assert parse(text) == ("", "", [("f", '{"a": {bad}')], "stop")


@pytest.mark.parametrize("stray", [f"</{D} calls>", f"</{D} parameter>", D, f"</{D}", "</th</think>ink>"])
@pytest.mark.parametrize("is_thinking", [False, True])
def test_stray_markup_ends_the_reply(stray: str, is_thinking: bool):
    prefix = "r</think>" if is_thinking else ""
    assert parse(f"{prefix}a{stray}b", is_thinking=is_thinking)[1] in ("a", "ab")


PARTS = st.lists(
    st.sampled_from(
        ["a", " ", "\n", "\n\n", "</think>", "<think>", f"<{D} calls>\n", f"</{D} calls>", '"x"', "12"]
    )
    | st.sampled_from([invoke("f", k="v}", n={"a": [1]}), invoke("g"), block(invoke("h", t="é\n😀"))])
    | st.sampled_from([f'<{D} invoke name="f">', f"</{D} invoke>", f'<{D} parameter name="k" string="true">'])
    | st.sampled_from(
        [f'<{D} parameter name="k" string="false">', f"</{D} parameter>", "<", "</", D, "é", "{"]
    ),
    max_size=8,
)
KINDS = {
    "is_thinking": st.booleans(),
    "max_calls": st.sampled_from([None, 0, 1]),
    "end": st.sampled_from(["stop", "length"]),
}


@settings(deadline=None, max_examples=60)
@given(text=PARTS.map("".join), **KINDS)
def test_no_cut_changes_what_is_parsed(text: str, is_thinking: bool, max_calls: int | None, end: str):
    """Every cut in two, and every character on its own."""

    def outcome(*pieces: str) -> Outcome:
        return parse(*pieces, is_thinking=is_thinking, max_calls=max_calls, end=end)

    whole = outcome(text)
    assert outcome(*text) == whole
    for cut in range(len(text)):
        assert outcome(text[:cut], text[cut:]) == whole, f"{cut=}"


@settings(deadline=None)
@given(text=PARTS.map("".join), **KINDS)
def test_no_marker_reaches_the_content(text: str, is_thinking: bool, max_calls: int | None, end: str):
    reasoning, content, _, finish_reason = parse(text, is_thinking=is_thinking, max_calls=max_calls, end=end)
    for marker in (D, "</think>"):
        assert marker not in content
        assert marker not in reasoning
    assert finish_reason in ("stop", "length", "tool_calls")


@settings(deadline=None)
@given(
    arguments=st.dictionaries(
        st.text("abc_", min_size=1), st.none() | st.integers(-9, 9) | st.text('xyz"\\\n{}é')
    )
)
def test_arguments_come_back_as_they_were_meant(arguments: dict[str, Any]):
    [(name, text)] = parse(*block(invoke("f", **arguments)))[2]
    assert (name, json.loads(text)) == ("f", arguments)
