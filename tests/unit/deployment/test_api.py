"""Routes, refusals and limits. The streams are in `test_generation.py`."""

import json
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import RequestError
from deployment.errors import EngineDeadError
from deployment.tokenizer import Tokenizer
from tests.unit.deployment.fake_engine import (
    FINGERPRINT,
    MAX_MODEL_LEN,
    MODEL,
    NOW,
    SEED,
    FakeEngine,
    create_app,
    create_http_client,
    create_script,
    end_of_turn,
    refusal,
)
from tests.unit.deployment.tokenizers_for_tests import (
    BOS_ID,
    TINY_VOCAB_SIZE,
    byte_ids,
    control_id,
    tiny_library_tokenizer,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
}
JSON_HEADERS = {"content-type": "application/json"}
on_both_routes = pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


def create_engine() -> FakeEngine:
    return FakeEngine(end_of_turn(byte_ids(b"ok")))


async def post(engine: FakeEngine, route: str, content: object, **headers: str) -> httpx.Response:
    async with create_http_client(create_app(engine)) as client:
        return await client.post(route, content=content, headers=JSON_HEADERS | headers)  # type: ignore[arg-type]


async def post_json(engine: FakeEngine, route: str, **fields: object) -> httpx.Response:
    return await post(engine, route, json.dumps(BODIES[route] | fields))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, which has no other content."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


# --- what the engine is asked ---


async def test_a_chat_request_reaches_the_engine():
    engine = create_engine()
    response = await post_json(engine, CHAT, max_tokens=3, stop_token_ids=[5], ignore_eos=True, top_k=7)
    [request] = engine.requests
    assert request.request_id == response.json()["id"]
    assert request.request_id.startswith("chatcmpl-")
    assert request.prompt_token_ids == [
        BOS_ID,
        control_id("<｜User｜>"),
        *byte_ids(b"hi"),
        control_id("<｜Assistant｜>"),
        control_id("</think>"),
    ]
    assert (request.max_tokens, request.stop_token_ids, request.ignore_eos) == (3, [5], True)
    assert (request.sampling.top_k, request.sampling.seed) == (7, SEED)


@pytest.mark.parametrize(
    ("fields", "prompt_token_ids"),
    [
        ({"prompt": "hi"}, [BOS_ID, *byte_ids(b"hi")]),
        ({"prompt": "hi", "add_special_tokens": False}, byte_ids(b"hi")),
        ({"prompt": [5, 6]}, [5, 6]),
        ({"prompt": [[5, 6]]}, [5, 6]),
        ({"prompt": ""}, [BOS_ID]),
        ({"prompt": "<｜User｜>"}, [BOS_ID, *byte_ids("<｜User｜>".encode())]),
    ],
)
async def test_a_completion_request_reaches_the_engine(
    fields: dict[str, object], prompt_token_ids: list[int]
):
    engine = create_engine()
    response = await post_json(engine, COMPLETIONS, **fields)
    [request] = engine.requests
    assert request.request_id == response.json()["id"]
    assert request.request_id.startswith("cmpl-")
    assert request.prompt_token_ids == prompt_token_ids


@on_both_routes
async def test_a_reply_says_what_decided_it(route: str):
    response = await post_json(create_engine(), route)
    assert response.json()["system_fingerprint"] == FINGERPRINT


@on_both_routes
async def test_requests_have_their_own_ids(route: str):
    engine = create_engine()
    for _ in range(2):
        await post_json(engine, route)
    assert engine.requests[0].request_id != engine.requests[1].request_id


async def test_without_a_limit_a_chat_reply_may_fill_the_context():
    engine = create_engine()
    await post_json(engine, CHAT)
    [request] = engine.requests
    assert len(request.prompt_token_ids) + request.max_tokens == MAX_MODEL_LEN


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(5, 16), (MAX_MODEL_LEN - 3, 3)])
async def test_without_a_limit_a_completion_is_short(num_prompt_tokens: int, max_tokens: int):
    engine = create_engine()
    await post_json(engine, COMPLETIONS, prompt=[5] * num_prompt_tokens)
    assert engine.requests[0].max_tokens == max_tokens


async def test_the_newer_name_of_the_output_limit_is_understood():
    engine = create_engine()
    await post_json(engine, CHAT, max_completion_tokens=9)
    assert engine.requests[0].max_tokens == 9


async def test_a_prompt_is_encoded_beside_the_event_loop():
    threads = []

    class RecordingTokenizer(Tokenizer):
        def encode_text(self, text: str, *, add_bos: bool) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode_text(text, add_bos=add_bos)

    app = create_app(create_engine(), tokenizer=RecordingTokenizer(tiny_library_tokenizer().to_str()))
    async with create_http_client(app) as client:
        assert (await client.post(COMPLETIONS, json=BODIES[COMPLETIONS])).is_success
    assert threads
    assert threading.main_thread() not in threads


