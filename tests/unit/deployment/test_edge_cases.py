"""Requests at the edges of the API, over HTTP: what comes back, and what the engine is asked."""

import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.messages import RequestError, RequestOutput
from deployment.http_errors import EXCEPTION_HANDLERS
from tests.unit.deployment.fake_engine import (
    MODEL,
    FakeEngine,
    create_app,
    create_http_client,
    create_output,
    create_script,
    end_of_turn,
    refusal,
)
from tests.unit.deployment.tokenizers_for_tests import byte_ids, tiny_tokenizer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [USER]},
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
}
on_both_routes = pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


async def post(route: str, engine: FakeEngine | None = None, **fields: object) -> httpx.Response:
    engine = engine or FakeEngine(end_of_turn(byte_ids(b"ok")))
    async with create_http_client(create_app(engine, max_model_len=4096)) as client:
        return await client.post(route, json=BODIES[route] | fields)


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def events_of(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(reply: dict[str, Any]) -> str:
    [choice] = reply["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


# --- conversations ---


@streamed_or_not
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "system", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}, USER], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}, USER], "messages[0].content"),
        ([USER, {"role": "wizard", "content": "a"}], "messages[1].role"),
        ([USER, {"role": "", "content": "a"}], "messages[1].role"),
        ([USER, {"content": "a"}], "messages[1].role"),
        # A result without a call, with another call than the one it names, and in front of it.
        ([{"role": "tool", "tool_call_id": "c1", "content": "r"}], "messages"),
        ([USER, {"role": "tool", "tool_call_id": "c1", "content": "r"}], "messages"),
        (
            [
                USER,
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c2", "content": "r"},
            ],
            "messages",
        ),
        (
            [
                USER,
                {"role": "tool", "tool_call_id": "c1", "content": "r"},
                {"role": "assistant", "tool_calls": [CALL]},
            ],
            "messages",
        ),
        ([USER, {"role": "tool", "content": "r"}], "messages[1].tool_call_id"),
        ([USER | {"tool_calls": [CALL]}], "messages[0].tool_calls"),
    ],
)
async def test_what_is_no_conversation_is_refused(messages: list[Any], param: str, stream: bool):
    engine = FakeEngine()
    response = await post(CHAT, engine, messages=messages, stream=stream)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert not engine.requests


@pytest.mark.parametrize("content", ["I call f.", "", None])
async def test_an_assistant_may_have_said_something_and_called(content: str | None):
    answered = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    messages = [USER, {"role": "assistant", "content": content, "tool_calls": [CALL]}, answered]
    engine = FakeEngine(end_of_turn(byte_ids(b"ok")))
    assert (await post(CHAT, engine, messages=messages)).status_code == 200
    prompt = tiny_tokenizer().spell(engine.requests[0].prompt_token_ids)
    assert ("I call f." in prompt) == bool(content)
    assert 'name="f"' in prompt


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_empty_content_is_content(content: object):
    assert (await post(CHAT, messages=[{"role": "user", "content": content}])).status_code == 200


# --- limits ---


@streamed_or_not
async def test_both_routes_tell_alike_that_the_context_is_too_short(stream: bool):
    for route, fields in (
        (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}),
        (COMPLETIONS, {"prompt": "a" * 5000}),
        (CHAT, {"max_tokens": 4096}),
        (COMPLETIONS, {"max_tokens": 4096}),
    ):
        response = await post(route, stream=stream, **fields)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")


@on_both_routes
@streamed_or_not
async def test_one_token_is_a_reply(route: str, stream: bool):
    engine = FakeEngine(create_script(byte_ids(b"a")))
    response = await post(route, engine, max_tokens=1, stream=stream)
    assert engine.requests[0].max_tokens == 1
    last = events_of(response)[-1] if stream else response.json()
    assert last["choices"][0]["finish_reason"] == "length"
    if not stream:
        assert text_of(last) == "a"
        assert last["usage"]["completion_tokens"] == 1


async def test_no_logprobs_besides_the_chosen_tokens():
    reply = (await post(COMPLETIONS, logprobs=0)).json()
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["o", "k"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [["o"], ["k"]]
    reply = (await post(CHAT, logprobs=True, top_logprobs=0)).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["top_logprobs"]) for entry in content] == [("o", []), ("k", [])]
    assert (await post(COMPLETIONS)).json()["choices"][0]["logprobs"] is None


@on_both_routes
@streamed_or_not
@pytest.mark.parametrize("stop", [["cd", "cde"], ["cde", "cd"], ["c", "cd", "cde", "cdef"]])
async def test_the_first_stop_string_to_be_complete_ends_the_text(route: str, stream: bool, stop: list[str]):
    engine = FakeEngine(create_script(*([id_] for id_ in byte_ids(b"abcdef"))))
    response = await post(route, engine, stop=stop, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in events_of(response)]
        text = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    else:
        text = text_of(response.json())
        assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert text == "ab"


@on_both_routes
async def test_a_stop_string_that_is_only_begun_stays_in_the_text(route: str):
    engine = FakeEngine(create_script(byte_ids(b"abc")))
    assert text_of((await post(route, engine, stop=["cde", "bcd"])).json()) == "abc"


# --- streams ---


@on_both_routes
async def test_token_counts_come_once_and_last(route: str):
    engine = FakeEngine(end_of_turn(byte_ids(b"ab"), byte_ids(b"c")))
    events = events_of(await post(route, engine, stream=True, stream_options={"include_usage": True}))
    assert [bool(event["usage"]) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4


@on_both_routes
@pytest.mark.parametrize("kind", ["internal", "unavailable", "overloaded", "invalid"])
async def test_what_fails_in_mid_stream_is_its_last_event(route: str, kind: Any):
    failure = RequestOutput("", finish_reason="error", error=RequestError(kind, "no more"))
    engine = FakeEngine([create_output(byte_ids(b"ab")), failure])
    options = {"include_usage": True}
    *events, last = events_of(await post(route, engine, stream=True, stream_options=options))
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["message"] == "no more"
    assert not any("error" in event or event["usage"] for event in events)
    assert engine.closed.is_set()


@on_both_routes
@pytest.mark.parametrize("kind", ["internal", "unavailable", "overloaded", "invalid"])
async def test_what_fails_before_the_first_token_has_its_status_streamed_or_not(route: str, kind: Any):
    script = refusal(RequestError(kind, "no more"))
    whole, streamed = [await post(route, FakeEngine(script), stream=stream) for stream in (False, True)]
    assert whole.status_code == streamed.status_code >= 400
    assert error_of(whole) == error_of(streamed)


# --- every error has the same shape ---


@pytest.mark.parametrize(
    "status", [400, 401, 403, 404, 405, 406, 408, 409, 413, 415, 418, 422, 429, 500, 503]
)
@pytest.mark.parametrize("detail", [None, "told so"])
async def test_what_the_framework_refuses_has_the_shape_of_all_errors(status: int, detail: str | None):
    async def refuse(request: Request) -> Response:
        raise HTTPException(status, detail)

    app = Starlette(routes=[Route("/", refuse)], exception_handlers=EXCEPTION_HANDLERS)
    async with create_http_client(app) as client:
        response = await client.get("/")
    assert response.status_code == status
    assert error_of(response)["code"]
    assert error_of(response)["type"] == ("internal_error" if status >= 500 else "invalid_request_error")
