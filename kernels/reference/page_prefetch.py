"""Which pages a predicted routing asks for, brought near before they are needed. Source: design section 4."""

from __future__ import annotations

from torch import Tensor

from kernels.reference.experts import view_memory


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
        topk_idx: `[num_tokens, num_topk]` int64, predicted global expert ids.
        first_expert: global id of local expert 0.
        is_cold: `[num_local_experts]` bool: pages worth a copy.
        addresses: `[num_local_experts]` int64: where each page is anyway.
        slots: `[num_slots, page_bytes]` uint8: at most so many pages are copied; of equally wanted ones those of the
            lower experts.
        table: `[num_local_experts]` int64, output: `addresses`, but the slots of pages that were copied.
        was_prefetched: `[num_local_experts]` bool, output: which those are.
    """
    table.copy_(addresses)
    was_prefetched.fill_(False)
    num_local = len(addresses)
    local = topk_idx.flatten() - first_expert
    counts = local[(local >= 0) & (local < num_local)].bincount(minlength=num_local)
    wanted = [expert for expert in range(num_local) if is_cold[expert] and counts[expert] > 0]
    wanted.sort(key=lambda expert: (-int(counts[expert]), expert))
    for expert, slot in zip(wanted, slots, strict=False):
        slot.copy_(view_memory(int(addresses[expert]), slot.numel(), slot.device))
        table[expert] = slot.data_ptr()
        was_prefetched[expert] = True
