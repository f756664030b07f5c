"""Collectives: sums and gathers over the ranks of a ParallelLayout.

Every reduction adds the ranks' parts in rank order, so that a row's result does not depend on the other rows of the
batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from model.parallel import ParallelLayout


class Collectives:
    """Sums and gathers over the ranks of `layout`; the identity when there is one rank.

    Args:
        layout: rank and sizes.
        group: the process group (gloo on CPU, NCCL on CUDA); None with one rank.
    """

    def __init__(self, layout: ParallelLayout, group: dist.ProcessGroup | None = None) -> None:
        if layout.world_size > 1 and group is None:
            raise ValueError(f"world_size {layout.world_size} needs a process group")
        self._layout = layout
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of `x` over all ranks, added in rank order; same shape and dtype as `x`."""
        if self._layout.world_size == 1:
            return x
        parts = self._all_gather(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_gather_last(self, x: Tensor) -> Tensor:
        """Concatenation over ranks along the last axis: `[..., n]` to `[..., n * world_size]`."""
        if self._layout.world_size == 1:
            return x
        return torch.cat(self._all_gather(x), dim=-1)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._layout.world_size)]
        dist.all_gather(parts, x, group=self._group)
        return parts
