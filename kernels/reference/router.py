"""Expert choice. Source: `spec/model.md` section 6."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.activation import softplus
from kernels.reference.linear import linear


def choose_experts(
    logits: Tensor, bias: Tensor, num_topk: int, scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """Choose experts by `sqrt(softplus(logits)) + bias`; weigh them without the bias.

    Args:
        logits: `[num_tokens, num_experts]` float32 or float64.
        bias: `[num_experts]` float32; only selects.
        num_topk: experts per token.
        scaling_factor: factor of the normalised weights.
    Returns: `topk_idx` `[num_tokens, num_topk]` int64, ascending; `topk_weights`, same shape, dtype of `logits`.
    Notes: ties go to the lower expert.
    """
    scores = softplus(logits).sqrt()
    order = torch.sort(scores + bias.to(scores.dtype), dim=-1, descending=True, stable=True).indices
    topk_idx = order[:, :num_topk].sort(dim=-1).values
    weights = scores.gather(1, topk_idx)
    return topk_idx, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scaling_factor


def route(
    x: Tensor, gate: Tensor, bias: Tensor, num_topk: int, scaling_factor: float, accumulate: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`choose_experts` by the logits of a gate.

    Args:
        x: `[num_tokens, hidden]` bf16.
        gate: `[num_experts, hidden]` bf16.
        bias: see `choose_experts`.
        num_topk: see `choose_experts`.
        scaling_factor: see `choose_experts`.
        accumulate: float32 or float64.
    """
    return choose_experts(linear(x, gate, accumulate), bias, num_topk, scaling_factor)
