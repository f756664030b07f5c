"""POST /v1/responses: what the engine is asked, what comes back, and the official client's view of both."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response as OfficialResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from actors.messages import RequestError, RequestOutput
from deployment.errors import EngineDeadError
from tests.unit.deployment.fake_engine import (
    FINGERPRINT,
    MODEL,
    FakeEngine,
    Step,
    create_app,
    create_http_client,
    create_output,
    create_script,
    end_of_turn,
    refusal,
)
from tests.unit.deployment.test_chat_tools import speak
from tests.unit.deployment.test_reply_parser import block, invoke
from tests.unit.deployment.tokenizers_for_tests import byte_ids

MAX_MODEL_LEN = 4096
PATH = "/v1/responses"
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "strict": None, **FUNCTION}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
THINK = {"thinking": {"type": "enabled"}}
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def say(text: str) -> list[RequestOutput]:
    """A reply that comes token by token and ends by itself."""
    return end_of_turn(*([token_id] for token_id in speak(text)))


async def post(engine: FakeEngine, path: str = PATH, **fields: object) -> httpx.Response:
    async with create_http_client(create_app(engine, max_model_len=MAX_MODEL_LEN)) as client:
        return await client.post(path, json={"model": MODEL, **fields})


async def respond(script: list[Any], **fields: object) -> dict[str, Any]:
    """A whole response, as the official client would accept it."""
    response = await post(FakeEngine(script), **({"input": "hi"} | fields))
    assert response.status_code == 200, response.text
    OfficialResponse.model_validate(response.json())
    return response.json()


async def stream(script: list[Any], **fields: object) -> list[dict[str, Any]]:
    """The events of a stream, each of which is what its name says."""
    response = await post(FakeEngine(script), **({"input": "hi", "stream": True} | fields))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    for part in blocks:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert STREAM_EVENT.validate_python(event).type == event["type"]
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def types_of(events: list[dict[str, Any]]) -> list[str]:
    """Types without their common beginning; neighbours that are the same once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


# --- what the engine is asked ---


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
CALL_2 = CALL | {"call_id": "c2"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "r"}
OUTPUT_2 = OUTPUT | {"call_id": "c2"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "R"}],
}
USER = {"role": "user", "content": "hi"}


def chat_message(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def chat_call(*ids: str) -> list[dict[str, Any]]:
    return [{"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in ids]


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"input": "hi"}, {"messages": [USER]}),
        ({"input": [USER]}, {"messages": [USER]}),
        ({"input": [message("user", "h", "i")]}, {"messages": [chat_message("user", "h", "i")]}),
        ({"input": "hi", "instructions": "S"}, {"messages": [{"role": "system", "content": "S"}, USER]}),
        (
            {"input": [{"role": "developer", "content": "S"}, USER]},
            {"messages": [{"role": "system", "content": "S"}, USER]},
        ),
        (
            {"input": [USER, message("assistant", "A"), USER]},
            {"messages": [USER, {"role": "assistant", "content": "A"}, USER]},
        ),
        (
            {"input": [USER, REASONING, message("assistant", "A"), USER], **THINK},
            {
                "messages": [USER, {"role": "assistant", "content": "A", "reasoning_content": "R"}, USER],
                **THINK,
            },
        ),
        (
            {"input": [USER, REASONING, CALL, CALL_2, OUTPUT, OUTPUT_2], "tools": [TOOL], **THINK},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "reasoning_content": "R", "tool_calls": chat_call("c1", "c2")},
                    {"role": "tool", "tool_call_id": "c1", "content": "r"},
                    {"role": "tool", "tool_call_id": "c2", "content": "r"},
                ],
                "tools": [CHAT_TOOL],
                **THINK,
            },
        ),
        (
            {"input": [USER, message("assistant", "A"), CALL, OUTPUT, CALL, OUTPUT], "tools": [TOOL]},
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": "A", "tool_calls": chat_call("c1")},
                    {"role": "tool", "tool_call_id": "c1", "content": "r"},
                    {"role": "assistant", "tool_calls": chat_call("c1")},
                    {"role": "tool", "tool_call_id": "c1", "content": "r"},
                ],
                "tools": [CHAT_TOOL],
            },
        ),
        (
            {"input": "hi", "tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {
                "messages": [USER],
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
        ),
        (
            {"input": "hi", "tools": [TOOL], "tool_choice": "required"},
            {"messages": [USER], "tools": [CHAT_TOOL], "tool_choice": "required"},
        ),
        (
            {"input": "hi", "reasoning": {"effort": "low"}, **THINK},
            {"messages": [USER], "reasoning_effort": "low", **THINK},
        ),
        (
            {"input": "hi", "reasoning": {"effort": "none", "summary": "auto"}},
            {"messages": [USER], "reasoning_effort": "none"},
        ),
    ],
)
async def test_the_prompt_is_that_of_the_chat_request_that_says_the_same(
    fields: dict[str, Any], chat: dict[str, Any]
):
    mine, theirs = FakeEngine(say("ok")), FakeEngine(say("ok"))
    response = await post(mine, **fields)
    assert response.status_code == 200, response.text
    assert (await post(theirs, "/v1/chat/completions", **chat)).status_code == 200
    assert mine.requests[0].prompt_token_ids == theirs.requests[0].prompt_token_ids


