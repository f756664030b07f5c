import json
from pathlib import Path

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from deployment.errors import SettingsError
from deployment.tokenizer import Detokenizer, Tokenizer
from model.tiny_tokenizer import BOS, CONTROL_TOKENS, EOS, PAD, write_tokenizer
from tests.unit.deployment.tokenizers_for_tests import (
    BOS_ID,
    TINY_VOCAB_SIZE,
    byte_ids,
    control_id,
    merging_library_tokenizer,
    merging_tokenizer,
    tiny_library_tokenizer,
    tiny_tokenizer,
)

BOTH = pytest.mark.parametrize(
    ("tokenizer", "library"),
    [
        pytest.param(tiny_tokenizer(), tiny_library_tokenizer(), id="tiny"),
        pytest.param(merging_tokenizer(), merging_library_tokenizer(), id="merging"),
    ],
)
SPELLINGS = [BOS, EOS, PAD, *CONTROL_TOKENS]
HOSTILE_TEXT = st.lists(st.sampled_from(SPELLINGS) | st.text(max_size=8)).map("".join)
# Bytes above 0x7f come in parts of characters, most of them broken.
UTF8_PARTS = [
    b"\x80",
    b"\xc3",
    b"\xa9",
    b"\xe2",
    b"\x82",
    b"\xac",
    b"\xf0",
    b"\x9f",
    b"\x98",
    b"\xed",
    b"\xa0",
]


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@BOTH
@settings(deadline=None)
@given(data=st.data())
def test_streamed_text_is_what_the_library_decodes_at_once(
    tokenizer: Tokenizer, library: LibraryTokenizer, data: st.DataObject
):
    any_id = st.integers(0, library.get_vocab_size() + 1)
    part = st.sampled_from(UTF8_PARTS).map(lambda part: library.encode(part.decode("latin-1")).ids[-1])
    token_ids = data.draw(st.lists(any_id | part))
    expected = library.decode(token_ids, skip_special_tokens=True)
    assert "".join(streamed(tokenizer, token_ids)) == expected
    assert tokenizer.decode(token_ids) == expected


@settings(deadline=None)
@given(st.lists(st.sampled_from(UTF8_PARTS) | st.binary(min_size=1, max_size=3)).map(b"".join))
def test_streamed_bytes_are_what_decoding_them_at_once_gives(data: bytes):
    assert "".join(streamed(tiny_tokenizer(), byte_ids(data))) == data.decode(errors="replace")


@settings(deadline=None)
@given(st.text())
def test_no_piece_has_half_a_character(text: str):
    pieces = streamed(tiny_tokenizer(), byte_ids(text.encode()))
    assert [piece for piece in pieces if piece] == list(text)


def test_a_lone_continuation_byte_does_not_wait_for_the_end():
    assert streamed(tiny_tokenizer(), byte_ids(b"a\x80\x80b")) == ["a", "\ufffd", "\ufffd", "b", ""]


def test_an_unfinished_character_at_the_end_is_replaced():
    assert streamed(tiny_tokenizer(), byte_ids(b"a\xe2\x82")) == ["a", "", "", "\ufffd"]


def test_control_tokens_add_no_text():
    assert tiny_tokenizer().decode([control_id("<think>"), *byte_ids(b"a"), control_id("<｜User｜>")]) == "a"


def test_markers_can_be_shown_and_other_control_tokens_stay_hidden():
    detokenizer = Detokenizer(tiny_tokenizer(), show_markers=True)
    markers = ["</think>", "｜DSML｜"]
    assert [detokenizer.push(control_id(marker)) for marker in markers] == markers
    assert [detokenizer.push(control_id(hidden)) for hidden in ("<｜User｜>", "<think>")] == ["", ""]


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), merging_tokenizer()], ids=["tiny", "merging"])
def test_no_control_token_of_a_prompt_is_part_of_a_chat_reply(tokenizer: Tokenizer):
    token_ids = tokenizer.encode_conversation(recipe.Conversation([recipe.UserMessage("")]), effort=3)
    shown = [tokenizer.text_bytes(token_id, show_markers=True) for token_id in token_ids]
    line = "Reasoning Effort: 3 (range 1-100, the higher the value, the more thorough the reasoning)"
    assert b"".join(shown).decode() == line + "\n\n"


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), merging_tokenizer()], ids=["tiny", "merging"])
@settings(deadline=None)
@given(text=HOSTILE_TEXT)
def test_a_numbered_effort_changes_nothing_but_its_line(tokenizer: Tokenizer, text: str):
    messages = [recipe.SystemMessage(text), recipe.UserMessage(text), recipe.AssistantMessage(text)]
    conversation = recipe.Conversation([*messages, messages[1]], reasoning_effort="high")
    assert tokenizer.encode_conversation(conversation, effort=75) == tokenizer.encode_conversation(
        conversation
    )


