import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import RequestOutput
from deployment.completions import CompletionNews, CompletionReply
from deployment.generation import ReplyHeader
from deployment.openai_completions import Completion, CompletionChoice, CompletionRequest
from deployment.tokenizer import Tokenizer
from tests.unit.deployment.fake_engine import address, create_script, end_of_turn
from tests.unit.deployment.tokenizers_for_tests import (
    BOS_ID,
    byte_ids,
    control_id,
    merging_tokenizer,
    tiny_tokenizer,
)

HEADER = ReplyHeader(id="cmpl-1", created=1, model="m", system_fingerprint="fp_1")
NUM_PROMPT_TOKENS = 3
BOTH = pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), merging_tokenizer()], ids=["tiny", "merging"])


def complete(script: list[RequestOutput], tokenizer: Tokenizer | None = None, **fields: object) -> Completion:
    """The whole completion of a script, after checking that the stream says the same."""
    request = CompletionRequest.model_validate_json(json.dumps({"model": "m", "prompt": "p", **fields}))
    reply = CompletionReply(HEADER, request, NUM_PROMPT_TOKENS, tokenizer or tiny_tokenizer())
    deltas: list[CompletionNews] = []
    for output in script:
        delta = reply.push(address(output, "cmpl-1", request.num_logprobs))
        deltas += [] if delta is None else [delta]
        if reply.is_finished:
            break
    whole = reply.response(deltas)
    told = [chunk for delta in deltas for chunk in reply.chunks(delta)]
    chunks = [*reply.opening_chunks(), *told, *reply.closing_chunks()]
    assert isinstance(whole, Completion)
    choices = [chunk.choices[0] for chunk in chunks if isinstance(chunk, Completion)]
    _check_same(whole.choices[0], choices)
    return whole


def _check_same(whole: CompletionChoice, streamed: list[CompletionChoice]) -> None:
    assert "".join(choice.text for choice in streamed) == whole.text
    assert [choice.finish_reason for choice in streamed[-1:]] == [whole.finish_reason]
    if whole.logprobs:
        parts = [choice.logprobs.model_dump() for choice in streamed if choice.logprobs]
        for name, entries in whole.logprobs.model_dump().items():
            assert [entry for part in parts for entry in part[name]] == entries


def text_of(whole: Completion) -> str:
    return whole.choices[0].text


def test_a_completion_is_the_text_of_its_tokens():
    whole = complete(end_of_turn(byte_ids("né".encode()), byte_ids(b"e")))
    assert text_of(whole) == "née"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.model_dump() == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_markers_of_chat_mean_nothing_here():
    token_ids = [*byte_ids(b"a</think>\n"), control_id("</think>"), BOS_ID, *byte_ids(b"b")]
    assert text_of(complete(create_script(token_ids))) == "a</think>\nb"


@BOTH
@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, 520)), data=st.data())
def test_the_text_is_what_decoding_all_tokens_gives(
    tokenizer: Tokenizer, token_ids: list[int], data: st.DataObject
):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)))))
    steps = [token_ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    assert text_of(complete(create_script(*steps), tokenizer)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("steps", [[b"xab", b"c", b"d"], [b"xabcdef"], [b"x", b"a", b"b", b"c", b"d"]])
def test_the_text_ends_before_a_stop_string_however_it_is_cut(steps: list[bytes]):
    whole = complete(create_script(*map(byte_ids, steps)), stop=["bc", "zz"])
    assert text_of(whole) == "xa"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4


def test_a_stop_string_may_be_in_what_stands_for_broken_bytes():
    assert text_of(complete(create_script(byte_ids(b"a\xe2")), stop="\ufffd")) == "a"


def test_a_beginning_of_a_stop_string_is_released_at_the_end():
    whole = complete(create_script(byte_ids(b"xab")), stop=["bc"])
    assert text_of(whole) == "xab"
    assert whole.choices[0].finish_reason == "length"


def test_logprobs_are_parallel_arrays_with_character_offsets():
    token_ids = byte_ids("né!".encode())
    whole = complete(create_script(token_ids[:2], token_ids[2:]), logprobs=1)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["n", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-float(token_id) for token_id in token_ids]
    assert logprobs.top_logprobs[0] == {"n": -float(token_ids[0])}


def test_the_chosen_token_is_among_the_top_logprobs():
    logprobs = complete(create_script(byte_ids(b"a")), logprobs=0).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"a": -float(byte_ids(b"a")[0])}]


@BOTH
@settings(deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 520)), stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2)
)
def test_the_pieces_between_the_offsets_make_the_text(
    tokenizer: Tokenizer, token_ids: list[int], stop: list[str]
):
    choice = complete(create_script(token_ids), tokenizer, logprobs=2, stop=stop).choices[0]
    assert choice.logprobs is not None
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    pieces = [choice.text[begin:end] for begin, end in itertools.pairwise([*offsets, len(choice.text)])]
    assert "".join(pieces) == choice.text
    arrays = choice.logprobs.model_dump().values()
    assert {len(array) for array in arrays} == {len(offsets)}
    if choice.finish_reason == "length":
        assert len(offsets) == len(token_ids)


def test_tokens_whose_text_was_cut_off_have_no_logprobs():
    tokenizer = merging_tokenizer()
    token_ids = tokenizer.encode_text("xabcdé!", add_bos=False)
    for stop, tokens in {"bc": ["x", "abcd"], "abcd": ["x"], "é": ["x", "abcd"], "x": []}.items():
        logprobs = complete(create_script(token_ids), tokenizer, logprobs=0, stop=stop).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == tokens