async def test_sampling_reaches_the_engine():
    engine = FakeEngine(say("ok"))
    await post(
        engine, input="hi", max_output_tokens=7, temperature=0.5, top_p=0.25, seed=3, top_k=4, min_p=0.125
    )
    [request] = engine.requests
    assert request.request_id.startswith("resp_")
    assert request.max_tokens == 7
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 3)
    assert (sampling.top_k, sampling.min_p) == (4, 0.125)


async def test_the_flex_tier_is_batch_work():
    engine = FakeEngine(say("ok"))
    await post(engine, input="hi", service_tier="flex")
    assert engine.requests[0].priority == "batch"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [USER, OUTPUT]}, "input"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "hi", "tools": [TOOL | {"name": "f g"}]}, "tools[0].name"),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "hi", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "hi", "temperature": 3}, "temperature"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hi", "background": True}, "background"),
        ({"input": "hi", "truncation": "auto"}, "truncation"),
        ({"input": "hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": "hi", "reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"input": "hi", "include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"input": "hi", "model": "other"}, "model"),
    ],
)
async def test_a_mistake_is_answered_with_its_place(fields: dict[str, object], param: str, is_streamed: bool):
    engine = FakeEngine()
    response = await post(engine, **fields, stream=is_streamed)
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert response.json()["error"]["param"] == param
    assert not engine.requests


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a" * MAX_MODEL_LEN}, "input"),
        ({"input": "a", "max_output_tokens": 4096}, "max_output_tokens"),
    ],
)
async def test_what_does_not_fit_the_context_is_refused(
    fields: dict[str, Any], param: str, is_streamed: bool
):
    response = await post(FakeEngine(), **fields, stream=is_streamed)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert param in error["message"] or param == "input"


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["user", "message", "c1"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)
ANY_ITEM = st.sampled_from(
    [USER, CALL, CALL_2, OUTPUT, OUTPUT_2, REASONING, message("assistant", "A"), message("developer", "D")]
)


@given(
    items=st.lists(ANY_ITEM, max_size=6) | st.lists(ANY_ITEM | ANY_JSON, max_size=3) | ANY_JSON,
    fields=st.dictionaries(
        st.sampled_from(["tools", "tool_choice", "reasoning", "text", "include", "stream", "thinking"]),
        ANY_JSON,
    ),
)
async def test_no_body_whatsoever_is_a_server_error(items: object, fields: dict[str, Any]):
    response = await post(FakeEngine(say("ok")), **({"input": items} | fields))
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"]


# --- what comes back ---


async def test_a_response_has_a_message_and_counts():
    response = await respond(say("ok"), instructions="S", metadata={"a": "b"}, max_output_tokens=9)
    [item] = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}]
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert (response["instructions"], response["metadata"]) == ("S", {"a": "b"})
    assert (response["max_output_tokens"], response["store"]) == (9, False)
    assert response["system_fingerprint"] == FINGERPRINT
    usage = response["usage"]
    assert usage["output_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + 3
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_message_and_calls_are_items_in_order():
    script = say("so</think>see" + block(invoke("f", a="x"), invoke("f")))
    response = await respond(script, tools=[TOOL], **THINK)
    reasoning, said, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert reasoning["summary"] == []
    assert said["content"][0]["text"] == "see"
    assert [(call["type"], call["name"], call["arguments"]) for call in (first, second)] == [
        ("function_call", "f", '{"a": "x"}'),
        ("function_call", "f", "{}"),
    ]
    assert first["call_id"] != second["call_id"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert response["status"] == "completed"


async def test_one_call_is_the_end_where_calls_may_not_be_parallel():
    script = say(block(invoke("f"), invoke("f")))
    response = await respond(script, tools=[TOOL], parallel_tool_calls=False)
    assert [item["type"] for item in response["output"]] == ["function_call"]
    assert response["parallel_tool_calls"] is False


async def test_an_empty_reply_is_an_empty_message():
    [item] = (await respond(say("")))["output"]
    assert item["content"][0]["text"] == ""


@pytest.mark.parametrize("text", ["ok", "", "so</think>", "so</think>ok"])
async def test_a_reply_without_room_is_incomplete(text: str):
    fields = THINK if "think" in text else {}
    response = await respond(create_script(speak(text)), **fields)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]][-1] == "incomplete"
    assert {item["status"] for item in response["output"][:-1]} <= {"completed"}


# --- streams ---


