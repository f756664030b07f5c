"""Manifold-constrained hyper-connections: mixes, collapse, expand. Source: `spec/model.md` section 3."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.activation import sigmoid
from kernels.reference.linear import linear


@dataclass(frozen=True, slots=True)
class Mixes:
    """Per-token coefficients over the `m` residual copies, in the accumulation type."""

    pre: Tensor
    """`[num_tokens, m]`: weights that collapse the copies into a sub-layer's input (used one sub-layer later)."""
    post: Tensor
    """`[num_tokens, m]`: how much of the sub-layer's output each copy receives."""
    comb: Tensor
    """`[num_tokens, m, m]`: doubly stochastic mixing; copy `b` receives `comb[a, b]` of copy `a`."""


def compute_mixes(
    stream: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
    accumulate: torch.dtype,
) -> Mixes:
    """Coefficients of one sub-layer from the residual stream.

    Args:
        stream: `[num_tokens, m, hidden]` bf16.
        fn: `[2 * m + m * m, m * hidden]` float32.
        base: `[2 * m + m * m]` float32.
        scale: `[3]` float32: of pre, post and comb.
        sinkhorn_iters: row and column normalisations, counting the softmax as the first row step.
        hc_eps: added to `pre` and inside the normalisations, not to `post`.
        norm_eps: RMS epsilon over the flattened stream.
        accumulate: float32 or float64.
    """
    m = stream.shape[1]
    v = stream.to(accumulate).flatten(1)  # copy-major
    rms = torch.rsqrt(v.square().mean(dim=-1, keepdim=True) + norm_eps)
    mixed = linear(v, fn, accumulate) * rms
    base, scale = base.to(accumulate), scale.to(accumulate)
    pre = sigmoid(mixed[:, :m] * scale[0] + base[:m]) + hc_eps
    post = 2 * sigmoid(mixed[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (mixed[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m))
    return Mixes(pre, post, sinkhorn(comb, sinkhorn_iters, hc_eps))


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Alternate row and column normalisation: `[..., m, m]` to `[..., m, m]`, in the dtype of `logits`."""
    epsilon = logits.new_tensor(eps)  # as a plain number it would be converted at every addition
    c = torch.softmax(logits, dim=-1) + epsilon
    c = c / (c.sum(dim=-2, keepdim=True) + epsilon)
    for _ in range(iters - 1):
        c = c / (c.sum(dim=-1, keepdim=True) + epsilon)
        c = c / (c.sum(dim=-2, keepdim=True) + epsilon)
    return c


def collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum of the copies: `[num_tokens, m, hidden]` bf16, `[num_tokens, m]` to `[num_tokens, hidden]` bf16."""
    return (stream.to(pre.dtype) * pre.unsqueeze(-1)).sum(dim=1).to(torch.bfloat16)


def expand(y: Tensor, stream: Tensor, mixes: Mixes) -> Tensor:
    """New stream: `out[b] = post[b] * y + sum_a comb[a, b] * stream[a]`.

    Args:
        y: `[num_tokens, hidden]` bf16, the sub-layer's output.
        stream: `[num_tokens, m, hidden]` bf16, before the sub-layer.
        mixes: the sub-layer's own post and comb.
    Returns: `[num_tokens, m, hidden]` bf16.
    """
    dtype = mixes.post.dtype
    copies = stream.to(dtype)
    mixed = (mixes.comb.unsqueeze(-1) * copies.unsqueeze(2)).sum(dim=1)  # [num_tokens, b, hidden]
    return (mixes.post.unsqueeze(-1) * y.to(dtype).unsqueeze(1) + mixed).to(torch.bfloat16)
