"""Expert choice from router logits. Source: `spec/model.md` section 6."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.activation import overlaps_launches

_INT32_MIN = tl.constexpr(-0x80000000)
_BELOW_ALL = tl.constexpr(-(2**62))
_INT32_MAX = tl.constexpr(0x7FFFFFFF)
_SOFTPLUS_THRESHOLD = tl.constexpr(20.0)


def choose_experts(
    logits: Tensor, bias: Tensor, num_topk: int, scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """Choose experts by `sqrt(softplus(logits)) + bias`; weigh them without the bias.

    Args:
        logits: `[num_rows, num_experts]` float32, contiguous.
        bias: `[num_experts]` float32, contiguous; only selects.
        num_topk: experts per row.
        scaling_factor: factor of the normalised weights.
    Returns: `topk_idx` `[num_rows, num_topk]` int64, ascending; `topk_weights`, same shape, float32.
    Raises: ValueError if a dtype, shape or stride differs from the above.
    Notes: ties go to the lower expert. NaN counts as the largest value, so that it reaches the weights.
    """
    num_rows, num_experts = logits.shape
    for name, tensor, shape in (("logits", logits, (num_rows, num_experts)), ("bias", bias, (num_experts,))):
        if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous float32 of shape {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if not 0 < num_topk <= num_experts:
        raise ValueError(f"num_topk must be 1 to {num_experts}, the number of experts, got {num_topk}")
    topk_idx = logits.new_empty(num_rows, num_topk, dtype=torch.int64)
    topk_weights = logits.new_empty(num_rows, num_topk)
    if num_rows:
        overlap = overlaps_launches(logits.device)
        _choose_experts_kernel[(num_rows,)](
            *(logits, bias, topk_idx, topk_weights, float(scaling_factor)),
            NUM_EXPERTS=num_experts,
            NUM_TOPK=num_topk,
            BLOCK=triton.next_power_of_2(num_experts),
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=1,
        )
    return topk_idx, topk_weights


@triton.jit
def _choose_experts_kernel(
    logits,
    bias,
    topk_idx,
    topk_weights,
    scaling_factor,
    NUM_EXPERTS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    logit = tl.load(logits + row * NUM_EXPERTS + expert, mask=is_expert, other=0.0)
    score = tl.sqrt_rn(_softplus(logit))
    key = score + tl.load(bias + expert, mask=is_expert, other=0.0)
    # Integers in the order of the floats; a sum of a score, which is no negative zero, is none either.
    bits = key.to(tl.int32, bitcast=True)
    order = tl.where(key != key, _INT32_MAX, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    order = tl.where(is_expert, order, _INT32_MIN).to(tl.int64)
    # The lower expert has the larger number, so that one maximum finds the value and breaks the tie.
    order = order * BLOCK + (BLOCK - 1 - expert)
    is_chosen = expert < 0
    for _ in tl.static_range(NUM_TOPK):
        is_best = order == tl.max(order, axis=0)
        is_chosen = is_chosen | is_best
        order = tl.where(is_best, _BELOW_ALL, order)
    total = tl.sum(tl.where(is_chosen, score, 0.0), axis=0)
    place = row * NUM_TOPK + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(topk_idx + place, expert.to(tl.int64), mask=is_chosen)
    tl.store(topk_weights + place, score / (total + 1e-20) * scaling_factor, mask=is_chosen)


@triton.jit
def _softplus(x):
    """`log(1 + exp(x))`, accurate where it is small, too; the identity above the threshold.

    It is `max(x, 0) + log1p(e)`, `e = exp(-|x|)`, and `log1p(e)` is `2 * artanh(z)`, `z = e / (2 + e)`: a series
    in `z * z <= 1 / 9`, whose first term left out is below 2 ** -28 of the sum.
    """
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    square = z * z
    series = 1.0 / 15
    for n in tl.static_range(6, -1, -1):
        series = series * square + 1.0 / (2 * n + 1)
    near = tl.where(x < 0, 0.0, x) + 2.0 * z * series
    return tl.where(x > _SOFTPLUS_THRESHOLD, x, near)