async def test_the_events_of_a_text():
    events = await stream(say("ok"))
    assert types_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["o", "k"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None


async def test_the_events_of_reasoning_and_a_call():
    events = await stream(say("so</think>" + block(invoke("f", a="x y"))), tools=[TOOL], **THINK)
    assert types_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    arguments = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(arguments) == '{"a": "x y"}'
    assert len(arguments) > 3
    assert [event["output_index"] for event in events if event["type"].endswith("item.done")] == [0, 1]


REPLIES = st.builds(
    lambda reasoning, content, calls: reasoning + "</think>" + content + (block(*calls) if calls else ""),
    st.sampled_from(["", "so", "né\n"]),
    st.sampled_from(["", "ok", "a b\n"]),
    st.lists(st.sampled_from([invoke("f"), invoke("f", a="x y", b=1)]), max_size=3),
)


@given(text=REPLIES, cuts=st.lists(st.integers(0, 400)), num_tokens=st.none() | st.integers(1, 400))
async def test_a_stream_tells_what_the_whole_response_says(
    text: str, cuts: list[int], num_tokens: int | None
):
    token_ids = speak(text)[:num_tokens]
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    steps = [token_ids[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
    script = end_of_turn(*steps) if num_tokens is None else create_script(*steps)
    fields = {"tools": [TOOL], **THINK}
    whole = await respond(script, **fields)
    events = await stream(script, **fields)
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert _without_ids(last) == _without_ids(whole)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == last["output"]
    for index, item in enumerate(items):
        said = "".join(e["delta"] for e in events if "delta" in e and e["output_index"] == index)
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def _without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Ids are drawn for each request."""
    output = [item | {"id": None, "call_id": None} for item in response["output"]]
    return response | {"id": None, "output": output}


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (EngineDeadError("The engine has lost its shards."), "server_error", "lost its shards"),
        (
            RequestOutput("", finish_reason="error", error=RequestError("internal", "NaN")),
            "server_error",
            "NaN",
        ),
        (KeyError("secret"), "server_error", "failed"),
    ],
)
async def test_a_failure_in_mid_stream_is_the_last_event(failure: Step, code: str, text: str):
    events = await stream([create_output(byte_ids(b"ab")), failure])
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == code
    assert text in last["response"]["error"]["message"]
    assert "secret" not in last["response"]["error"]["message"]
    assert "completed" not in types_of(events)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_refusal_before_the_first_token_has_its_status(is_streamed: bool):
    script = refusal(RequestError("overloaded", "too many wait", retry_after_s=3))
    response = await post(FakeEngine(script), input="hi", stream=is_streamed)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


# --- the official client ---


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(say("née"))


@pytest_asyncio.fixture
async def client(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(
        create_app(engine, max_model_len=MAX_MODEL_LEN, unknown_parameters="refuse")
    )
    async with httpx.AsyncClient(transport=transport) as http_client:
        yield openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="unused", http_client=http_client, max_retries=0
        )


async def test_the_official_client_gets_a_text(client: openai.AsyncOpenAI):
    response = await client.responses.create(model=MODEL, input="hi", instructions="S", store=False)
    assert response.output_text == "née"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens == 5


async def test_the_official_client_streams(client: openai.AsyncOpenAI):
    events = [event async for event in await client.responses.create(model=MODEL, input="hi", stream=True)]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "née"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "née"


async def test_the_stream_helper_of_the_official_client_puts_a_response_together(
    client: openai.AsyncOpenAI, engine: FakeEngine
):
    engine.script = [*say("see" + block(invoke("f", a="x y")))]
    tools: Any = [TOOL]
    async with client.responses.stream(model=MODEL, input="hi", tools=tools) as helper:
        deltas = [event.delta async for event in helper if event.type == "response.output_text.delta"]
        response = await helper.get_final_response()
    assert "".join(deltas) == "see"
    said, call = response.output
    assert said.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("f", '{"a": "x y"}')


async def test_the_official_client_can_go_on_with_what_it_got(client: openai.AsyncOpenAI, engine: FakeEngine):
    engine.script = [*say("so</think>see" + block(invoke("f", a="x y")))]
    history: Any = [{"role": "user", "content": "hi"}]
    options: Any = {"model": MODEL, "tools": [TOOL], "extra_body": THINK}
    first = await client.responses.create(input=history, **options)
    call = first.output[-1]
    assert call.type == "function_call"
    answered = {"type": "function_call_output", "call_id": call.call_id, "output": "r"}
    engine.script = [*say("so</think>done")]
    for output in (first.output, [item.model_dump(exclude_unset=True) for item in first.output]):
        second = await client.responses.create(input=[*history, *output, answered], **options)
        assert second.output_text == "done"
    assert engine.requests[1].prompt_token_ids == engine.requests[2].prompt_token_ids
    assert engine.requests[1].prompt_token_ids[: len(engine.requests[0].prompt_token_ids)] == (
        engine.requests[0].prompt_token_ids
    )


async def test_the_official_client_learns_of_a_mistake(client: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input=[])
    assert caught.value.param == "input"
