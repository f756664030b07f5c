"""How a reply is sent: events, failures in mid-stream, clients that leave, requests that end on the engine."""

import asyncio
import json
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from actors.messages import RequestError, RequestOutput
from deployment.errors import EngineDeadError
from tests.unit.deployment.fake_engine import (
    FINGERPRINT,
    HANG,
    MODEL,
    FakeEngine,
    Step,
    create_app,
    create_http_client,
    create_output,
    create_script,
    end_of_turn,
)
from tests.unit.deployment.tokenizers_for_tests import byte_ids

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
}
on_both_routes = pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


async def stream(engine: FakeEngine, route: str, **fields: object) -> list[Any]:
    """The events of a stream, decoded, without the final marker."""
    async with create_http_client(create_app(engine)) as client:
        response = await client.post(route, json=BODIES[route] | {"stream": True} | fields)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(event: dict[str, Any]) -> str:
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in event["choices"]
    )


class Connection:
    """An HTTP connection to an ASGI app that can break, unlike the one of `httpx.ASGITransport`."""

    def __init__(self, app: ASGIApp, route: str, *, sends_body: bool = True, **fields: object) -> None:
        self.sent: list[Message] = []
        self._news: asyncio.Queue[Message] = asyncio.Queue()
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        if sends_body:
            body = json.dumps(BODIES[route] | fields).encode()
            self._to_app.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": route,
            "raw_path": route.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(app(scope, self._to_app.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._news.put_nowait(message)

    async def receive(self) -> Message:
        return await asyncio.wait_for(self._news.get(), timeout=5)

    def leave(self) -> None:
        self._to_app.put_nowait({"type": "http.disconnect"})


@on_both_routes
async def test_each_engine_output_is_one_event(route: str):
    events = await stream(FakeEngine(end_of_turn(byte_ids(b"ab"), byte_ids(b"c"))), route)
    assert [text_of(event) for event in events if text_of(event)] == ["ab", "c"]
    assert len({event["id"] for event in events}) == 1
    assert {event["system_fingerprint"] for event in events} == {FINGERPRINT}


@on_both_routes
async def test_the_finish_reason_comes_once_and_last(route: str):
    events = await stream(FakeEngine(create_script(byte_ids(b"ab"), byte_ids(b"c"))), route)
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


@on_both_routes
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_the_usage_of_a_stream_comes_only_if_wanted(route: str, options: object):
    events = await stream(FakeEngine(end_of_turn(byte_ids(b"ab"))), route, stream_options=options)
    assert all(event["usage"] is None for event in events)


@on_both_routes
async def test_the_usage_of_a_stream_comes_once_and_last(route: str):
    engine = FakeEngine(end_of_turn(byte_ids(b"ab")))
    *events, last = await stream(engine, route, stream_options={"include_usage": True})
    assert all(event["usage"] is None and event["choices"] for event in events)
    num_prompt_tokens = len(engine.requests[0].prompt_token_ids)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 3,  # with the one that ended the turn
        "total_tokens": num_prompt_tokens + 3,
    }


@on_both_routes
@streamed_or_not
async def test_a_finished_request_ends_on_the_engine(route: str, stream: bool):
    engine = FakeEngine(end_of_turn(byte_ids(b"ab")))
    async with create_http_client(create_app(engine)) as client:
        await client.post(route, json=BODIES[route] | {"stream": stream})
    assert engine.closed.is_set()


@on_both_routes
@streamed_or_not
async def test_a_stop_string_ends_the_request_on_the_engine(route: str, stream: bool):
    engine = FakeEngine(create_script(byte_ids(b"ab"), byte_ids(b"c"), byte_ids(b"d")))
    async with create_http_client(create_app(engine)) as client:
        response = await client.post(route, json=BODIES[route] | {"stream": stream, "stop": ["bc"]})
    assert '"finish_reason":"stop"' in response.text
    assert engine.num_played == 2
    assert engine.closed.is_set()


@on_both_routes
@pytest.mark.parametrize(
    ("failure", "error_type", "message"),
    [
        (
            RequestOutput("", finish_reason="error", error=RequestError("internal", "logits are not finite")),
            "internal_error",
            "logits are not finite",
        ),
        (
            EngineDeadError("The engine has lost its shards."),
            "internal_error",
            "The engine has lost its shards.",
        ),
        (RequestOutput("", finish_reason="abort"), "internal_error", "stopped"),
        (KeyError("secret"), "internal_error", "failed"),
    ],
)
async def test_a_failure_in_mid_stream_is_an_event(route: str, failure: Step, error_type: str, message: str):
    *events, last = await stream(FakeEngine([create_output(byte_ids(b"ab")), failure]), route)
    assert "".join(map(text_of, events)) == "ab"
    assert all(event["choices"][0]["finish_reason"] is None for event in events)
    assert set(last) == {"error"}
    assert last["error"]["type"] == error_type
    assert message in last["error"]["message"]
    assert "secret" not in last["error"]["message"]


@on_both_routes
async def test_a_stream_begins_with_the_first_token_not_with_the_last(route: str):
    engine = FakeEngine([create_output(byte_ids(b"ab")), HANG])
    connection = Connection(create_app(engine), route, stream=True)
    assert (await connection.receive())["type"] == "http.response.start"
    assert b"ab" in (await connection.receive())["body"]
    connection.leave()
    await asyncio.wait_for(connection.task, timeout=5)


@on_both_routes
@streamed_or_not
@pytest.mark.parametrize("num_outputs", [0, 1])
async def test_a_request_ends_on_the_engine_when_the_client_leaves(
    route: str, stream: bool, num_outputs: int
):
    engine = FakeEngine([*[create_output([])] * num_outputs, HANG])
    connection = Connection(create_app(engine), route, stream=stream)
    while engine.num_played <= num_outputs:
        await asyncio.sleep(0)
    connection.leave()
    await asyncio.wait_for(connection.task, timeout=5)
    assert engine.closed.is_set()
    assert not any(message.get("more_body") is False for message in connection.sent)


@on_both_routes
@streamed_or_not
async def test_a_request_ends_on_the_engine_when_the_server_cancels_it(route: str, stream: bool):
    engine = FakeEngine([create_output([]), HANG])
    connection = Connection(create_app(engine), route, stream=stream)
    while engine.num_played <= 1:
        await asyncio.sleep(0)
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(connection.task, timeout=5)
    assert engine.closed.is_set()


@on_both_routes
async def test_a_client_that_leaves_before_its_body_came_never_reaches_the_engine(route: str):
    engine = FakeEngine(end_of_turn(byte_ids(b"ab")))
    connection = Connection(create_app(engine), route, sends_body=False)
    connection.leave()
    await asyncio.wait_for(connection.task, timeout=5)
    assert not engine.requests
