"""Write a tiny checkpoint in exactly the released layout: for tests, and to start without the release.

    python -m model.tiny --out DIR [--seed N] [--variant A|A_smooth|B|long|wide|wide_smooth]
    python -m model.tiny --cache [--seed N] [--variant ...]

Source: `spec/model.md` section 13 and appendix B.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from model.config import CheckpointConfig
from model.engram_map import TOKEN_MAP_FILE
from model.inventory import StoredDtype, TensorSpec, expected_tensors
from model.tiny_tokenizer import write_tokenizer
from model.tiny_weights import make_tensors

Variant = Literal["A", "A_smooth", "B", "long", "wide", "wide_smooth"]

EMBEDDED_VARIANT: Variant = "long"
"""The one that is served when no checkpoint is configured."""

FORMAT_VERSION = 1
"""Part of the cache folder's name; raise it when the same variant and seed would give other files."""
_NUM_DENSE_SHARDS = 2
"""Shards besides the Engram tables, which have one each at the end, as in the release."""

_TEXT_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 32,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 16,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 8,
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "kv_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "engram_layer_ids": [1, 4],
    "engram_num_embeddings": [660, 864],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 100,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 256,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 511,
    "dspark_target_layer_ids": [9, 10, 11],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "initializer_range": 0.02,
    "use_cache": True,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
}
"""`text_config` of variant A."""

# No discrete choice is left in short prompts: every entry, block and expert is selected.
_SMOOTH: dict[str, Any] = {
    "index_topk": 70,
    "candidate_topk_blocks": 64,
    "num_experts_per_tok": 8,
    "dspark_num_experts_per_tok": 4,
}
# Everything that is cut over ranks can be cut into eight parts of whole heads, groups, experts, tiles and Engram
# look-up columns.
_WIDE: dict[str, Any] = {
    "num_attention_heads": 8,
    "o_groups": 8,
    "index_n_heads": 8,
    "moe_intermediate_size": 256,
    "engram_n_heads": 8,
    "engram_num_embeddings": [3828, 7078],
    "dspark_n_routed_experts": 8,
}
_VARIANT_CHANGES: dict[Variant, dict[str, Any]] = {
    "A": {},
    "A_smooth": _SMOOTH,
    # A second ratio-1 KV source.
    "B": {"kv_source_layer_ids": [2, 4, 6, 9], "index_source_layer_ids": [2, 4, 6, 8, 9, 10]},
    # Room for chats, where a byte is a token. No weight depends on it.
    "long": {"max_position_embeddings": 2048},
    "wide": _WIDE,
    "wide_smooth": _WIDE | _SMOOTH | {"dspark_num_experts_per_tok": 8},
}


def tiny_config(variant: Variant = "A") -> dict[str, Any]:
    """The variant's `config.json`, with the release's keys."""
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 510,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": _TEXT_CONFIG | _VARIANT_CHANGES[variant],
        "vision_config": None,
    }


def write_tiny_checkpoint(directory: Path, variant: Variant = "A", seed: int = 0) -> None:
    """Write a whole checkpoint.

    Args:
        directory: created if absent; must be empty.
        variant: which configuration.
        seed: 0 gives the weights of the specification, any other number equally distributed ones.
    Raises: FileExistsError if `directory` has files in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty: choose another folder or remove its files")
    raw_config = tiny_config(variant)
    config = CheckpointConfig.model_validate(raw_config)
    text = config.text_config
    (directory / "config.json").write_text(json.dumps(raw_config, indent=1), encoding="utf-8")
    write_tokenizer(directory, text.vocab_size, text.max_position_embeddings)
    # Stands in for the release's map, which follows from its tokenizer: two neighbouring ids share an entry.
    np.save(directory / TOKEN_MAP_FILE, np.arange(text.vocab_size, dtype=np.int32) // 2)
    _write_shards(directory, expected_tensors(config), variant, seed)


def cached_tiny_checkpoint(variant: Variant = EMBEDDED_VARIANT, seed: int = 0) -> Path:
    """Folder of the variant in the user's cache directory, written first if it is not there.

    Safe against a concurrent or killed writer: the folder appears complete, by one rename.
    """
    directory = _cache_directory() / _cache_name(variant, seed)
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
        complete = Path(temporary) / directory.name
        write_tiny_checkpoint(complete, variant, seed)
        try:
            complete.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was faster, with the same files
                raise
    return directory


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotset"


def _cache_name(variant: Variant, seed: int) -> str:
    content = json.dumps([FORMAT_VERSION, tiny_config(variant), seed])
    return f"tiny-{variant}-seed{seed}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _write_shards(directory: Path, tensors: dict[str, TensorSpec], variant: Variant, seed: int) -> None:
    """Write the safetensors files and their index."""
    shards = _assign_shards(tensors)
    weight_map: dict[str, str] = {}
    with tqdm(total=len(tensors), desc=f"tiny checkpoint {variant}", unit="tensor", disable=None) as progress:
        for number, names in enumerate(shards, start=1):
            file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            contents: dict[str, Tensor] = {}
            for name in names:
                made = make_tensors(name, tensors, seed)
                contents.update(made)
                progress.update(len(made))
            # One metadata key, since the library writes several in a random order.
            (directory / file_name).write_bytes(save(contents, metadata={"format": "pt"}))
            weight_map.update(dict.fromkeys(contents, file_name))
    total_size = sum(spec.num_bytes for spec in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _assign_shards(tensors: dict[str, TensorSpec]) -> list[list[str]]:
    """Names without the scales, shard by shard; a scale goes where its weight is."""
    names = [name for name, spec in tensors.items() if spec.dtype is not StoredDtype.F8_E8M0]
    tables = [[name] for name in names if name.endswith("engram.embed.weight")]
    dense = [name for name in names if [name] not in tables]
    size = -(-len(dense) // _NUM_DENSE_SHARDS)
    return [dense[start : start + size] for start in range(0, len(dense), size)] + tables


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; the last line on standard output is the checkpoint's folder."""
    parser = argparse.ArgumentParser(prog="python -m model.tiny", description="Write a tiny checkpoint.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="folder to write; must be empty or absent")
    where.add_argument("--cache", action="store_true", help="keep it in the user's cache, write it once")
    parser.add_argument("--seed", type=int, default=0, help="0 (default): the weights of the specification")
    parser.add_argument("--variant", choices=get_args(Variant), help="default: A, long in the cache")
    arguments = parser.parse_args(argv)
    if arguments.cache:
        directory = cached_tiny_checkpoint(arguments.variant or EMBEDDED_VARIANT, arguments.seed)
    else:
        directory = arguments.out
        write_tiny_checkpoint(directory, arguments.variant or "A", arguments.seed)
    print(directory)


if __name__ == "__main__":
    main()
