"""Routed expert products read straight from MXFP4 pages. Source: `spec/model.md` section 6; design section 4."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.formats import PageLayout
from kernels.reference.activation import swiglu
from kernels.reference.expert_pages import load_codes, load_scales
from kernels.reference.linear import linear, linear_bf16
from kernels.reference.quantize import dequantize_mxfp4, quantize_q8


def expert_mlp(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    addresses: Tensor,
    experts: Sequence[int],
    first_expert: int,
    layout: PageLayout,
    out: Tensor,
    *,
    limit: float,
    quantize_activations: bool,
) -> None:
    """Write `out[t, k]` for every (token, choice) whose expert is in `experts`; leave the others alone.

    Args:
        x: `[num_tokens, hidden]` bf16.
        topk_idx: `[num_tokens, num_topk]` int64, global expert ids.
        topk_weights: `[num_tokens, num_topk]` float32 or float64 (the accumulation type).
        addresses: `[num_local_experts]` int64, byte address of each page.
        experts: local expert indices whose addresses may be read.
        first_expert: global id of local expert 0.
        layout: of every page.
        out: `[num_tokens, num_topk, hidden]`, accumulation type; this rank's part of each expert's output, routing
            weight included (it multiplies before the down product).
        limit: clamp of gate and up.
        quantize_activations: round the inputs of both products to FP8 as the reference implementation does (Q8).
    """
    accumulate = topk_weights.dtype
    rows_in = quantize_q8(x) if quantize_activations else x
    for expert in experts:
        token, choice = (topk_idx == first_expert + expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        gate, up, down = read_page(int(addresses[expert]), layout, x.device)
        rows = rows_in[token]
        h = swiglu(linear_bf16(rows, gate, accumulate), linear_bf16(rows, up, accumulate), limit, accumulate)
        h = (h * topk_weights[token, choice].unsqueeze(-1)).to(torch.bfloat16)
        if quantize_activations:
            h = quantize_q8(h)
        out[token, choice] = linear(h, down, accumulate)


def read_page(address: int, layout: PageLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Dequantise the page at an address that `device` can read.

    Returns: gate and up `[inter, hidden]` and down `[hidden, inter]`, float32, exact.
    """
    page = view_memory(address, layout.num_bytes, device)
    hidden, inter = layout.hidden_size, layout.intermediate_size

    def section(codes: slice, scales: slice, rows: int) -> Tensor:
        return dequantize_mxfp4(load_codes(page[codes], rows), load_scales(page[scales], rows))

    return (
        section(layout.gate_codes, layout.gate_scales, inter),
        section(layout.up_codes, layout.up_scales, inter),
        section(layout.down_codes, layout.down_scales, hidden),
    )


def view_memory(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """A uint8 tensor `[num_bytes]` over memory at `address`; the caller keeps that memory alive and in place."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_CudaMemory(address, num_bytes), device=device)


class _CudaMemory:
    """Memory seen through the CUDA array interface; also mapped host memory, which has a device address."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
