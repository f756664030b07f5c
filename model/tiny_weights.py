"""Weights of the tiny checkpoint: a formula per tensor, so that every implementation can make the same ones.

Source: `spec/model.md` appendix B. Products are formed in FP64 and rounded once to FP32 before any further
rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference.quantize import encode_fp8_rows, encode_fp8_tiles, encode_mxfp4
from model.inventory import StoredDtype, TensorSpec

FloatArray = npt.NDArray[np.float64]
Rule = Callable[[FloatArray, int], FloatArray]
"""Values from unit-variance `z` `[n]` and the number of inputs (logical columns) of the matrix."""

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_WORD = (1 << 64) - 1


def make_tensors(name: str, tensors: dict[str, TensorSpec], seed: int) -> dict[str, Tensor]:
    """One tensor of the checkpoint, with its scale where it has one.

    Args:
        name: canonical name of anything but a scale.
        tensors: the inventory, `name` and its scale included.
        seed: 0 gives the values of the specification.
    Returns: name to tensor with the stored shape; packed codes as int8, scales as float8_e8m0fnu.
    """
    spec = tensors[name]
    per_element = 2 if spec.dtype is StoredDtype.I8 else 1
    columns = spec.shape[-1] * per_element
    z = unit_values(name, math.prod(spec.shape) * per_element, seed)
    values = torch.from_numpy(rule_of(name)(z, columns).astype(np.float32))
    values = values.reshape(*spec.shape[:-1], columns)
    if spec.dtype is StoredDtype.F32:
        return {name: values}
    if spec.dtype is StoredDtype.BF16:
        return {name: values.to(torch.bfloat16)}
    scale_name = name.removesuffix(".weight") + ".scale"
    if spec.dtype is StoredDtype.I8:
        codes, scales = encode_mxfp4(values)
        codes = codes.view(torch.int8)
    elif tensors[scale_name].shape[0] == spec.shape[0]:
        codes, scales = encode_fp8_rows(values)
    else:
        codes, scales = encode_fp8_tiles(values)
    return {name: codes, scale_name: scales.view(torch.float8_e8m0fnu)}


def unit_values(name: str, count: int, seed: int = 0) -> FloatArray:
    """Uniform values of variance 1 that depend on the name alone: SplitMix64 started at the name's hash.

    Args:
        name: the tensor's name.
        count: how many values, in row-major order.
        seed: 0 hashes the bare name; any other seed hashes `name#seed`.
    Returns: `[count]` float64 in `[-sqrt(3), sqrt(3))`.
    """
    start = np.uint64(_fnv1a(name if seed == 0 else f"{name}#{seed}"))
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    u = (x >> np.uint64(11)).astype(np.float64) / 2.0**53
    return math.sqrt(3.0) * (2.0 * u - 1.0)


def _fnv1a(text: str) -> int:
    """FNV-1a, 64 bits, of the UTF-8 bytes."""
    value = _FNV_OFFSET
    for byte in text.encode("utf-8"):
        value = ((value ^ byte) * _FNV_PRIME) & _WORD
    return value


def rule_of(name: str) -> Rule:
    """How the values of a tensor are distributed."""
    return _RULES[_role(name)]


def _role(name: str) -> str:
    """The name without its numbers: `layers.3.ffn.experts.5.w1.weight` is a `ffn.experts.w1.weight`."""
    return re.sub(r"^(layers|mtp)\.\d+\.|(?<=experts\.)\d+\.", "", name)


def _std(std: float) -> Rule:
    return lambda z, _: std * z


def _gain(gain: float = 1.0) -> Rule:
    return lambda z, fan_in: z * (gain * fan_in**-0.5)


def _around(mean: float) -> Rule:
    return lambda z, _: mean * (1.0 + 0.1 * z)


# Gains and means follow statistics of the released weights: with unit norms the MoE output swamps the stream
# and rounding errors explode (section 13).
_RULES: dict[str, Rule] = {
    "embed.weight": _std(0.12),
    "head.weight": _gain(),
    "norm.weight": _around(1.0),
    "attn_norm.weight": _around(0.025),
    "ffn_norm.weight": _around(0.2),
    "attn.wq_a.weight": _gain(1.6),
    "attn.wq_b.weight": _gain(0.95),
    "attn.wkv.weight": _gain(1.8),
    "attn.wo_a.weight": _gain(1.6),
    "attn.wo_b.weight": _gain(1.9),
    "attn.q_norm.weight": _around(0.97),
    "attn.kv_norm.weight": _around(0.4),
    "attn.attn_sink": _std(0.5),
    "attn.indexer.wq_b.weight": _gain(0.95),
    "attn.indexer.weights_proj.weight": _gain(),
    "attn.indexer.wk.weight": _gain(),
    "attn.indexer.k_norm.weight": _around(0.5),
    "attn.compressor.wkv.weight": _gain(1.8),
    "attn.compressor.wgate.weight": _gain(3.0),
    "attn.compressor.norm.weight": _around(0.6),
    "hc_attn_fn": _gain(),
    "hc_attn_base": _std(0.5),
    "hc_attn_scale": _std(0.5),
    "hc_ffn_fn": _gain(),
    "hc_ffn_base": _std(0.5),
    "hc_ffn_scale": _std(0.5),
    "ffn.gate.weight": _gain(2.9),
    "ffn.gate.bias": _std(0.05),
    "ffn.gate.bias_vl": _std(0.05),
    "ffn.experts.w1.weight": _gain(1.5),
    "ffn.experts.w3.weight": _gain(1.5),
    "ffn.experts.w2.weight": _gain(1.05),
    "ffn.shared_experts.w1.weight": _gain(1.5),
    "ffn.shared_experts.w3.weight": _gain(1.5),
    "ffn.shared_experts.w2.weight": _gain(1.05),
    "engram.embed.weight": _std(1.0),
    "engram.q_weight": _around(1.0),
    "engram.k_weight": _around(1.0),
    "engram.wkv.weight": _gain(),
    "main_norm.weight": _around(1.0),
    "main_proj.weight": _gain(),
    "markov_head.embed.weight": _std(1.0),
    "markov_head.head.weight": _gain(3.0),
    "confidence_head.proj.weight": _std(0.05),
}
