"""The official `openai` client, unchanged, against the API in this process."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from actors.messages import RequestError
from deployment.errors import EngineDeadError
from tests.unit.deployment.fake_engine import (
    MAX_MODEL_LEN,
    MODEL,
    FakeEngine,
    create_app,
    create_output,
    end_of_turn,
    refusal,
)
from tests.unit.deployment.tokenizers_for_tests import byte_ids, control_id


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(end_of_turn(byte_ids("né".encode()), byte_ids(b"e")))


@pytest_asyncio.fixture
async def client(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport) as http_client:
        yield openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="unused", http_client=http_client, max_retries=0
        )


async def test_chat(client: openai.AsyncOpenAI):
    completion = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=5
    )
    assert completion.choices[0].message.content == "née"
    assert completion.choices[0].message.role == "assistant"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 5


async def test_chat_streamed(client: openai.AsyncOpenAI):
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "née"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


async def test_chat_by_the_stream_helper(client: openai.AsyncOpenAI):
    async with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        completion = await stream.get_final_completion()
    assert "".join(deltas) == "née"
    assert completion.choices[0].message.content == "née"


async def test_chat_with_reasoning(client: openai.AsyncOpenAI, engine: FakeEngine):
    engine.script = [*end_of_turn([*byte_ids(b"so"), control_id("</think>")], byte_ids(b"yes"))]
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        reasoning_effort="low",
        extra_body={"thinking": {"type": "enabled"}, "top_k": 5, "min_p": 0.1, "ignore_eos": True},
    )
    message = completion.choices[0].message
    assert message.content == "yes"
    assert message.model_extra == {"reasoning_content": "so"}
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == 2
    [request] = engine.requests
    assert (request.sampling.top_k, request.sampling.min_p, request.ignore_eos) == (5, 0.1, True)


async def test_chat_logprobs(client: openai.AsyncOpenAI):
    completion = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert bytes(byte for entry in logprobs.content for byte in entry.bytes or []).decode() == "née"
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 4


async def test_completions(client: openai.AsyncOpenAI):
    completion = await client.completions.create(model=MODEL, prompt="hi", logprobs=1)
    assert completion.choices[0].text == "née"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.text_offset == [0, 1, 1, 2]


async def test_completions_streamed(client: openai.AsyncOpenAI):
    stream = await client.completions.create(model=MODEL, prompt=[5, 6], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "née"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models(client: openai.AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_a_mistake_names_its_field(client: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=[])
    assert caught.value.param == "messages"
    assert caught.value.type == "invalid_request_error"


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="other", prompt="hi")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_is_a_bad_request(client: openai.AsyncOpenAI, stream: bool):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[5] * MAX_MODEL_LEN, stream=stream)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_is_a_rate_limit(client: openai.AsyncOpenAI, engine: FakeEngine, stream: bool):
    engine.script = [*refusal(RequestError("overloaded", "too many wait", retry_after_s=3))]
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model=MODEL, prompt="hi", stream=stream)
    assert caught.value.response.headers["retry-after"] == "3"


async def test_a_failure_in_mid_stream_is_raised(client: openai.AsyncOpenAI, engine: FakeEngine):
    engine.script = [create_output(byte_ids(b"ab")), EngineDeadError("The engine has lost its shards.")]
    stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
    assert (await anext(stream)).choices[0].text == "ab"
    with pytest.raises(openai.APIError, match="lost its shards"):
        await anext(stream)
