"""RandomWeights: a checkpoint of the released shapes that no disk holds, for benchmarks of one rank."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from torch import Tensor

from model.checkpoint import TORCH_DTYPES
from model.config import CheckpointConfig
from model.inventory import StoredDtype, expected_tensors
from model.tiny_weights import rule_of

_CODE_STD = 64.0
"""Of the e4m3 codes: far from their limit of 448, and few of them subnormal."""
_BLOCK = 1 << 22


class RandomWeights:
    """Reads random tensors with the shapes, dtypes and standard deviations of the release: a TensorReader.

    What is read repeats a block of random numbers: the memory differs from tensor to tensor, as caches see it.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._tensors = expected_tensors(config)
        z = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))
        self._normal = z.to(torch.bfloat16)
        self._codes = (z * _CODE_STD).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See TensorReader."""
        spec = self._tensors[name]
        shape = [
            len(range(size)[part or slice(None)])
            for size, part in zip(spec.shape, (rows, columns), strict=False)
        ]
        dtype = TORCH_DTYPES[spec.dtype]
        if spec.dtype is StoredDtype.F8_E8M0:
            return torch.full(shape, self._scale(name), dtype=dtype)
        if spec.dtype is StoredDtype.F8_E4M3:
            return self._repeated(self._codes, name, shape).view(dtype)
        rule, fan_in = rule_of(name), spec.shape[-1]
        mean = float(rule(np.zeros(1), fan_in)[0])
        std = float(rule(np.ones(1), fan_in)[0]) - mean
        return (self._repeated(self._normal, name, shape) * std + mean).to(dtype)

    def _scale(self, name: str) -> int:
        """The ue8m0 byte of all scales of a matrix."""
        matrix = f"{name.removesuffix('.scale')}.weight"
        std = float(rule_of(matrix)(np.ones(1), self._tensors[matrix].shape[-1])[0])
        return 127 + round(math.log2(std / _CODE_STD))

    @staticmethod
    def _repeated(block: Tensor, name: str, shape: list[int]) -> Tensor:
        out = torch.empty(math.prod(shape), dtype=block.dtype)
        start = zlib.crc32(name.encode()) % len(block)
        for begin in range(-start, len(out), len(block)):
            part = slice(max(0, begin), min(len(out), begin + len(block)))
            out[part] = block[part.start - begin : part.stop - begin]
        return out.view(shape)
