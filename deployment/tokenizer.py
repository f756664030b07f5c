"""Text to token ids and back: the vendor's prompt encoding, and an incremental detokenizer for replies.

Text of a user never becomes a control token: plain prompts are encoded without the added vocabulary, and in
chat prompts the vendor's encoding uses that vocabulary for the tokens it places itself, and for nothing else.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from deployment.errors import SettingsError

REPLY_MARKERS = (
    recipe.SpecialToken.ThinkingEnd,
    recipe.SpecialToken.Dsml,
)
"""Control tokens that structure a chat reply: the reply parser needs to see them."""

PROMPT_MARKERS = (
    recipe.SpecialToken.Bos,
    recipe.SpecialToken.Eos,
    recipe.SpecialToken.ThinkingStart,
    recipe.SpecialToken.System,
    recipe.SpecialToken.User,
    recipe.SpecialToken.Assistant,
    recipe.SpecialToken.LatestReminder,
)
"""Control tokens that structure a prompt: in a chat reply they mean nothing, whether flagged special or not."""

DEFAULT_EFFORT = "Reasoning Effort: 75 "
"""What a rendered prompt of the effort `high` says after its first two control tokens."""


class Tokenizer:
    """The checkpoint's `tokenizer.json`.

    Thread-safe. The encoding methods take as long as the text is, but leave other Python threads running, so
    an event loop calls them in a thread.
    """

    def __init__(self, tokenizer_json: str) -> None:
        vendor_tokenizer = recipe.Tokenizer.from_str(tokenizer_json)
        self._conversation_encoding = recipe.DeepseekV41Encoding().with_tokenizer(vendor_tokenizer)
        self._plain_text = _without_added_vocabulary(tokenizer_json)
        whole = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._token_bytes = _token_bytes(whole)
        self._hidden_ids = frozenset(
            id_ for id_, token in whole.get_added_tokens_decoder().items() if token.special
        )
        self._control_tokens = {
            id_: token.content for id_, token in whole.get_added_tokens_decoder().items() if token.content
        }
        self._control_ids = {token: id_ for id_, token in self._control_tokens.items()}
        self._marker_ids = self._ids_of(REPLY_MARKERS)
        self._hidden_in_chat_ids = (self._hidden_ids | self._ids_of(PROMPT_MARKERS)) - self._marker_ids
        self._bos_id = _check_control_tokens(whole, self._conversation_encoding)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`.

        Raises: SettingsError naming the file, if it cannot be read or lacks what prompts are made of.
        """
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SettingsError) as error:
            raise SettingsError(f"{path}: {error}") from error
        except Exception as error:  # what both libraries raise for a file that they do not understand
            raise SettingsError(f"{path}: not a tokenizer ({error})") from error

    def encode_text(self, text: str, *, add_bos: bool) -> list[int]:
        """Token ids of plain text; a control token spelt in it becomes ordinary tokens.

        Args:
            text: any text without lone surrogates.
            add_bos: put the begin-of-sentence token, which every training sequence has, in front.
        """
        # The batch call, since the one for a single text keeps the interpreter lock.
        [encoding] = self._plain_text.encode_batch_fast([text], add_special_tokens=False)
        bos_ids = [self._bos_id] if add_bos else []
        return [*bos_ids, *encoding.ids]

    def encode_conversation(
        self, conversation: recipe.Conversation, *, effort: int | None = None
    ) -> list[int]:
        """Token ids of a chat prompt.

        Args:
            conversation: what to render.
            effort: takes the place of the effort `high`, which the conversation then has if it has any.
        """
        if effort is None or not conversation.thinking_mode:
            token_ids: list[int] = self._conversation_encoding.encode(conversation)
            return token_ids
        rendered = self._conversation_encoding.render_conversation(conversation)
        return self._encode_rendered(rendered.prompt, rendered.special_ranges, effort)

    def _encode_rendered(self, prompt: str, ranges: list[tuple[int, int]], effort: int) -> list[int]:
        """Token ids of a rendered prompt, with another effort in its first text."""
        begins_of_text = [end for _, end in ranges]
        ends_of_text = [*(begin for begin, _ in ranges[1:]), len(prompt)]
        texts = [prompt[begin:end] for begin, end in zip(begins_of_text, ends_of_text, strict=True)]
        assert texts[1].startswith(DEFAULT_EFFORT), f"{texts[1][:40]=}"
        texts[1] = f"Reasoning Effort: {effort} " + texts[1].removeprefix(DEFAULT_EFFORT)
        token_ids = []
        for (begin, end), text in zip(ranges, texts, strict=True):
            token_ids.append(self._control_ids[prompt[begin:end]])
            token_ids += self.encode_text(text, add_bos=False)
        return token_ids

    def _ids_of(self, tokens: Iterable[recipe.SpecialToken]) -> frozenset[int]:
        ids = (self._control_ids.get(token.default_str()) for token in tokens)
        return frozenset(id_ for id_ in ids if id_ is not None)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for: a control token its spelling, an id without a token nothing."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def text_bytes(self, token_id: int, *, show_markers: bool = False) -> bytes:
        """What a token adds to the text of a reply: control tokens nothing, except the markers if wanted."""
        hidden_ids = self._hidden_in_chat_ids if show_markers else self._hidden_ids
        return b"" if token_id in hidden_ids else self.token_bytes(token_id)

    def token_string(self, token_id: int) -> str:
        """How the vocabulary spells a token: byte-level symbols, a control token as it is; without a token: empty."""
        return self._control_tokens.get(token_id) or self._plain_text.id_to_token(token_id) or ""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of whole replies, control tokens left out."""
        return b"".join(map(self.text_bytes, token_ids)).decode("utf-8", errors="replace")

    def spell(self, token_ids: Iterable[int]) -> str:
        """Text of whole prompts, control tokens as they are spelt."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")


