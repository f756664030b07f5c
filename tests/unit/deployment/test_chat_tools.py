"""Chat with tools: prompts as the vendor renders them, replies, refusals."""

import json
from typing import Any

import deepseek_recipe as recipe
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployment.chat import VENDOR_MODEL_NAME, ChatRenderer
from deployment.errors import InvalidRequestError
from deployment.openai_chat import ChatCompletionRequest
from tests.unit.deployment.fake_engine import MODEL, FakeEngine, create_app, create_http_client, end_of_turn
from tests.unit.deployment.test_chat import EFFORT_LINE, NO_THINKING, answer, render, rendered_text, say
from tests.unit.deployment.test_reply_parser import D, block, invoke
from tests.unit.deployment.tokenizers_for_tests import (
    control_id,
    merging_library_tokenizer,
    merging_tokenizer,
    tiny_library_tokenizer,
)

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "string", "enum": ["a", None]}, "a": {"minimum": 1.0}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
USER = {"role": "user", "content": "U"}


def called(*ids: str, **fields: object) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}} for i in ids]
    return {"role": "assistant", "tool_calls": calls, **fields}


def result(id_: str, text: str = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": text}


# --- prompts ---


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, **NO_THINKING},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "required", **NO_THINKING},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}, **NO_THINKING},
        {"tools": TOOLS, "messages": [{"role": "system", "content": "S"}, USER]},
        {
            "tools": TOOLS,
            "messages": [USER, called("1", "2", reasoning_content="R"), result("2"), result("1")],
        },
        {
            "messages": [USER, called("1", content="C", reasoning_content="R"), result("1"), USER],
            **NO_THINKING,
        },
        {"messages": [USER, called("1", reasoning_content="R"), result("1"), USER]},
        {"messages": [USER, {"role": "system", "content": "late"}]},
        {"messages": [USER, {"role": "latest_reminder", "content": "now"}]},
    ],
)
def test_prompts_are_the_vendors_byte_for_byte(fields: dict[str, object]):
    _check_same_as_vendor(fields)


TEXTS = st.text(max_size=6) | st.sampled_from(
    ["<｜User｜>", "</think>", f"<{D} calls>", "<tool_result>", "😀"]
)
PLAIN_TURNS = st.builds(
    lambda role, text, reasoning: [
        {"role": role, "content": text} | ({"reasoning_content": reasoning} if role == "assistant" else {})
    ],
    st.sampled_from(["user", "assistant", "system", "latest_reminder"]),
    TEXTS,
    TEXTS,
)
CALL_TURNS = st.builds(
    lambda content, reasoning, results: [
        called(*map(str, range(len(results))), content=content, reasoning_content=reasoning),
        *(result(str(id_), text) for id_, text in reversed(list(enumerate(results)))),
    ],
    st.none() | TEXTS,
    TEXTS,
    st.lists(TEXTS, min_size=1, max_size=3),
)
CONVERSATIONS = st.lists(PLAIN_TURNS | CALL_TURNS, min_size=1, max_size=5).map(lambda turns: sum(turns, []))


@settings(deadline=None, max_examples=200)
@given(
    messages=CONVERSATIONS,
    tools=st.sampled_from([None, [], TOOLS]),
    thinking=st.sampled_from([None, "enabled", "disabled"]),
    effort=st.sampled_from([None, "low", "high", "xhigh", "max"]),
)
def test_generated_prompts_are_the_vendors(
    messages: list[dict[str, Any]], tools: list[Any] | None, thinking: str | None, effort: str | None
):
    fields: dict[str, Any] = {"messages": messages, "tools": tools, "reasoning_effort": effort}
    _check_same_as_vendor(fields | ({"thinking": {"type": thinking}} if thinking else {}))


def _check_same_as_vendor(fields: dict[str, Any]) -> None:
    """Same ids, same text, as the vendor's own way from an HTTP body to a prompt."""
    body = {"model": VENDOR_MODEL_NAME, "messages": [USER], **fields}
    body = {name: value for name, value in body.items() if value is not None}
    conversation = (
        recipe.ChatCompletionRequest(json.dumps(body)).convert(recipe.ConversionOptions()).conversation
    )
    vendor_tokenizer = recipe.Tokenizer.from_str(tiny_library_tokenizer().to_str())
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(vendor_tokenizer)
    prompt = render(**{name: value for name, value in body.items() if name != "model"})
    assert prompt.token_ids == encoding.encode(conversation)
    text = tiny_library_tokenizer().decode(prompt.token_ids, skip_special_tokens=False)
    assert text.encode() == encoding.render_conversation(conversation).prompt.encode()


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"reasoning_effort": 1}, 1),
        ({"reasoning_effort": 100}, 100),
        ({"reasoning_effort": 33, "messages": [{"role": "system", "content": "S"}, USER]}, 33),
        ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": 7}}, 7),
        ({"reasoning_effort": 8, "chat_template_kwargs": {"reasoning_effort": 7}}, 8),
    ],
)
def test_effort_may_be_a_number(fields: dict[str, object], effort: int):
    expected = rendered_text(**fields | {"reasoning_effort": "high", "chat_template_kwargs": None})
    assert rendered_text(**fields) == expected.replace(EFFORT_LINE.format(75), EFFORT_LINE.format(effort))


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_thinking_may_be_switched_in_the_template_options(name: str):
    assert render(chat_template_kwargs={name: False}).token_ids[-1] == control_id("</think>")
    assert render(chat_template_kwargs={name: True}, thinks_by_default=False).token_ids[-1] == control_id(
        "<think>"
    )


