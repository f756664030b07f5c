"""Up to how many rows cold pages are better read in place: measured at start, on the pages themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Final

import torch
from torch import Tensor

from actors.expert_tiers import TieredExpertSource
from kernels.experts import expert_mlp
from model.config import ModelConfig
from model.expert_source import PageGroup
from model.parallel import ParallelLayout

logger = logging.getLogger(__name__)

CANDIDATES: Final = (8, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows of a step that are tried; a step of more than the last one is staged."""
_REPEATS: Final = 3
_SEED: Final = 0


def largest_in_place(
    candidates: tuple[int, ...], in_place: Callable[[int], float], staged: Callable[[int], float]
) -> int:
    """The last of the leading candidates for which reading in place takes no longer.

    Args:
        candidates: numbers of rows, ascending.
        in_place: seconds that a layer takes with so many rows.
        staged: likewise.
    Returns: one of `candidates`, or 0.
    """
    limit = 0
    for num_rows in candidates:
        times = in_place(num_rows), staged(num_rows)
        logger.info(
            "cold pages, %d rows: %.3f ms in place, %.3f ms staged", num_rows, *(1e3 * t for t in times)
        )
        if times[0] > times[1]:
            break
        limit = num_rows
    return limit


def measure_rows_in_place(
    experts: TieredExpertSource, config: ModelConfig, parallel: ParallelLayout, device: torch.device
) -> int:
    """Time the routed product of the layer with the most cold pages, its rows spread over all experts.

    Args:
        experts: of the rank, which does nothing else meanwhile.
        config: of the model.
        parallel: the rank.
        device: a GPU.
    Returns: the largest number of rows for which a layer takes no longer in place; 0 if no layer can be read so.
    """
    layer = experts.coldest_layer_in_place()
    if layer is None:
        return 0
    trial = _Trial(experts, config, parallel, layer, device)
    limit = largest_in_place(CANDIDATES, trial.in_place_s, trial.staged_s)
    logger.info("steps of up to %d rows read cold pages in place, others stage them", limit)
    return limit


@dataclass(frozen=True, slots=True)
class _Trial:
    """One layer's routed product, on random rows."""

    experts: TieredExpertSource
    config: ModelConfig
    parallel: ParallelLayout
    layer: int
    device: torch.device

    def in_place_s(self, num_rows: int) -> float:
        """Seconds."""

        def run(x: Tensor, topk_idx: Tensor) -> None:
            self.experts.max_rows_in_place = num_rows
            group = self.experts.in_place(self.layer, num_rows)
            assert group is not None, f"{self.layer=}"
            self._multiply(x, topk_idx, group)

        return self._time(num_rows, run)

    def staged_s(self, num_rows: int) -> float:
        """Seconds."""

        def run(x: Tensor, topk_idx: Tensor) -> None:
            local = self._local()
            chosen = [e - local.start for e in torch.unique(topk_idx).tolist() if e in local]
            for group in self.experts.stream(self.layer, chosen):
                self._multiply(x, topk_idx, group)

        return self._time(num_rows, run)

    def _local(self) -> range:
        return self.parallel.local_experts(self.config.num_experts_of(self.layer))

    def _multiply(self, x: Tensor, topk_idx: Tensor, group: PageGroup) -> None:
        out = torch.empty(*topk_idx.shape, x.shape[1], dtype=x.dtype, device=self.device)
        expert_mlp(
            x,
            topk_idx,
            torch.ones(topk_idx.shape, device=self.device),
            group.addresses,
            group.is_member,
            self._local().start,
            self.experts.layout,
            out,
            num_experts=self.config.num_experts_of(self.layer),
            limit=self.config.swiglu_limit,
        )

    def _time(self, num_rows: int, run: Callable[[Tensor, Tensor], None]) -> float:
        generator = torch.Generator(self.device).manual_seed(_SEED)
        x = torch.randn(num_rows, self.config.hidden_size, generator=generator, device=self.device)
        shape = (num_rows, self.config.num_experts_of(self.layer))
        order = torch.rand(shape, generator=generator, device=self.device).argsort(dim=1)
        topk_idx = order[:, : self.config.num_topk_of(self.layer)].contiguous()
        times = []
        for _ in range(_REPEATS + 1):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            run(x.to(torch.bfloat16), topk_idx)
            torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return median(times[1:])  # the first one compiles
