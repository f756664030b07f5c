"""Which pages a predicted routing asks for, brought near before they are needed. Triton. Reference: same name.

Source: design section 4. The host does not learn what was predicted, so nothing waits for it and a CUDA graph can
capture both launches. A few programs read the host's memory: sixteen saturate PCIe 5.0 x16, and the others of the GPU
are left to what computes meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_PAIRS = 1024
"""Predicted choices: one program looks at all of them."""
_PROGRAMS = 32
"""That copy, in all."""
_WORDS = 2048
"""int32, of one turn of a program that copies."""


def prefetch_pages(
    topk_idx: Tensor,
    first_expert: int,
    is_cold: Tensor,
    addresses: Tensor,
    slots: Tensor,
    table: Tensor,
    was_prefetched: Tensor,
) -> None:
    """Copy the cold pages that most rows are predicted to choose, and make a table of where every page is then.

    Args:
        topk_idx: `[num_tokens, num_topk]` int64, contiguous, predicted global expert ids, at most MAX_PAIRS.
        first_expert: global id of local expert 0.
        is_cold: `[num_local_experts]` bool: pages worth a copy.
        addresses: `[num_local_experts]` int64: where each page is anyway.
        slots: `[num_slots, page_bytes]` uint8, contiguous, `page_bytes` a multiple of 16, and so is its address: at
            most so many pages are copied; of equally wanted ones those of the lower experts.
        table: `[num_local_experts]` int64, output: `addresses`, but the slots of pages that were copied.
        was_prefetched: `[num_local_experts]` bool, output: which those are.
    Raises: ValueError that names the argument.
    """
    num_local, num_slots = addresses.numel(), slots.shape[0]
    for name, tensor, dtype in (
        ("topk_idx", topk_idx, torch.int64),
        ("is_cold", is_cold, torch.bool),
        ("addresses", addresses, torch.int64),
        ("slots", slots, torch.uint8),
        ("table", table, torch.int64),
        ("was_prefetched", was_prefetched, torch.bool),
    ):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype}, got {tensor.dtype}, strides {tensor.stride()}"
            )
    for name, tensor in (("is_cold", is_cold), ("table", table), ("was_prefetched", was_prefetched)):
        if tensor.numel() != num_local:
            raise ValueError(f"{name} must have {num_local} elements, got {tensor.numel()}")
    if topk_idx.numel() > MAX_PAIRS:
        raise ValueError(f"topk_idx has {topk_idx.numel()} elements, more than {MAX_PAIRS}")
    if slots.shape[1] % 16 or slots.data_ptr() % 16:
        raise ValueError(
            f"slots must be aligned to 16 bytes, got {list(slots.shape)} at {slots.data_ptr():#x}"
        )
    chosen = torch.empty(num_slots, dtype=torch.int32, device=slots.device)
    _choose_kernel[(1,)](
        topk_idx,
        first_expert,
        is_cold,
        addresses,
        table,
        was_prefetched,
        chosen,
        topk_idx.numel(),
        num_local,
        num_slots,
        EXPERTS=triton.next_power_of_2(max(num_local, num_slots, 2)),
        PAIRS=32,
        num_warps=4,
    )
    per_page = max(1, _PROGRAMS // num_slots)
    _copy_kernel[(num_slots, per_page)](
        chosen, addresses, slots, table, was_prefetched, slots.shape[1] // 16, WORDS=_WORDS, num_warps=4
    )


@triton.jit
def _choose_kernel(
    topk_idx,
    first_expert,
    is_cold,
    addresses,
    table,
    was_prefetched,
    chosen,
    num_pairs,
    num_local,
    num_slots,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_local
    counts = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in range(0, num_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        local = tl.load(topk_idx + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first_expert
        is_choice = (pair < num_pairs)[None, :] & (local[None, :] == expert[:, None])
        counts += tl.sum(is_choice.to(tl.int32), axis=1)
    cold = tl.load(is_cold + expert, mask=is_expert, other=0).to(tl.int32) != 0
    # Most wanted first, then the lower expert: one number that sorts like the pair.
    key = tl.where(is_expert & cold & (counts > 0), counts * EXPERTS + (EXPERTS - 1 - expert), -1)
    order = tl.sort(key, descending=True)
    tl.store(
        chosen + expert, tl.where(order >= 0, EXPERTS - 1 - order % EXPERTS, -1), mask=expert < num_slots
    )
    tl.store(table + expert, tl.load(addresses + expert, mask=is_expert, other=0), mask=is_expert)
    tl.store(was_prefetched + expert, tl.zeros([EXPERTS], dtype=tl.int1), mask=is_expert)


@triton.jit
def _copy_kernel(chosen, addresses, slots, table, was_prefetched, num_vectors, WORDS: tl.constexpr):
    num_words = num_vectors * 4  # which shows the compiler that a load of 16 bytes is masked as a whole
    slot = tl.program_id(0)
    expert = tl.load(chosen + slot)
    if expert >= 0:
        target = (slots + slot.to(tl.int64) * num_words * 4).to(tl.pointer_type(tl.int32))
        source = tl.load(addresses + expert).to(tl.pointer_type(tl.int32))
        target = tl.multiple_of(target, 16)
        source = tl.multiple_of(source, 16)
        for start in range(tl.program_id(1) * WORDS, num_words, tl.num_programs(1) * WORDS):
            word = start + tl.arange(0, WORDS)
            tl.store(target + word, tl.load(source + word, mask=word < num_words), mask=word < num_words)
        if tl.program_id(1) == 0:
            tl.store(table + expert, target.to(tl.int64))
            tl.store(was_prefetched + expert, tl.full([], 1, tl.int1))
