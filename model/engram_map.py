"""Engram's constants: the compressed token map, and the hash constants of every layer.

Source: `spec/model.md` sections 7.1 and 7.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from model.config import ModelConfig
from model.engram_tables import engram_table_sizes
from model.shard_file import CheckpointError

TOKEN_MAP_FILE = "engram_token_map.npy"
"""Optional sidecar of a checkpoint; without it the map is computed from `tokenizer.json`."""

_ONE_SPACE = "\ue000"
"""Private-use character that stands for a lone space while the ends are stripped."""
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _ONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_ONE_SPACE, " "),
    ]
)


@dataclass(frozen=True, slots=True)
class EngramLayerHash:
    """Hash constants of one layer; the arguments of `engram_row_ids`."""

    multipliers: Tensor
    """`[ngram]` int64, one per look-back."""
    moduli: Tensor
    """`[ngram - 1, heads]` int64, primes."""
    offsets: Tensor
    """`[ngram - 1, heads]` int64: first table row of each column."""


@dataclass(frozen=True, slots=True)
class EngramHash:
    """Hash constants of all Engram layers. A look-up column is one (n-gram length, head), n-major."""

    layers: dict[int, EngramLayerHash]

    @classmethod
    def from_config(cls, config: ModelConfig) -> EngramHash:
        """Derive the constants, the same for every checkpoint of these dimensions."""
        layers = {}
        for layer, moduli in engram_moduli(config).items():
            ends = moduli.flatten().cumsum(0).view_as(moduli)
            multipliers = engram_multipliers(
                layer, config.engram_compressed_vocab_size, config.engram_max_ngram_size
            )
            layers[layer] = EngramLayerHash(multipliers, moduli, ends - moduli)
        return cls(layers)

    @property
    def num_columns(self) -> int:
        """Look-up columns of a layer, the same in all layers."""
        return next((constants.moduli.numel() for constants in self.layers.values()), 0)

    def table_rows(self, layer: int, columns: slice | None = None) -> slice:
        """Rows of the layer's table that the given columns read; of all columns by default."""
        constants = self.layers[layer]
        ends = [0, *constants.moduli.flatten().cumsum(0).tolist()]
        start, stop, _ = (columns or slice(None)).indices(self.num_columns)
        return slice(ends[start], ends[stop])


def engram_multipliers(layer: int, compressed_vocab: int, max_ngram: int = 4) -> Tensor:
    """Odd factors of a layer's hash, `[max_ngram]` int64, one per look-back.

    Bounded so that a product with a compressed id stays below `2 ** 63`.
    """
    bound = (2**63 - 1) // compressed_vocab // 2
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return torch.from_numpy(2 * draws + 1)


def engram_moduli(config: ModelConfig) -> dict[int, Tensor]:
    """Hash table sizes per Engram layer: `[ngram - 1, heads]` int64, see `engram_table_sizes`."""
    shape = (config.engram_max_ngram_size - 1, config.engram_n_heads)
    return {layer: torch.tensor(sizes).view(shape) for layer, sizes in engram_table_sizes(config).items()}


def load_token_map(directory: Path, config: ModelConfig) -> Tensor:
    """Compressed id of every token, from the sidecar or else from the tokenizer.

    Args:
        directory: of the checkpoint.
        config: its text model.
    Returns: `[vocab_size]` int64.
    Raises: CheckpointError if the map has another size than the configuration says: then look-ups would read
        wrong rows without any other sign.
    """
    sidecar = directory / TOKEN_MAP_FILE
    if sidecar.exists():
        source, token_map = sidecar, _read_sidecar(sidecar)
    else:
        source = directory / "tokenizer.json"
        token_map = _compute_token_map(source, config.vocab_size)
    if token_map.shape != (config.vocab_size,):
        raise CheckpointError(source, f"maps {list(token_map.shape)} tokens, expected [{config.vocab_size}]")
    compressed = np.unique(token_map)
    if not np.array_equal(compressed, np.arange(config.engram_compressed_vocab_size)):
        raise CheckpointError(
            source,
            f"maps to {len(compressed)} compressed ids in [{compressed[0]}, {compressed[-1]}], "
            f"expected all of 0 .. {config.engram_compressed_vocab_size - 1}",
        )
    return torch.from_numpy(token_map.astype(np.int64))


def build_token_map(tokenizer: Tokenizer, vocab_size: int) -> npt.NDArray[np.int32]:
    """Give tokens that read alike (case, accents, outer space) one compressed id, in order of appearance.

    Args:
        tokenizer: the checkpoint's.
        vocab_size: number of tokens to map.
    Returns: `[vocab_size]` int32.
    Raises: ValueError if the tokenizer has no token for one of the ids.
    """
    ids: dict[str, int] = {}
    return np.array(
        [ids.setdefault(_token_key(tokenizer, token_id), len(ids)) for token_id in range(vocab_size)],
        np.int32,
    )


def _token_key(tokenizer: Tokenizer, token_id: int) -> str:
    token = tokenizer.id_to_token(token_id)
    if token is None:
        raise ValueError(f"the tokenizer has no token {token_id}")
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\ufffd" in text:  # part of a character: its bytes have no text of their own
        return str(token)
    return _NORMALIZER.normalize_str(text) or text


def _read_sidecar(path: Path) -> npt.NDArray[np.int32]:
    try:
        token_map: npt.NDArray[np.int32] = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(path, f"cannot be read ({error})") from error
    if token_map.dtype != np.int32:
        raise CheckpointError(path, f"has dtype {token_map.dtype}, expected int32")
    return token_map


def _compute_token_map(path: Path, vocab_size: int) -> npt.NDArray[np.int32]:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(path, f"cannot be read ({error})") from error
    try:
        return build_token_map(tokenizer, vocab_size)
    except ValueError as error:
        raise CheckpointError(path, str(error)) from error