class Detokenizer:
    """Text of one reply, token by token.

    Invariant: the pieces and the flush, joined, are what decoding all tokens at once gives. No piece has a
    part of a character: bytes that may become one wait for the next token, those that cannot are U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, show_markers: bool = False) -> None:
        self._tokenizer = tokenizer
        self._show_markers = show_markers
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that are now complete."""
        return self._decoder.decode(self._tokenizer.text_bytes(token_id, show_markers=self._show_markers))

    def flush(self) -> str:
        """End the reply; return what stands for bytes that still waited."""
        return self._decoder.decode(b"", final=True)


def _without_added_vocabulary(tokenizer_json: str) -> tokenizers.Tokenizer:
    """A tokenizer that cannot give a control token.

    NOTE: `encode_special_tokens` is not enough: it leaves out only the added tokens that are flagged special.
    """
    description: dict[str, Any] = json.loads(tokenizer_json)
    description["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _token_bytes(tokenizer: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every token id, as a byte-level decoder has them."""
    byte_of = _byte_of_symbol()
    table = [b""] * (1 + max(tokenizer.get_vocab(with_added_tokens=True).values()))
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        is_byte_level = all(symbol in byte_of for symbol in token)
        table[token_id] = bytes(map(byte_of.__getitem__, token)) if is_byte_level else token.encode()
    return table


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's alphabet of printable symbols for the 256 bytes: most stand for themselves.

    The bytes without a printable Latin-1 symbol take the symbols from U+0100 on, in order.
    """
    symbols = ByteLevel.alphabet()
    others = [byte for byte in range(256) if chr(byte) not in symbols]
    return {chr(byte): byte for byte in range(256) if chr(byte) in symbols} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


def _check_control_tokens(tokenizer: tokenizers.Tokenizer, encoding: recipe.DeepseekV41Encoding) -> int:
    """Render both kinds of prompt once, so that a missing control token is found at the start.

    Returns: the id of the begin-of-sentence token.
    Raises: SettingsError naming the token.
    """
    for thinking in (True, False):
        messages = [recipe.SystemMessage("s"), recipe.UserMessage("u"), recipe.AssistantMessage("a")]
        try:
            encoding.encode(recipe.Conversation([*messages, messages[1]], thinking_mode=thinking))
        except RuntimeError as error:
            raise SettingsError(str(error)) from error
    bos_id = tokenizer.token_to_id(recipe.SpecialToken.Bos.default_str())
    assert bos_id is not None, "every prompt begins with it"
    return bos_id
