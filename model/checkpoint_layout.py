"""Verify a checkpoint's layout from its configuration, index and headers alone; no weight is read.

Source: `spec/model.md` section 2.1.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from pydantic import ValidationError

from model.config import CheckpointConfig, ConfigError
from model.engram_map import EngramHash
from model.inventory import TensorSpec, expected_tensors
from model.shard_file import CheckpointError, ShardFile, StoredTensor

CONFIG_FILE: Final = "config.json"
INDEX_FILE: Final = "model.safetensors.index.json"

_ALIASES = {
    "self_attn": "attn",
    "mlp": "ffn",
    "weight_scale_inv": "scale",
    "e_score_correction_bias": "bias",
    "e_score_correction_bias_vl": "bias_vl",
}
"""Parts of names that the official converter accepts, and what they are called here."""
_IGNORED = re.compile(r"mtp\.\d+\.(embed|head)\.weight")
"""Copies of the backbone's embedding and head in a draft stage, which uses the backbone's."""
_SAMPLE_BYTES = 4096
"""How much of each shard's data goes into the content hash."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The file that holds a tensor, and where."""

    path: Path
    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """A checkpoint that is complete and of the right shapes.

    Invariant: `sources` has exactly the names of `expected_tensors(config)`, in that order, with their specs.
    """

    config: CheckpointConfig
    sources: Mapping[str, TensorSource]
    content_hash: str
    """SHA-256 over configuration, index, headers and the first data of every shard: it tells checkpoints of
    another layout or another training apart without reading them."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def verify_layout(directory: Path) -> CheckpointLayout:
    """Check everything that can be checked without reading weights.

    Args:
        directory: with `config.json`, the index and the shards it names.
    Raises: CheckpointError naming the file and the tensor.
    """
    config = _load_config(directory / CONFIG_FILE)
    expected = _load_inventory(directory / CONFIG_FILE, config)
    index_path = directory / INDEX_FILE
    weight_map = _load_index(index_path)
    shards = _open_shards(index_path, weight_map)
    _check_index(index_path, weight_map, shards)
    sources = _resolve_names(shards)
    _check_names(index_path, sources, expected)
    for name, spec in expected.items():
        _check_spec(name, sources[name], spec)
    return CheckpointLayout(
        config=config,
        sources={name: sources[name] for name in expected},
        content_hash=_hash_content((directory / CONFIG_FILE, index_path), shards.values()),
    )


def canonical_name(name: str) -> str:
    """The name that the inventory uses for a tensor, from any spelling the official converter accepts."""
    parts = name.removeprefix("model.").split(".")
    is_vision = parts[0] == "vision"
    return ".".join(part if is_vision and part == "mlp" else _ALIASES.get(part, part) for part in parts)


def _load_config(path: Path) -> CheckpointConfig:
    try:
        return CheckpointConfig.load(path)
    except ConfigError as error:
        raise CheckpointError(path, str(error).removeprefix(f"{path}: ")) from error


def _load_inventory(path: Path, config: CheckpointConfig) -> dict[str, TensorSpec]:
    text = config.text_config
    hashes = EngramHash.from_config(text)
    for layer, num_rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True):
        sum_of_moduli = hashes.table_rows(layer).stop
        if num_rows != sum_of_moduli:
            raise CheckpointError(
                path,
                f"engram_num_embeddings gives it {num_rows} rows, its hash moduli add up to {sum_of_moduli}",
                f"{text.layer_names[layer]}.engram.embed.weight",
            )
    try:
        return expected_tensors(config)
    except ValidationError as error:
        raise CheckpointError(path, f"vision_config does not fit: {error}") from error


def _load_index(path: Path) -> dict[str, str]:
    """Stored name to file name."""
    try:
        weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror})") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(path, f"is no safetensors index ({error})") from error
    some_tensor_of = {file_name: tensor for tensor, file_name in weight_map.items()}
    for file_name, tensor in some_tensor_of.items():
        if Path(file_name).name != file_name:
            raise CheckpointError(path, f"lies in {file_name!r}, which is no file of this folder", tensor)
    return weight_map


def _open_shards(index_path: Path, weight_map: Mapping[str, str]) -> dict[str, ShardFile]:
    """Read the headers of all files that the index names, and refuse safetensors files that it does not."""
    directory, named = index_path.parent, sorted(set(weight_map.values()))
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in named:
            raise CheckpointError(path, f"is not named in {INDEX_FILE}: remove it or complete the index")
    return {file_name: ShardFile(directory / file_name) for file_name in named}


def _check_index(index_path: Path, weight_map: Mapping[str, str], shards: Mapping[str, ShardFile]) -> None:
    for name, file_name in weight_map.items():
        if name not in shards[file_name].tensors:
            raise CheckpointError(
                shards[file_name].path, f"is named in {INDEX_FILE} but not in this file", name
            )
    for file_name, shard in shards.items():
        for name in shard.tensors:
            if weight_map.get(name) != file_name:
                where = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise CheckpointError(shard.path, f"is in this file, but {INDEX_FILE} has it {where}", name)


def _resolve_names(shards: Mapping[str, ShardFile]) -> dict[str, TensorSource]:
    """Canonical name to source; names that are ignored are left out."""
    sources: dict[str, TensorSource] = {}
    for shard in shards.values():
        for stored_name, stored in shard.tensors.items():
            name = canonical_name(stored_name)
            if name in sources:
                raise CheckpointError(
                    shard.path, f"is {name}, which {sources[name].path} has too", stored_name
                )
            if not _IGNORED.fullmatch(name):
                sources[name] = TensorSource(shard.path, stored)
    return sources


def _check_names(
    index_path: Path, sources: Mapping[str, TensorSource], expected: Mapping[str, TensorSpec]
) -> None:
    missing = [name for name in expected if name not in sources]
    if missing:
        raise CheckpointError(index_path, f"is missing{_and_others(missing)}", missing[0])
    extra = [name for name in sources if name not in expected]
    if extra:
        path = sources[extra[0]].path
        raise CheckpointError(path, f"is not part of this model{_and_others(extra)}", extra[0])


def _and_others(names: list[str]) -> str:
    return f", like {len(names) - 1} more" if len(names) > 1 else ""


def _check_spec(name: str, source: TensorSource, expected: TensorSpec) -> None:
    found = source.stored.spec
    if found.dtype is not expected.dtype:
        raise CheckpointError(source.path, f"has dtype {found.dtype}, expected {expected.dtype}", name)
    if found.shape != expected.shape:
        raise CheckpointError(
            source.path, f"has shape {list(found.shape)}, expected {list(expected.shape)}", name
        )


def _hash_content(documents: Iterable[Path], shards: Iterable[ShardFile]) -> str:
    parts = [path.read_bytes() for path in documents]
    for shard in shards:
        parts += shard.header, shard.read_first_data(_SAMPLE_BYTES)
    content = hashlib.sha256()
    for part in parts:
        # With its length, so that no byte can move from one part to the next unseen.
        content.update(len(part).to_bytes(8, "little"))
        content.update(part)
    return content.hexdigest()
