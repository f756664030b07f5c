"""Numerics: the rounding choices of a forward pass that are not the model's own.

Source: `spec/model.md` sections 4.5, 6, 13.1 and appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Numerics:
    """Accumulation type and the two places where implementations differ on purpose."""

    accumulate: torch.dtype = torch.float32
    """Type of everything between the roundings to BF16, FP8 and FP4 that the model defines."""
    quantize_expert_activations: bool = False
    """Round what enters and leaves each routed expert's products as the reference implementation does (Q8 in, BF16
    out); otherwise they stay BF16 in and `accumulate` out."""
    round_index_scores: bool = False
    """Round index scores to BF16 three times as the reference implementation does."""

    @classmethod
    def serving(
        cls, precision: Literal["fp32", "fp64"], expert_activations: Literal["bf16", "fp8"]
    ) -> Numerics:
        """The numerics of `ShardConfig.precision` and `ShardConfig.expert_activations`.

        FP64 is the mode of the golden numbers, which round index scores; serving compares them unrounded.
        """
        is_golden = precision == "fp64"
        return cls(
            accumulate=torch.float64 if is_golden else torch.float32,
            quantize_expert_activations=expert_activations == "fp8",
            round_index_scores=is_golden,
        )