def test_an_id_without_a_token_is_nothing():
    assert tiny_tokenizer().token_bytes(TINY_VOCAB_SIZE) == b""
    assert tiny_tokenizer().decode([TINY_VOCAB_SIZE + 1000]) == ""


@BOTH
def test_token_bytes_are_the_bytes_of_the_text(tokenizer: Tokenizer, library: LibraryTokenizer):
    text = "abcd \n\n€é😀\x00"
    token_ids = tokenizer.encode_text(text, add_bos=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


@BOTH
@settings(deadline=None)
@given(text=HOSTILE_TEXT)
def test_plain_text_never_gives_a_control_token(tokenizer: Tokenizer, library: LibraryTokenizer, text: str):
    token_ids = tokenizer.encode_text(text, add_bos=False)
    assert not set(token_ids) & {library.token_to_id(spelling) for spelling in SPELLINGS}
    assert tokenizer.decode(token_ids) == text


def test_plain_text_begins_with_bos_only_if_asked():
    assert tiny_tokenizer().encode_text("", add_bos=True) == [BOS_ID]
    assert tiny_tokenizer().encode_text("", add_bos=False) == []


@BOTH
@settings(deadline=None)
@given(text=HOSTILE_TEXT, thinking=st.booleans())
def test_a_message_never_gives_a_control_token(
    tokenizer: Tokenizer, library: LibraryTokenizer, text: str, thinking: bool
):
    def control_tokens(text: str) -> list[int]:
        messages = [recipe.SystemMessage(text), recipe.UserMessage(text)]
        token_ids = tokenizer.encode_conversation(recipe.Conversation(messages, thinking_mode=thinking))
        return [token_id for token_id in token_ids if token_id in controls]

    controls = {library.token_to_id(spelling) for spelling in SPELLINGS}
    assert control_tokens(text) == control_tokens("harmless")


def test_a_chat_prompt_is_rendered_as_the_vendor_does():
    messages = [recipe.SystemMessage("S"), recipe.UserMessage("U")]
    token_ids = tiny_tokenizer().encode_conversation(recipe.Conversation(messages, thinking_mode=False))
    assert token_ids == [
        BOS_ID,
        control_id("<｜System｜>"),
        *byte_ids(b"S"),
        control_id("<｜User｜>"),
        *byte_ids(b"U"),
        control_id("<｜Assistant｜>"),
        control_id("</think>"),
    ]


def test_the_file_of_the_tiny_checkpoint_loads(tmp_path: Path):
    write_tokenizer(tmp_path, TINY_VOCAB_SIZE, max_length=256)
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode_text("a", add_bos=True) == [
        BOS_ID,
        *byte_ids(b"a"),
    ]


@pytest.mark.parametrize("content", [None, b"\xff", b"no json", b"{}", b'{"model": 3}'])
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: bytes | None):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match="tokenizer.json"):
        Tokenizer.load(path)


@pytest.mark.parametrize("missing", [BOS, EOS, "<｜System｜>", "<｜User｜>", "<think>", "</think>"])
def test_a_file_without_a_control_token_is_refused_by_its_name(tmp_path: Path, missing: str):
    description = json.loads(tiny_library_tokenizer().to_str())
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["content"] != missing
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description), encoding="utf-8")
    with pytest.raises(SettingsError, match=f"tokenizer.json.*{missing}"):
        Tokenizer.load(path)
