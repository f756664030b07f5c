"""Engram's token map, hash constants and row ids against appendix A and section 7.2 of the specification."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from kernels.reference.engram_hash import engram_row_ids, map_lookback
from model.config import CheckpointConfig, ModelConfig
from model.engram_map import (
    TOKEN_MAP_FILE,
    EngramHash,
    build_token_map,
    engram_moduli,
    engram_multipliers,
    load_token_map,
)
from model.shard_file import CheckpointError
from model.tiny import tiny_config

PAD = 2
RELEASED_CONFIG = Path(__file__).parent.parent / "data" / "released_config.json"


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return CheckpointConfig.load(RELEASED_CONFIG).text_config


@pytest.fixture(scope="module")
def tiny() -> ModelConfig:
    return ModelConfig.model_validate(tiny_config()["text_config"])


def lookback_of(token_ids: list[int], ngram: int = 4) -> Tensor:
    """`[len(token_ids), ngram]` of a sequence's first tokens, -1 before the start."""
    padded = torch.tensor([-1] * (ngram - 1) + token_ids)
    return padded.unfold(0, ngram, 1).flip(1)


def row_ids(config: ModelConfig, layer: int, compressed: Tensor) -> list[list[int]]:
    constants = EngramHash.from_config(config).layers[layer]
    return engram_row_ids(compressed, constants.multipliers, constants.moduli, constants.offsets).tolist()


class TestConstants:
    @pytest.mark.parametrize(
        ("layer", "compressed_vocab", "multipliers"),
        [
            (1, 99092, [76632096046245, 4839876093313, 35959672319349, 73987337458391]),
            (14, 99092, [67716810739261, 51510806800915, 30921347202721, 82619226485591]),
            (1, 256, [29662608052400909, 1873410163432121, 13919202536988139, 28638879857136817]),
            (4, 256, [31841131192811251, 1950019090429101, 28509641033320619, 7337012813361983]),
        ],
    )
    def test_multipliers_are_those_of_the_specification(
        self, layer: int, compressed_vocab: int, multipliers: list[int]
    ) -> None:
        assert engram_multipliers(layer, compressed_vocab).tolist() == multipliers

    def test_released_moduli_are_those_of_the_specification(self, released: ModelConfig) -> None:
        offsets = {layer: (moduli - 16_000_000).tolist() for layer, moduli in engram_moduli(released).items()}
        assert offsets == {
            1: [
                [57, 79, 81, 97, 121, 129, 133, 183],
                [189, 207, 211, 253, 277, 289, 307, 321],
                [339, 381, 393, 399, 403, 409, 447, 463],
            ],
            14: [
                [477, 487, 499, 507, 511, 573, 609, 627],
                [667, 669, 693, 697, 711, 729, 759, 769],
                [781, 799, 813, 819, 841, 877, 879, 889],
            ],
        }

    def test_tiny_moduli_are_those_of_the_specification(self, tiny: ModelConfig) -> None:
        assert {layer: moduli.tolist() for layer, moduli in engram_moduli(tiny).items()} == {
            1: [[101, 103], [107, 109], [113, 127]],
            4: [[131, 137], [139, 149], [151, 157]],
        }

    @pytest.mark.parametrize("variant", ["A", "wide"])
    def test_tiny_tables_have_as_many_rows_as_their_moduli_add_up_to(self, variant: str) -> None:
        config = ModelConfig.model_validate(tiny_config(variant)["text_config"])
        hashes = EngramHash.from_config(config)
        rows = tuple(hashes.table_rows(layer).stop for layer in config.engram_layer_ids)
        assert rows == config.engram_num_embeddings

    def test_released_tables_have_as_many_rows_as_their_moduli_add_up_to(self, released: ModelConfig) -> None:
        hashes = EngramHash.from_config(released)
        assert hashes.num_columns == 24
        assert [hashes.table_rows(layer) for layer in (1, 14)] == [slice(0, 384006168), slice(0, 384016682)]

    def test_column_ranges_tile_the_table(self, tiny: ModelConfig) -> None:
        hashes = EngramHash.from_config(tiny)
        halves = [hashes.table_rows(1, slice(start, start + 3)) for start in (0, 3)]
        assert halves == [slice(0, 101 + 103 + 107), slice(311, 660)]
        assert hashes.table_rows(1, slice(2, 2)) == slice(204, 204)


