import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from deployment.http_errors import field_name
from deployment.openai_base import RequestPart
from deployment.openai_chat import ChatChunkChoice, ChatCompletionRequest, ChatDelta
from deployment.openai_completions import CompletionRequest
from deployment.openai_generation import INT64_MAX

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
ANY_SEED = 7


def chat(**fields: object) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate_json(json.dumps(CHAT | fields))


def completion(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps(COMPLETION | fields))


def message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


def refused_field(model: type[BaseModel], body: dict[str, object]) -> str:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(body))
    return field_name(caught.value.errors()[0]["loc"])


CALL = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
COMMON_MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"model": "m" * 1000}, "model"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": float("-inf")}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "1"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": 3}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop_token_ids": [3, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]
COMMON_UNSUPPORTED: list[dict[str, object]] = [
    {"n": 2},
    {"n": True},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"5": 1}},
    {"min_tokens": 1},
    {"bad_words": ["a"]},
    {"allowed_token_ids": [1]},
    {"structured_outputs": {"json": {}}},
    {"prompt_logprobs": 0},
    {"truncate_prompt_tokens": 5},
    {"use_beam_search": True},
    {"skip_special_tokens": False},
    {"include_stop_str_in_output": True},
    {"echo": True},
]
COMMON_NEUTRAL: dict[str, object] = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_tokens": 0,
    "use_beam_search": False,
    "echo": False,
    "structured_outputs": None,
}
HARMLESS: dict[str, object] = {
    "user": "someone",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "a_field_of_next_year": [1],
}


@pytest.mark.parametrize(("fields", "field"), COMMON_MISTAKES)
def test_a_mistake_is_refused_by_its_name(fields: dict[str, object], field: str):
    assert refused_field(ChatCompletionRequest, CHAT | fields) == field
    assert refused_field(CompletionRequest, COMPLETION | fields) == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        (message(role="developer"), "messages[0].role"),
        (message(role="wizard"), "messages[0].role"),
        (message(role=None), "messages[0].role"),
        (message(content=None), "messages[0].content"),
        (message(content=3), "messages[0].content"),
        (message(content={"type": "text", "text": "a"}), "messages[0].content"),
        (message(content=["a"]), "messages[0].content[0]"),
        (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
        (message(content=[{"type": "text", "text": None}]), "messages[0].content[0].text"),
        (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
        (message(reasoning_content=3), "messages[0].reasoning_content"),
        (message(role="assistant", content=None), "messages[0].content"),
        (message(role="assistant", tool_calls=[{"id": "x"}]), "messages[0].tool_calls[0].function"),
        (message(role="user", tool_calls=[CALL]), "messages[0].tool_calls"),
        (message(role="tool"), "messages[0].tool_call_id"),
        (message(role="tool", tool_call_id="x", content=None), "messages[0].content"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 0}, "reasoning_effort"),
        ({"reasoning_effort": 101}, "reasoning_effort"),
        ({"reasoning_effort": True}, "reasoning_effort"),
        ({"reasoning_effort": 1.5}, "reasoning_effort"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"tone": "warm"}}, "chat_template_kwargs.tone"),
    ],
)
def test_a_mistake_in_a_chat_request_is_refused_by_its_name(fields: dict[str, object], field: str):
    assert refused_field(ChatCompletionRequest, CHAT | fields) == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_a_mistake_in_a_completion_request_is_refused_by_its_name(fields: dict[str, object], field: str):
    assert refused_field(CompletionRequest, COMPLETION | fields) == field


@pytest.mark.parametrize("body", [{}, {"model": "m"}])
def test_a_missing_field_is_named(body: dict[str, object]):
    assert refused_field(ChatCompletionRequest, body) == ("messages" if body else "model")
    assert refused_field(CompletionRequest, body) == ("prompt" if body else "model")


@pytest.mark.parametrize("fields", COMMON_UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_its_name(fields: dict[str, object]):
    [name] = fields
    assert refused_field(ChatCompletionRequest, CHAT | fields) == name
    assert refused_field(CompletionRequest, COMPLETION | fields) == name


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x", "format": "wav"}},
        {"prediction": {"type": "content", "content": "a"}},
        {"web_search_options": {}},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
    ],
)
def test_what_chat_does_not_support_is_refused_by_its_name(fields: dict[str, object]):
    [name] = fields
    assert refused_field(ChatCompletionRequest, CHAT | fields) == name


