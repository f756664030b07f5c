"""Routed expert products read straight from MXFP4 pages, on a GPU. Reference: same name.

Source: `spec/model.md` section 6; design section 4. Few rows an expert take `kernels.expert_decode`, many
`kernels.expert_prefill`; both read the tiles of a page as `kernels.expert_tiles` describes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import expert_decode, expert_prefill
from kernels.expert_rows import group_rows, tile_rows
from kernels.formats import PageLayout

MIN_PREFILL_ROWS = 10
"""Rows an expert can expect from which on the prefill path is the faster one. One H200, 2026-12."""
_MAX_ELEMENTS = 2**31 - 1
"""Offsets into rows are 32 bits wide."""


def expert_mlp(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    addresses: Tensor,
    is_member: Tensor | None,
    first_expert: int,
    layout: PageLayout,
    out: Tensor,
    *,
    num_experts: int,
    limit: float,
) -> None:
    """Write `out[t, k]` for every (token, choice) whose expert is a member; leave the others alone.

    Args:
        x: `[num_tokens, hidden]` bf16, contiguous.
        topk_idx: `[num_tokens, num_topk]` int64, contiguous, global expert ids.
        topk_weights: `[num_tokens, num_topk]` float32, contiguous.
        addresses: `[num_local_experts]` int64, byte address of each page. Only the device reads them: whoever fills
            the table has called `kernels.formats.check_page_addresses`.
        is_member: `[num_local_experts]` bool: local experts whose addresses may be read; None for all.
        first_expert: global id of local expert 0.
        layout: of every page.
        out: `[num_tokens, num_topk, hidden]` bf16, contiguous; this rank's part of each expert's output, routing
            weight included (it multiplies before the down product).
        num_experts: of the layer, on all ranks. With the number of tokens it decides how the product is computed.
        limit: clamp of gate and up.
    Raises: ValueError that names the argument.
    Notes: a row's bits depend on the row, its experts and on which of the two products `num_tokens` leads to; not
        on the slots or the memory that hold the pages, nor on how a step's experts are split over calls. Outputs
        are rounded to bf16, as those of the reference implementation are: half the bytes between two kernels that
        move little else. Scales from 2**-60 to 2**65 are exact.
    """
    _check_inputs(x, topk_idx, topk_weights, addresses, is_member, layout, out)
    num_pairs, num_local = topk_idx.numel(), addresses.numel()
    if num_pairs == 0 or num_local == 0:
        return
    mean_rows = num_pairs / num_experts
    is_prefill = mean_rows >= MIN_PREFILL_ROWS
    grouped, rows = group_rows(x, topk_idx, is_member, num_local, first_expert, in_k_order=is_prefill)
    h = torch.empty(num_pairs, layout.intermediate_size, dtype=torch.bfloat16, device=x.device)
    if is_prefill:
        config = expert_prefill.prefill_config(mean_rows, torch.cuda.get_device_capability(x.device))
        tiles = tile_rows(grouped, config.rows)
        expert_prefill.gate_up(rows, grouped, tiles, addresses, topk_weights, h, layout, float(limit), config)
        expert_prefill.down(h, grouped, tiles, addresses, out, layout, config)
    else:
        config = expert_decode.decode_config(layout, mean_rows, torch.cuda.get_device_capability(x.device))
        expert_decode.gate_up(rows, grouped, addresses, topk_weights, h, layout, float(limit), config)
        expert_decode.down(h, grouped, addresses, out, layout, config)


def _check_inputs(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    addresses: Tensor,
    is_member: Tensor | None,
    layout: PageLayout,
    out: Tensor,
) -> None:
    pairs = tuple(topk_idx.shape)
    if topk_idx.dim() != 2:
        raise ValueError(f"topk_idx must be [num_tokens, num_topk], got {list(pairs)}")
    num_local = addresses.numel()
    for name, tensor, dtype, shape in (
        ("x", x, torch.bfloat16, (pairs[0], layout.hidden_size)),
        ("topk_idx", topk_idx, torch.int64, pairs),
        ("topk_weights", topk_weights, torch.float32, pairs),
        ("addresses", addresses, torch.int64, (num_local,)),
        *([] if is_member is None else [("is_member", is_member, torch.bool, (num_local,))]),
        ("out", out, torch.bfloat16, (*pairs, layout.hidden_size)),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device.type != "cuda" or tensor.device != x.device:
            raise ValueError(f"{name} must be on the GPU of x, got {tensor.device} and {x.device}")
    if out.numel() > _MAX_ELEMENTS:
        raise ValueError(f"out has {out.numel()} elements, more than {_MAX_ELEMENTS}: split the tokens")