class TestRowIds:
    def test_tiny_rows_equal_the_golden_ones(self, tiny: ModelConfig) -> None:
        token_map = torch.arange(512) // 2
        compressed = map_lookback(lookback_of([0, 5, 9, 300, 301, 42]), token_map, PAD)
        first, fourth = row_ids(tiny, 1, compressed), row_ids(tiny, 4, compressed)
        assert first[0] == [96, 139, 250, 396, 528, 649]
        assert first[5] == [26, 184, 267, 395, 470, 635]
        assert fourth[0] == [69, 211, 401, 500, 650, 844]
        assert fourth[5] == [3, 197, 353, 447, 695, 751]

    def test_released_rows_equal_the_golden_ones(self, released: ModelConfig) -> None:
        # "The cat sat on the mat." after BOS, already compressed; the compressed pad id is 2.
        compressed_ids = [0, 237, 6264, 3228, 233, 237, 1516, 16]
        compressed = map_lookback(lookback_of(compressed_ids), torch.arange(99092), PAD)
        first, fourteenth = row_ids(released, 1, compressed), row_ids(released, 14, compressed)
        # fmt: off
        assert first[0] == [
            5702652, 24393184, 39183301, 61503783, 78984481, 90144770, 103724983, 121476532,
            131476717, 152385926, 164143652, 191599181, 198145581, 217419202, 238329687, 247482304,
            257520185, 283540304, 288689443, 315264704, 322314652, 348890037, 367865216, 380066193,
        ]
        assert first[7] == [
            8440022, 29692254, 35989533, 54377203, 65990603, 91203767, 103811953, 117503031,
            131446385, 147326341, 175744443, 186130884, 196637590, 217891256, 233771520, 253234126,
            258062694, 287247836, 295630068, 315828849, 329297399, 349504268, 365590798, 371580089,
        ]
        assert fourteenth[7] == [
            9986541, 20469716, 33130430, 57620445, 77880422, 81154051, 105298032, 125668209,
            132557473, 149723539, 163892695, 182288010, 206744350, 217786081, 236614456, 243008771,
            268599900, 272035898, 294426853, 306352199, 323633164, 348302197, 363034243, 372734347,
        ]
        # fmt: on

    def test_every_row_lies_in_its_columns_table(self, released: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(0)
        compressed = torch.randint(99092, (1000, 4), generator=generator)
        compressed[0] = 99091  # the largest product
        constants = EngramHash.from_config(released).layers[14]
        rows = engram_row_ids(compressed, constants.multipliers, constants.moduli, constants.offsets)
        starts = constants.offsets.flatten()
        assert bool(((rows >= starts) & (rows < starts + constants.moduli.flatten())).all())

    def test_everything_behind_a_dead_token_is_pad(self) -> None:
        lookback = torch.tensor([[7, 6, 5, 4], [7, -1, 5, 4], [-1, 6, 5, 4], [7, 6, 5, -1]])
        mapped = map_lookback(lookback, torch.arange(10) * 10, PAD)
        assert mapped.tolist() == [[70, 60, 50, 40], [70, 20, 20, 20], [20, 20, 20, 20], [70, 60, 50, 20]]

    def test_no_tokens_have_no_rows(self, tiny: ModelConfig) -> None:
        assert row_ids(tiny, 1, torch.empty(0, 4, dtype=torch.int64)) == []


def byte_level_tokenizer(texts: list[str], special: list[str]) -> Tokenizer:
    """A tokenizer whose ids are the given texts in order, then special tokens, then single bytes."""
    spell = ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = ["".join(piece for piece, _ in spell.pre_tokenize_str(text)) for text in texts]
    tokens = list(dict.fromkeys(symbols + special + sorted(ByteLevel.alphabet())))
    tokenizer = Tokenizer(BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = spell
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


class TestTokenMap:
    def test_tokens_that_read_alike_share_an_id(self) -> None:
        texts = ["cat", " cat", "CAT", "bat", "ﬁ", "FI", "bat\n"]
        token_map = build_token_map(byte_level_tokenizer(texts, []), len(texts))
        assert token_map.dtype == np.int32
        assert token_map.tolist() == [0, 0, 0, 1, 2, 2, 1]

    def test_accents_are_stripped(self) -> None:
        assert build_token_map(byte_level_tokenizer(["Café", "cafe"], []), 2).tolist() == [0, 0]

    def test_white_space_of_any_kind_is_one_space_and_not_nothing(self) -> None:
        texts = [" ", "   ", "\n", "\t\r\n ", "\u00a0", "a", " a "]
        assert build_token_map(byte_level_tokenizer(texts, []), len(texts)).tolist() == [0, 0, 0, 0, 0, 1, 1]

    def test_text_that_normalises_to_nothing_stays_as_it_is(self) -> None:
        # Combining accents, and white space that is stripped but is none of the four that become a space.
        texts = ["\u0301", "\u0300", "\v", "\f"]
        assert build_token_map(byte_level_tokenizer(texts, []), len(texts)).tolist() == [0, 1, 2, 3]

    def test_parts_of_characters_are_told_apart_by_their_token(self) -> None:
        tokenizer = byte_level_tokenizer([], [])
        token_map = build_token_map(tokenizer, 256)
        incomplete = [
            id_ for id_ in range(256) if "\ufffd" in tokenizer.decode([id_], skip_special_tokens=False)
        ]
        assert len(incomplete) == 128
        assert len({int(token_map[id_]) for id_ in incomplete}) == 128

    def test_special_tokens_are_kept_as_text(self) -> None:
        tokenizer = byte_level_tokenizer(["x"], ["<｜User｜>", "<｜Assistant｜>", "<|user|>"])
        # NFKC turns the full-width bar into the plain one.
        assert build_token_map(tokenizer, 4).tolist() == [0, 1, 2, 1]

    def test_sidecar_of_the_tiny_checkpoint_halves_the_ids(
        self, tiny_checkpoint: Path, tiny: ModelConfig
    ) -> None:
        token_map = load_token_map(tiny_checkpoint, tiny)
        assert token_map.dtype == torch.int64
        assert token_map.tolist() == [id_ // 2 for id_ in range(512)]

    def test_map_comes_from_the_tokenizer_without_a_sidecar(self, tmp_path: Path, tiny: ModelConfig) -> None:
        # 256 bytes: 26 letters read as another one, space, tab, CR and LF as one.
        tokenizer = byte_level_tokenizer([], [])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        distinct = len(set(build_token_map(tokenizer, 256).tolist()))
        assert distinct == 256 - 26 - 3
        config = tiny.model_copy(update={"vocab_size": 256, "engram_compressed_vocab_size": distinct})
        assert load_token_map(tmp_path, config).shape == (256,)

    def test_map_of_another_size_is_refused(
        self, tiny_checkpoint: Path, tmp_path: Path, tiny: ModelConfig
    ) -> None:
        shutil.copy(tiny_checkpoint / "tokenizer.json", tmp_path)
        with pytest.raises(
            CheckpointError, match=r"tokenizer\.json: maps to \d+ compressed ids .* 0 \.\. 255"
        ):
            load_token_map(tmp_path, tiny)

    @pytest.mark.parametrize(
        ("token_map", "problem"),
        [
            (np.arange(512, dtype=np.int64) // 2, "has dtype int64, expected int32"),
            (np.arange(511, dtype=np.int32) // 2, "maps [511] tokens, expected [512]"),
            (np.arange(512, dtype=np.int32) // 3, "maps to 171 compressed ids in [0, 170]"),
            (np.arange(512, dtype=np.int32) // 2 - 1, "maps to 256 compressed ids in [-1, 254]"),
        ],
    )
    def test_sidecar_that_does_not_fit_the_config_is_refused(
        self, tmp_path: Path, tiny: ModelConfig, token_map: np.ndarray, problem: str
    ) -> None:
        np.save(tmp_path / TOKEN_MAP_FILE, token_map)
        with pytest.raises(CheckpointError, match=rf"{TOKEN_MAP_FILE}: {re.escape(problem)}"):
            load_token_map(tmp_path, tiny)

    def test_broken_sidecar_and_missing_tokenizer_are_refused(
        self, tmp_path: Path, tiny: ModelConfig
    ) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
            load_token_map(tmp_path, tiny)
        (tmp_path / TOKEN_MAP_FILE).write_bytes(b"\x93NUMPY")
        with pytest.raises(CheckpointError, match=rf"{TOKEN_MAP_FILE}: cannot be read"):
            load_token_map(tmp_path, tiny)

    def test_tokenizer_with_too_few_tokens_is_refused(self, tmp_path: Path, tiny: ModelConfig) -> None:
        byte_level_tokenizer([], []).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: the tokenizer has no token 256"):
            load_token_map(tmp_path, tiny)