# --- refusals ---


@on_both_routes
@streamed_or_not
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 2}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop_token_ids": [1, TINY_VOCAB_SIZE]}, "stop_token_ids[1]"),
    ],
)
async def test_a_mistake_is_answered_with_the_name_of_the_field(
    route: str, stream: bool, fields: dict[str, object], param: str
):
    engine = create_engine()
    response = await post_json(engine, route, stream=stream, **fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert f"'{param}'" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        # What the vendor's conversion refuses.
        (
            [{"role": "assistant", "content": "a", "prefix": True}, {"role": "user", "content": "a"}],
            "messages",
        ),
    ],
)
async def test_bad_messages_are_answered_with_their_place(messages: object, param: str):
    response = await post_json(create_engine(), CHAT, messages=messages)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([1, TINY_VOCAB_SIZE], "prompt[1]"), ([-1], "prompt[0]"), ([], "prompt"), (None, "prompt")],
)
async def test_bad_prompts_are_answered_with_their_place(prompt: object, param: str):
    response = await post_json(create_engine(), COMPLETIONS, prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


async def test_a_prompt_without_a_token_is_refused():
    response = await post_json(create_engine(), COMPLETIONS, prompt="", add_special_tokens=False)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


@on_both_routes
async def test_an_unknown_model_is_not_found(route: str):
    response = await post_json(create_engine(), route, model="gpt-unknown")
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-unknown" in error["message"]
    assert MODEL in error["message"]


@streamed_or_not
@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * MAX_MODEL_LEN}]}, "messages"),
        (COMPLETIONS, {"prompt": "a" * MAX_MODEL_LEN}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        (CHAT, {"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 10**30}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": [5] * 100, "max_tokens": MAX_MODEL_LEN - 99}, "max_tokens"),
    ],
)
async def test_what_does_not_fit_the_context_is_refused(
    stream: bool, route: str, fields: dict[str, object], param: str
):
    engine = create_engine()
    response = await post_json(engine, route, stream=stream, **fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert str(MAX_MODEL_LEN) in error["message"]
    assert not engine.requests


async def test_what_just_fits_the_context_is_served():
    engine = create_engine()
    assert (await post_json(engine, COMPLETIONS, prompt=[5] * (MAX_MODEL_LEN - 1))).is_success
    assert (await post_json(engine, COMPLETIONS, prompt=[5] * 100, max_tokens=MAX_MODEL_LEN - 100)).is_success
    assert [request.max_tokens for request in engine.requests] == [1, MAX_MODEL_LEN - 100]


@on_both_routes
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"\xef\xbb\xbf{}",
        '{"model": "m"}'.encode("utf-16"),
        b'{"model": "m"} trailing',
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 10_000 + b"}",
    ],
)
async def test_a_body_that_is_no_request_is_refused(route: str, content: bytes):
    response = await post(create_engine(), route, content)
    assert response.status_code == 400
    assert error_of(response)["param"] in ("body", "model")


@on_both_routes
async def test_deeply_nested_fields_that_nobody_reads_are_refused(route: str):
    nested = b"[" * 10_000 + b"]" * 10_000
    body = json.dumps(BODIES[route]).encode().removesuffix(b"}") + b', "metadata": ' + nested + b"}"
    response = await post(create_engine(), route, body)
    assert (response.status_code, error_of(response)["param"]) == (400, "body")


@on_both_routes
async def test_a_body_that_claims_to_be_too_large_is_not_read(route: str):
    async def parts() -> AsyncIterator[bytes]:
        pytest.fail("the body was read")
        yield b""

    response = await post(create_engine(), route, parts(), **{"content-length": str(2**40)})
    assert response.status_code == 413
    assert error_of(response)["param"] == "body"


@on_both_routes
@pytest.mark.parametrize("headers", [{}, {"content-length": "10"}, {"content-length": "many"}])
async def test_a_body_is_read_no_further_than_its_limit(route: str, headers: dict[str, str]):
    num_read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield b" " * 1024

    async with create_http_client(create_app(create_engine(), max_body_bytes=4096)) as client:
        response = await client.post(route, content=parts(), headers=JSON_HEADERS | headers)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert num_read == 5


@on_both_routes
@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
async def test_a_body_that_is_not_called_json_is_refused(route: str, media_type: str):
    response = await post(create_engine(), route, json.dumps(BODIES[route]), **{"content-type": media_type})
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


