"""Expert choice. Source: `spec/model.md` section 6."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.activation import softplus
from kernels.reference.linear import linear


def route(
    x: Tensor, gate: Tensor, bias: Tensor, num_topk: int, scaling_factor: float, accumulate: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Choose experts by `sqrt(softplus(x @ gate.T)) + bias`; weigh them without the bias.

    Args:
        x: `[num_tokens, hidden]` bf16.
        gate: `[num_experts, hidden]` bf16.
        bias: `[num_experts]` float32; only selects.
        num_topk: experts per token.
        scaling_factor: factor of the normalised weights.
        accumulate: float32 or float64.
    Returns: `topk_idx` `[num_tokens, num_topk]` int64, ascending; `topk_weights`, same shape, `accumulate`.
    Notes: ties go to the lower expert.
    """
    scores = softplus(linear(x, gate, accumulate)).sqrt()
    order = torch.sort(scores + bias.to(accumulate), dim=-1, descending=True, stable=True).indices
    topk_idx = order[:, :num_topk].sort(dim=-1).values
    weights = scores.gather(1, topk_idx)
    return topk_idx, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scaling_factor
