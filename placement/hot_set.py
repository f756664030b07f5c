"""Hot sets: which pages a rank keeps, chosen in two ways, and what the others are expected to cost.

All functions see one expert group: its experts by layer, drafts after the backbone, as local indices.
"""

from __future__ import annotations

from collections.abc import Sequence

Rates = tuple[tuple[float, ...], ...]
"""Chance that a row chooses an expert, by layer and expert."""
HotSet = tuple[tuple[int, ...], ...]
"""Hot experts of each layer; they ascend."""


def choice_rates(counts: Sequence[Sequence[int]], num_topk: Sequence[int]) -> Rates:
    """How likely a row chooses each expert, layer by layer: what a layer did not see of a prompt does not count.

    Args:
        counts: routed slots by layer and expert, on all ranks.
        num_topk: experts that a row chooses, by layer.
    Returns: zeros for a layer without routed slots.
    """
    rates = []
    for row, topk in zip(counts, num_topk, strict=True):
        num_rows = max(1, sum(row))
        rates.append(tuple(topk * count / num_rows for count in row))
    return tuple(rates)


def hottest(rates: Rates, max_hot: int) -> HotSet:
    """The pages that are chosen most often; ties go to the lower layer, then the lower expert.

    A page that a step needs crosses the link once, so a hot page saves its size times the chance that any of the
    step's rows chooses it. That grows with the rate, and pages are equally large: no other set of as many pages saves
    more, whatever the number of rows.
    """
    pages = [(-rate, layer, expert) for layer, row in enumerate(rates) for expert, rate in enumerate(row)]
    hot: list[list[int]] = [[] for _ in rates]
    for _, layer, expert in sorted(pages)[:max_hot]:
        hot[layer].append(expert)
    return tuple(tuple(sorted(experts)) for experts in hot)


def offload_layers(experts_per_layer: Sequence[int], max_hot: int) -> HotSet:
    """Whole layers: as few of the first ones are cold as it takes, all later ones and the drafts are hot.

    That is what vLLM's `--cpu-offload-gb` does: it moves parameters to the host in the order in which layers are
    built, until it has moved enough.
    """
    num_left = sum(experts_per_layer)
    hot: list[tuple[int, ...]] = []
    for num_experts in experts_per_layer:
        is_cold = num_left > max_hot
        hot.append(() if is_cold else tuple(range(num_experts)))
        num_left -= num_experts if is_cold else 0
    return tuple(hot)


def expected_cold_pages(rates: Rates, hot: HotSet, num_rows: int) -> tuple[float, ...]:
    """Cold pages that a step needs, layer by layer, each counted once.

    Args:
        rates: of the group's experts.
        hot: the pages that are not counted.
        num_rows: of the step; they choose independently of each other.
    """
    return tuple(
        sum(
            1 - (1 - min(rate, 1.0)) ** num_rows
            for expert, rate in enumerate(row)
            if expert not in hot_experts
        )
        for row, hot_experts in zip(rates, map(frozenset, hot), strict=True)
    )
