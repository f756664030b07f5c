"""The tiny checkpoint's tokenizer: one id per byte, and the release's control tokens as they are spelt there.

Ids: 0 BOS, 1 EOS, 2 PAD, 3..258 the bytes, then reserved placeholders, and the control tokens at the end of
the vocabulary, where the released tokenizer has them too (section 9.1).
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
CONTROL_TOKENS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜deepseek_image｜>",
    "<｜System｜>",
)
"""The last ids of the vocabulary, in this order; with 512 ids the image is 510 and the noise token 511."""
FIRST_BYTE_ID = 3


def write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    Args:
        directory: an existing folder.
        vocab_size: number of ids; every one decodes to something.
        max_length: `model_max_length` of `tokenizer_config.json`, in tokens.
    """
    build_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": max_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(tokenizer_config, ensure_ascii=False, indent=1)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE without merges, so that every byte is a token.

    Args:
        vocab_size: number of ids.
    Raises: ValueError if the bytes and control tokens need more ids.
    """
    byte_symbols = sorted(ByteLevel.alphabet())
    num_placeholders = vocab_size - FIRST_BYTE_ID - len(byte_symbols) - len(CONTROL_TOKENS)
    if num_placeholders < 0:
        raise ValueError(
            f"vocab_size {vocab_size} is {-num_placeholders} ids short of all bytes and control tokens"
        )
    placeholders = [f"<｜place▁holder▁no▁{n}｜>" for n in range(num_placeholders)]
    tokens = [BOS, EOS, PAD, *byte_symbols, *placeholders, *CONTROL_TOKENS]
    # An added token that the model's vocabulary knows keeps its id there: that is what fixes the ids.
    tokenizer = Tokenizer(BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = [BOS, EOS, PAD, *placeholders, *CONTROL_TOKENS]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer
