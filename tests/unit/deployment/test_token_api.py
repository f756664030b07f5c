"""POST /tokenize and POST /detokenize: the prompt of a request, seen, and texts of ids."""

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.deployment.fake_engine import MODEL, FakeEngine, create_app, create_http_client
from tests.unit.deployment.tokenizers_for_tests import (
    BOS_ID,
    TINY_VOCAB_SIZE,
    byte_ids,
    control_id,
    merging_tokenizer,
)

MAX_MODEL_LEN = 4096
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_PROMPT = [
    BOS_ID,
    control_id("<｜User｜>"),
    *byte_ids(b"hi"),
    control_id("<｜Assistant｜>"),
    control_id("</think>"),
]


async def post(path: str, engine: FakeEngine | None = None, **fields: object) -> httpx.Response:
    app = create_app(engine or FakeEngine(), max_model_len=MAX_MODEL_LEN)
    async with create_http_client(app) as client:
        return await client.post(path, json=fields)


async def tokenize(**fields: object) -> dict[str, Any]:
    response = await post("/tokenize", **fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "hi"}, [BOS_ID, *byte_ids(b"hi")]),
        ({"prompt": "hi", "add_special_tokens": True}, [BOS_ID, *byte_ids(b"hi")]),
        ({"prompt": "hi", "add_special_tokens": False}, byte_ids(b"hi")),
        ({"prompt": "hi", "model": MODEL}, [BOS_ID, *byte_ids(b"hi")]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"prompt": "<｜User｜>", "add_special_tokens": False}, byte_ids("<｜User｜>".encode())),
        ({"messages": MESSAGES}, CHAT_PROMPT),
        ({"messages": MESSAGES, "add_special_tokens": False}, CHAT_PROMPT),
        ({"messages": MESSAGES, "thinking": {"type": "disabled"}}, CHAT_PROMPT),
    ],
)
async def test_tokens_are_those_of_a_prompt(fields: dict[str, object], tokens: list[int]):
    assert await tokenize(**fields) == {
        "count": len(tokens),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": tokens,
        "token_strs": None,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled"}},
        {"thinking": {"type": "enabled"}, "reasoning_effort": 3},
        {"chat_template_kwargs": {"thinking": True}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    ],
)
async def test_messages_are_tokenized_as_a_chat_request_is(fields: dict[str, object]):
    engine = FakeEngine([])
    await post("/v1/chat/completions", engine, model=MODEL, messages=MESSAGES, **fields)
    assert (await tokenize(messages=MESSAGES, **fields))["tokens"] == engine.requests[0].prompt_token_ids


async def test_token_strings_are_the_vocabularys():
    tokenizer = merging_tokenizer()
    async with create_http_client(create_app(FakeEngine(), tokenizer=tokenizer)) as client:
        body = {"messages": [{"role": "user", "content": "ab é"}], "return_token_strs": True}
        reply = (await client.post("/tokenize", json=body)).json()
    assert reply["token_strs"] == [
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "ab",
        "Ġ",
        "Ã©",
        "<｜Assistant｜>",
        "</think>",
    ]
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])


async def test_a_prompt_beyond_the_context_is_counted():
    assert (await tokenize(prompt="a" * 2 * MAX_MODEL_LEN))["count"] == 2 * MAX_MODEL_LEN + 1


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "body"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "body"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard"}]}, "messages[0].role"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, TINY_VOCAB_SIZE]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
)
async def test_a_mistake_is_answered_with_the_name_of_the_field(
    path: str, fields: dict[str, object], param: str
):
    response = await post(path, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_an_unknown_model_is_not_found(path: str):
    response = await post(path, model="other", prompt="a", tokens=[1])
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        ([], ""),
        (byte_ids("né".encode()), "né"),
        (CHAT_PROMPT, "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"),
        (byte_ids(b"a\xe2\x82"), "a\ufffd"),
    ],
)
async def test_ids_become_the_text_that_they_stand_for(tokens: list[int], prompt: str):
    response = await post("/detokenize", tokens=tokens)
    assert response.json() == {"prompt": prompt}


@given(st.text(max_size=20))
async def test_a_text_comes_back(text: str):
    async with create_http_client(create_app(FakeEngine(), tokenizer=merging_tokenizer())) as client:
        body = {"prompt": text, "add_special_tokens": False}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
