import math

import pytest

from actors.messages import SampledToken, TokenLogprob
from deployment.logprobs import AlignedToken, TokenAligner, chat_logprobs, completion_logprobs
from tests.unit.deployment.tokenizers_for_tests import tiny_tokenizer


def create_aligner(*texts: str, marker: str = "") -> TokenAligner:
    """An aligner with one token for each text; its id is its index."""
    aligner = TokenAligner(marker)
    for token_id, text in enumerate(texts):
        aligner.push(text, SampledToken(token_id))
    return aligner


def ids(tokens: list[AlignedToken]) -> list[int]:
    return [aligned.token.token_id for aligned in tokens]


def test_a_token_is_taken_with_the_first_character_of_its_text():
    aligner = create_aligner("ab", "c")
    assert ids(aligner.take("a")) == [0]
    assert ids(aligner.take("b")) == []
    assert ids(aligner.take("c")) == [1]


def test_parts_of_a_character_are_taken_with_it():
    aligner = create_aligner("a", "", "é", "b")
    assert ids(aligner.take("a")) == [0]
    assert ids(aligner.take("é")) == [1, 2]


def test_offsets_count_all_text_before():
    aligner = create_aligner("ab", "", "é", "c")
    assert [aligned.offset for aligned in aligner.take("abéc")] == [0, 2, 2, 3]


def test_tokens_without_text_at_the_end_are_the_rest():
    aligner = create_aligner("a", "", "")
    aligner.take("a")
    assert ids(aligner.take_rest()) == [1, 2]
    assert aligner.take_rest() == []


def test_text_without_a_token_belongs_to_the_unfinished_one_before():
    aligner = create_aligner("a", "")
    aligner.push("\ufffd", None)
    assert ids(aligner.take("a\ufffd")) == [0, 1]


def test_dropped_tokens_are_forgotten():
    aligner = create_aligner("\n", "a", "\n", "<m>", "\n", "b", marker="<m>")
    assert ids(aligner.take("a")) == [1]
    assert ids(aligner.take("b")) == [5]


@pytest.mark.parametrize("pieces", [["<m>m"], ["<", "m>", "m"], ["<m", ">m"]])
def test_released_text_is_not_looked_for_inside_a_marker(pieces: list[str]):
    aligner = create_aligner(*pieces, marker="<m>")
    assert ids(aligner.take("m")) == [len(pieces) - 1]


def test_text_that_was_never_pushed_is_our_own_mistake():
    with pytest.raises(AssertionError, match="released='b'"):
        create_aligner("a").take("b")


def test_minus_infinity_becomes_a_number_that_json_has():
    token = SampledToken(3, logprob=-math.inf, top_logprobs=[TokenLogprob(3, -math.inf)])
    [entry] = chat_logprobs(tiny_tokenizer(), [AlignedToken(token, 0)])
    assert (entry.logprob, entry.top_logprobs[0].logprob) == (-9999.0, -9999.0)
    assert completion_logprobs(tiny_tokenizer(), [AlignedToken(token, 0)]).token_logprobs == [-9999.0]
