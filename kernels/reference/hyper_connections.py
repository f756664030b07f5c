"""Manifold-constrained hyper-connections: mixes, collapse, expand. Source: `spec/model.md` section 3."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.activation import sigmoid
from kernels.reference.linear import linear
from kernels.reference.norm import rms_norm
from kernels.reference.quantize import quantize_q8
from kernels.tensors import Advanced, Mixes


def advance(
    stream: Tensor,
    update: tuple[Tensor, Mixes] | None,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    *,
    sinkhorn_iters: int,
    hc_eps: float,
    norm_eps: float,
    accumulate: torch.dtype,
) -> Advanced:
    """From one sub-layer to the next.

    Args:
        stream: `[num_rows, m, hidden]` bf16, before the sub-layer that made `update`.
        update: its output, see `expand`, and its mixes; None if there is nothing to add.
        pre: `[num_rows, m]`: collapses the new stream.
        fn: see `compute_mixes`.
        base: see `compute_mixes`.
        scale: see `compute_mixes`.
        norm: `[hidden]` bf16: weight of the next sub-layer's norm.
        sinkhorn_iters: see `compute_mixes`.
        hc_eps: see `compute_mixes`.
        norm_eps: RMS epsilon.
        accumulate: float32 or float64.
    """
    if update is not None:
        stream = expand(update[0], stream, update[1])
    mixes = compute_mixes(
        stream,
        fn,
        base,
        scale,
        sinkhorn_iters=sinkhorn_iters,
        hc_eps=hc_eps,
        norm_eps=norm_eps,
        accumulate=accumulate,
    )
    x = collapse_norm(stream, pre, norm, norm_eps=norm_eps, accumulate=accumulate)
    return Advanced(stream, mixes, x, quantize_q8(x))


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
        y: `[num_tokens, hidden]`, the sub-layer's output: bf16, or the accumulation type and then rounded first.
        stream: `[num_tokens, m, hidden]` bf16, before the sub-layer.
        mixes: the sub-layer's own post and comb.
    Returns: `[num_tokens, m, hidden]` bf16.
    """
    dtype = mixes.post.dtype
    copies = stream.to(dtype)
    mixed = (mixes.comb.unsqueeze(-1) * copies.unsqueeze(2)).sum(dim=1)  # [num_tokens, b, hidden]
    return (mixes.post.unsqueeze(-1) * y.to(torch.bfloat16).to(dtype).unsqueeze(1) + mixed).to(torch.bfloat16)


def collapse_norm(
    stream: Tensor, pre: Tensor, norm: Tensor, *, norm_eps: float, accumulate: torch.dtype
) -> Tensor:
    """Normalised input of a sub-layer: `collapse`, then `rms_norm`; `[num_rows, hidden]` bf16."""
    return rms_norm(collapse(stream, pre), norm, norm_eps, accumulate)


def mean_copies(stream: Tensor, *, accumulate: torch.dtype) -> Tensor:
    """Mean of the copies (section 3, taps): `[num_rows, m, hidden]` bf16 to `[num_rows, hidden]` bf16."""
    return stream.to(accumulate).mean(dim=1).to(torch.bfloat16)