@settings(deadline=None)
@given(
    text=st.lists(TEXTS | st.sampled_from(["<｜Assistant｜>", D, "<｜end▁of▁sentence｜>", "<think>"])).map(
        "".join
    )
)
def test_text_of_a_user_never_becomes_a_control_token(text: str):
    def controls(text: str) -> list[int]:
        tool = {
            "type": "function",
            "function": {"name": "f", "description": text, "parameters": {"type": "object", "title": text}},
        }
        arguments = json.dumps({text or "k": text}, ensure_ascii=False)
        call = {"id": text, "type": "function", "function": {"name": "f", "arguments": arguments}}
        history = [{"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]}]
        system = {"role": "system", "content": text}
        messages = [system, {"role": "user", "content": text}, *history, result(text, text)]
        body = {"model": "m", "messages": messages, "tools": [tool], "reasoning_effort": 9}
        request = ChatCompletionRequest.model_validate_json(json.dumps(body))
        token_ids = ChatRenderer(merging_tokenizer(), thinks_by_default=True).render(request).token_ids
        added = merging_library_tokenizer().get_added_tokens_decoder()
        return [token_id for token_id in token_ids if token_id in added]

    assert controls(text) == controls("a")


def _deep(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": _deep(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 10**30}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": _deep(150)}}]}, "tools"),
        ({"messages": [USER, result("1")]}, "messages"),
        ({"messages": [result("1")]}, "messages"),
        ({"messages": [USER, called("1"), USER]}, "messages"),
        ({"messages": [USER, called("1"), result("2")]}, "messages"),
        ({"messages": [USER, called("1", "1"), result("1")]}, "messages"),
    ],
)
async def test_what_cannot_be_rendered_is_refused_by_its_field(fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequestError) as caught:
        render(**fields)
    assert caught.value.param == param
    engine = FakeEngine()
    async with create_http_client(create_app(engine, thinks_by_default=True)) as client:
        response = await client.post(CHAT, json={"model": MODEL, "messages": [USER]} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not engine.requests


# --- replies ---


def speak(text: str) -> list[int]:
    """Token ids of a reply in which the marker of calls is a control token, too."""
    ids: list[int] = []
    for number, part in enumerate(text.split(D)):
        ids += ([control_id(D)] if number else []) + say(part)
    return ids


def test_a_reply_with_calls_says_so():
    script = end_of_turn(*([token_id] for token_id in speak("see" + block(invoke("f", a="b"), invoke("g")))))
    [choice] = answer(script, tools=TOOLS, **NO_THINKING).choices
    assert (choice.message.content, choice.finish_reason) == ("see", "tool_calls")
    assert choice.message.tool_calls is not None
    [first, second] = choice.message.tool_calls
    assert (first.function.name, first.function.arguments) == ("f", '{"a": "b"}')
    assert (second.function.name, second.function.arguments) == ("g", "{}")
    assert first.id != second.id


def test_content_is_null_if_there_are_calls_alone():
    [choice] = answer(end_of_turn(speak(block(invoke("f")))), tools=TOOLS, **NO_THINKING).choices
    assert choice.message.content is None


def test_a_forced_call_goes_on_where_the_prompt_opened_it():
    script = end_of_turn(speak(invoke("f", a=1) + f"</{D} calls>"))
    [choice] = answer(script, tools=TOOLS, tool_choice="required", **NO_THINKING).choices
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'


def test_logprobs_are_those_of_the_text_before_the_calls():
    script = end_of_turn(speak("ab" + block(invoke("f", a="b"))))
    [choice] = answer(script, tools=TOOLS, logprobs=True, **NO_THINKING).choices
    assert choice.logprobs is not None
    assert bytes(b for entry in choice.logprobs.content or [] for b in entry.bytes) == b"ab"


async def test_the_official_client_streams_calls():
    text = "so</think>see" + block(invoke("f", a="x y"), invoke("g"))
    engine = FakeEngine(end_of_turn(*([token_id] for token_id in speak(text))))
    transport = httpx.ASGITransport(create_app(engine, thinks_by_default=True, max_model_len=4096))
    tools: Any = TOOLS
    calls: dict[int, list[str]] = {}
    async with httpx.AsyncClient(transport=transport) as http_client:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http_client)
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=tools, stream=True
        )
        chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            if call.index not in calls:
                assert (call.id, call.type) != (None, None)
                calls[call.index] = [call.function.name or ""]
            calls[call.index].append(call.function.arguments or "")
    assert [(name, "".join(arguments)) for name, *arguments in calls.values()] == [
        ("f", '{"a": "x y"}'),
        ("g", "{}"),
    ]
    assert len(calls[0]) > 5  # the arguments came piece by piece
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "see"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_the_stream_helper_of_the_official_client_puts_calls_together():
    engine = FakeEngine(end_of_turn(*([token_id] for token_id in speak(block(invoke("f", a="x y"))))))
    transport = httpx.ASGITransport(create_app(engine, max_model_len=4096))
    tools: Any = TOOLS
    async with httpx.AsyncClient(transport=transport) as http_client:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http_client)
        async with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], tools=tools
        ) as stream:
            completion = await stream.get_final_completion()
    assert completion.choices[0].message.tool_calls is not None
    [call] = completion.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": "x y"}')
