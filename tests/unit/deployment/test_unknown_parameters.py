"""What becomes of parameters that this server does not know: ignored, or refused by name. Never a crash."""

import json
import logging
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.deployment.fake_engine import MODEL, FakeEngine, create_app, create_http_client, end_of_turn
from tests.unit.deployment.tokenizers_for_tests import byte_ids

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [USER]},
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
on_all_routes = pytest.mark.parametrize("route", BODIES)
HARMLESS = {
    "user": "someone",
    "metadata": {"a": "b"},
    "store": True,
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "service_tier": "auto",
}


async def post(route: str, unknown_parameters: str | None = None, **fields: object) -> httpx.Response:
    setting = {} if unknown_parameters is None else {"unknown_parameters": unknown_parameters}
    app = create_app(FakeEngine(end_of_turn(byte_ids(b"ok"))), **setting)
    async with create_http_client(app) as client:
        return await client.post(route, json=BODIES[route] | fields)


@on_all_routes
async def test_they_are_ignored_by_default_and_named_in_the_log(route: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="deployment.http_body")
    response = await post(route, next_year=[1], secret_value={"a": "hidden"})
    assert response.status_code == 200
    assert "next_year" in caplog.text
    assert "secret_value" in caplog.text
    assert "hidden" not in caplog.text


async def test_names_in_the_log_cannot_forge_lines(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="deployment.http_body")
    await post(COMPLETIONS, **{"a\nERROR forged": 1})
    [record] = caplog.records
    assert "\n" not in record.getMessage()


async def test_a_request_without_them_logs_nothing(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="deployment.http_body")
    await post(CHAT)
    assert not caplog.records


@on_all_routes
async def test_they_are_refused_by_name_where_that_is_set(route: str):
    response = await post(route, "refuse", next_year=[1])
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "next_year",
        "unknown_parameter",
    )
    assert (await post(route, "refuse")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [USER | {"mood": 1}]}, "messages[0].mood"),
        (
            {"messages": [USER | {"content": [{"type": "text", "text": "a", "font": 1}]}]},
            "messages[0].content[0].font",
        ),
        ({"stream": True, "stream_options": {"include_usage": True, "other": 1}}, "stream_options.other"),
    ],
)
async def test_those_inside_other_fields_are_refused_too(fields: dict[str, object], param: str):
    assert (await post(CHAT, **fields)).status_code == 200
    response = await post(CHAT, "refuse", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_what_openai_knows_and_no_reply_depends_on_is_not_unknown(route: str):
    assert (await post(route, "refuse", **HARMLESS)).status_code == 200


async def test_schemas_of_tools_may_say_anything():
    parameters = {"type": "object", "properties": {"x": {"type": "string", "x-hint": 1}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    app = create_app(
        FakeEngine(end_of_turn(byte_ids(b"ok"))), max_model_len=4096, unknown_parameters="refuse"
    )
    async with create_http_client(app) as client:
        assert (await client.post(CHAT, json=BODIES[CHAT] | {"tools": tools})).status_code == 200


async def test_a_reply_of_the_official_client_may_be_sent_back():
    app = create_app(FakeEngine(end_of_turn(byte_ids(b"ok"))), unknown_parameters="refuse")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http_client:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="unused", http_client=http_client)
        reply = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        message: Any = reply.choices[0].message
        for sent_back in (message, message.model_dump()):
            again = await client.chat.completions.create(model=MODEL, messages=[sent_back, USER])  # type: ignore[list-item]
            assert again.choices[0].message.content == "ok"


KEYS = st.text(max_size=8) | st.sampled_from(
    ["a.b", "[0]", "<text>", "\x00", "__class__", "root", "model_extra"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(KEYS, values, max_size=3),
    max_leaves=5,
)


@on_all_routes
@pytest.mark.parametrize("setting", ["ignore", "refuse"])
@given(fields=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
async def test_no_unknown_parameter_is_a_server_error(route: str, setting: str, fields: dict[str, Any]):
    logger = logging.getLogger("deployment.http_body")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        known = json.dumps(fields | BODIES[route]).encode()
        app = create_app(FakeEngine(end_of_turn(byte_ids(b"ok"))), unknown_parameters=setting)
        async with create_http_client(app) as client:
            response = await client.post(route, content=known, headers={"content-type": "application/json"})
    finally:
        logger.setLevel(level)
    assert response.status_code == {"ignore": 200, "refuse": 400}[setting], response.text
