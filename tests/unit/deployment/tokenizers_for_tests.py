"""Small tokenizers: the tiny checkpoint's, and one whose tokens are cut as a trained tokenizer's are."""

from functools import cache

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from deployment.tokenizer import Tokenizer
from model.tiny_tokenizer import BOS, CONTROL_TOKENS, EOS, PAD, build_tokenizer

TINY_VOCAB_SIZE = 512
BOS_ID, EOS_ID = 0, 1


@cache
def tiny_library_tokenizer() -> LibraryTokenizer:
    return build_tokenizer(TINY_VOCAB_SIZE)


@cache
def tiny_tokenizer() -> Tokenizer:
    """One token per byte; all control tokens are flagged special."""
    return Tokenizer(tiny_library_tokenizer().to_str())


@cache
def merging_library_tokenizer() -> LibraryTokenizer:
    """Tokens of several characters and of parts of one; as in the release, few are flagged special."""
    byte_symbols = sorted(ByteLevel.alphabet())
    merges = [
        ("a", "b"),
        ("c", "d"),
        ("ab", "cd"),
        ("Ċ", "Ċ"),
        ("ð", "Ł"),
        ("âĤ", "¬"),
        ("â", "Ĥ"),
        ("Ã", "©"),
    ]
    merges.sort(key=lambda pair: len(pair[0] + pair[1]))
    merged = [left + right for left, right in merges]
    tokens = [BOS, EOS, PAD, *byte_symbols, *merged]
    model = BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges)
    tokenizer = LibraryTokenizer(model)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (BOS, EOS, PAD)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    return tokenizer


@cache
def merging_tokenizer() -> Tokenizer:
    return Tokenizer(merging_library_tokenizer().to_str())


def byte_ids(data: bytes) -> list[int]:
    """One token of the tiny tokenizer for each byte, also for bytes that are no text."""
    id_of = {tiny_tokenizer().token_bytes(id_): id_ for id_ in range(3, 259)}
    return [id_of[bytes([byte])] for byte in data]


def control_id(spelling: str) -> int:
    """Id of a control token of the tiny tokenizer."""
    token_id = tiny_library_tokenizer().token_to_id(spelling)
    assert token_id is not None, f"{spelling=}"
    return token_id