@on_both_routes
@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON"])
async def test_a_media_type_may_have_parameters_and_any_case(route: str, media_type: str):
    response = await post(create_engine(), route, json.dumps(BODIES[route]), **{"content-type": media_type})
    assert response.is_success


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", CHAT + "/", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("PUT", COMPLETIONS, 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
    ],
)
async def test_what_is_not_there_is_answered_as_openai_does(method: str, path: str, status: int, code: str):
    async with create_http_client(create_app(create_engine())) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    if status == 405:
        assert method not in response.headers["allow"]


# --- the engine's own refusals and failures, before the first byte ---


@on_both_routes
@streamed_or_not
@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (RequestError("overloaded", "256 requests wait", retry_after_s=1.2), 429, "rate_limit_exceeded"),
        (RequestError("invalid", "too long"), 400, "invalid_request_error"),
        (RequestError("internal", "the logits are not finite"), 500, "internal_error"),
        (RequestError("unavailable", "the core has ended"), 503, "internal_error"),
    ],
)
async def test_the_engines_refusal_has_its_own_status(
    route: str, stream: bool, error: RequestError, status: int, error_type: str
):
    response = await post_json(FakeEngine(refusal(error)), route, stream=stream)
    assert response.status_code == status
    assert error_of(response)["type"] == error_type
    assert error_of(response)["message"] == error.message
    assert response.headers.get("retry-after") == {429: "2", 503: "10"}.get(status)


@on_both_routes
@streamed_or_not
async def test_a_dead_engine_is_unavailable(route: str, stream: bool):
    engine = FakeEngine([EngineDeadError("The engine has lost its shards.", retry_after_s=5)])
    response = await post_json(engine, route, stream=stream)
    assert response.status_code == 503
    assert error_of(response)["code"] == "engine_dead"
    assert response.headers["retry-after"] == "5"


@on_both_routes
@streamed_or_not
async def test_an_aborted_request_is_unavailable(route: str, stream: bool):
    response = await post_json(FakeEngine(create_script([], finish_reason="abort")), route, stream=stream)
    assert response.status_code == 503


@on_both_routes
@streamed_or_not
async def test_an_unexpected_failure_is_a_500_that_tells_nothing(
    route: str, stream: bool, caplog: pytest.LogCaptureFixture
):
    app = create_app(FakeEngine([KeyError("secret")]))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(route, json=BODIES[route] | {"stream": stream})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "internal_error"
    assert "secret" in caplog.text


@on_both_routes
async def test_an_engine_that_ends_without_a_reason_is_an_error(route: str):
    assert (await post_json(FakeEngine([]), route)).status_code == 500


# --- models ---


async def test_models_are_listed_and_retrieved():
    model = {
        "id": "org/name",
        "object": "model",
        "created": int(NOW),
        "owned_by": "hotset",
        "max_model_len": MAX_MODEL_LEN,
    }
    async with create_http_client(create_app(create_engine(), model_name="org/name")) as client:
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": [model]}
        assert (await client.get("/v1/models/org/name")).json() == model


# --- anything at all ---

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        ["user", "assistant", "system", "text", "low", "none", MODEL, 0, 1, -1, 2**63, TINY_VOCAB_SIZE]
    ),
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "prefix", "include_usage"]), values
        )
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "latest_reminder"]),
            "content": st.text(max_size=9),
        },
        optional={"prefix": st.booleans(), "reasoning_content": st.text(max_size=5)},
    ),
    max_size=3,
)
FIELDS = sorted(
    ["temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "stream", "n"]
    + [
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "thinking",
        "echo",
    ]
    + ["reasoning_effort", "tools", "response_format", "logit_bias", "add_special_tokens", "user", "best_of"]
)
ANY_FIELDS = st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3)
ANY_BODY = st.builds(
    lambda base, fields: base | fields,
    st.fixed_dictionaries({"model": st.just(MODEL), "messages": MESSAGES | JSON_VALUES})
    | st.fixed_dictionaries({"model": st.just(MODEL), "prompt": JSON_VALUES})
    | st.dictionaries(st.sampled_from(["model", "messages", "prompt"]), JSON_VALUES),
    ANY_FIELDS,
)


@on_both_routes
@settings(deadline=None)
@given(body=ANY_BODY.map(json.dumps).map(str.encode) | st.binary(max_size=64))
async def test_no_body_whatsoever_is_a_server_error(route: str, body: bytes):
    """An exception that no handler knows would also come through the transport and fail this test."""
    response = await post(create_engine(), route, body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert error_of(response)["param"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_the_flex_tier_reaches_the_engine_as_batch_work(route: str):
    engine = create_engine()
    await post_json(engine, route, service_tier="flex")
    await post_json(engine, route)
    assert [request.priority for request in engine.requests] == ["batch", "interactive"]