@pytest.mark.parametrize("fields", [{"best_of": 2}, {"suffix": "end"}])
def test_what_completions_do_not_support_is_refused_by_its_name(fields: dict[str, object]):
    [name] = fields
    assert refused_field(CompletionRequest, COMPLETION | fields) == name


def test_neutral_values_of_what_is_not_supported_are_let_through():
    chat(
        **COMMON_NEUTRAL, tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"]
    )
    completion(**COMMON_NEUTRAL, best_of=1, suffix="")


def test_harmless_unknown_fields_are_ignored():
    chat(**HARMLESS)
    completion(**HARMLESS)


def test_null_means_unset():
    fields = dict.fromkeys(set(ChatCompletionRequest.model_fields) - {"model", "messages"})
    assert chat(**fields).sampling_params(ANY_SEED) == chat().sampling_params(ANY_SEED)
    fields = dict.fromkeys(set(CompletionRequest.model_fields) - {"model", "prompt"})
    assert completion(**fields).sampling_params(ANY_SEED) == completion().sampling_params(ANY_SEED)


@pytest.mark.parametrize("text", [r"\ud800", r"\ud800a", r"\udc00", r"\ud800\ud800"])
def test_lone_surrogates_are_refused(text: str):
    with pytest.raises(ValidationError, match="Invalid JSON"):
        CompletionRequest.model_validate_json(f'{{"model": "m", "prompt": "{text}"}}')


def test_unset_sampling_is_the_vendors():
    sampling = chat().sampling_params(ANY_SEED)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.num_logprobs is None


def test_sampling_reaches_the_engine_as_it_came():
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 0}
    sampling = completion(**fields).sampling_params(ANY_SEED)
    assert {name: getattr(sampling, name) for name in fields} == fields


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_ways_to_keep_all_tokens_mean_the_same(top_k: int):
    assert chat(top_k=top_k).sampling_params(ANY_SEED).top_k == 0


@settings(deadline=None)
@given(st.integers(-INT64_MAX - 1, INT64_MAX))
def test_every_seed_becomes_one_that_is_not_negative(seed: int):
    assert 0 <= chat(seed=seed).sampling_params(ANY_SEED).seed <= INT64_MAX


def test_without_a_seed_the_random_one_is_taken():
    assert chat().sampling_params(ANY_SEED).seed == ANY_SEED


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_chat_logprobs_are_a_switch_and_a_number(fields: dict[str, object], num_logprobs: int | None):
    assert chat(**fields).num_logprobs == num_logprobs


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_completion_logprobs_are_a_number(logprobs: int | None):
    assert completion(logprobs=logprobs).num_logprobs == logprobs


@pytest.mark.parametrize(("stop", "strings"), [(None, []), ([], []), ("a", ["a"]), (["a", "b"], ["a", "b"])])
def test_stop_is_one_string_or_a_list(stop: object, strings: list[str]):
    assert chat(stop=stop).stop_strings == strings


@pytest.mark.parametrize(
    ("prompt", "single"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ("", ""), ([""], "")],
)
def test_a_prompt_may_stand_in_a_list(prompt: object, single: str | list[int]):
    assert completion(prompt=prompt).single_prompt == single


def test_the_newer_name_of_the_output_limit_wins():
    assert chat(max_tokens=3).output_limit == ("max_tokens", 3)
    assert chat(max_tokens=3, max_completion_tokens=4).output_limit == ("max_completion_tokens", 4)


def test_a_chunk_has_null_for_what_is_unset_and_no_empty_delta_fields():
    choice = ChatChunkChoice(delta=ChatDelta(content="a"))
    assert choice.model_dump() == {
        "index": 0,
        "delta": {"content": "a"},
        "logprobs": None,
        "finish_reason": None,
    }


def test_requests_cannot_be_changed_after_validation():
    with pytest.raises(ValidationError, match="frozen"):
        chat().temperature = 3.0  # type: ignore[misc]
    assert RequestPart.model_config["strict"]


@pytest.mark.parametrize(
    ("tier", "priority"),
    [(None, "interactive"), ("auto", "interactive"), ("priority", "interactive"), ("flex", "batch")],
)
def test_the_flex_tier_is_batch_work(tier: str | None, priority: str):
    for kind, body in ((ChatCompletionRequest, CHAT), (CompletionRequest, COMPLETION)):
        assert kind.model_validate(body | {"service_tier": tier}).priority == priority
