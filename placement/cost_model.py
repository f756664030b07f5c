"""Cost model: from the pages that a step reads to microseconds, with the constants of `placement/constants.py`.

A layer's routed product reads its hot pages from GPU memory and its cold ones over the links, one after the other
or at once, and ends when the slowest rank does. All else in a step is a base time plus a time for every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placement.constants import EXPERT_BYTES, NUM_LAYERS, NUM_RANKS, Machine

Floats = NDArray[np.float64]

BASE_ROWS: Final = 6
"""Rows of the step whose breakdown is documented: one request with DSpark."""
_US_PER_MS: Final = 1e3
_BYTES_PER_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class Loads:
    """Pages that a step reads, `[num_steps, num_layers, ep_size]`; a page is a slice if `ep_size < 8`."""

    hot: Floats
    cold: Floats
    foreseen: Floats
    """Of `cold`: those that the layer before asked for, too."""
    mistaken: Floats
    """Cold pages that the layer before asked for and that are not needed."""

    @property
    def ep_size(self) -> int:
        """Groups of ranks; the ranks of a group read the same pages, each its slice."""
        return int(self.hot.shape[-1])


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds by step, `[num_steps]`, and what crosses the links."""

    expert_ms: Floats
    """Routed products."""
    link_ms: Floats
    """Of it: waiting for cold pages."""
    other_ms: Floats
    """Everything else, collectives included."""
    hot_bytes: Floats
    """Read from the memory of all GPUs."""
    link_bytes: Floats
    """Over all links, prefetches that turn out useless included."""
    busiest_bytes: Floats
    """Over the links, summed over layers, of the rank that reads most in each."""

    @property
    def step_ms(self) -> Floats:
        """The whole step."""
        return self.expert_ms + self.other_ms


def page_bytes(ep_size: int) -> int:
    """Bytes of an expert on one rank."""
    return EXPERT_BYTES * ep_size // NUM_RANKS


def link_ms(machine: Machine, pages: Floats, ep_size: int, *, copied: bool = False) -> Floats:
    """Time until every rank has read its cold pages; ranks share what the host gives, each up to its own link.

    Args:
        machine: constants.
        pages: by group, `[..., ep_size]`.
        ep_size: groups.
        copied: by copy engines instead of by kernels.
    Returns: `[...]`.
    """
    one_gb_per_s = (machine.copied_gb_per_s if copied else machine.mapped_gb_per_s).value
    loads = np.sort(np.repeat(pages, NUM_RANKS // ep_size, axis=-1), axis=-1) * page_bytes(ep_size)
    phases = np.diff(loads, axis=-1, prepend=0.0)
    # In phase k, the k ranks with the least to read have finished.
    num_active = np.arange(NUM_RANKS, 0, -1)
    gb_per_s = np.minimum(one_gb_per_s, machine.all_links_gb_per_s.value / num_active)
    times: Floats = (phases / gb_per_s).sum(axis=-1) * _US_PER_MS / _BYTES_PER_GB
    return times


def hot_ms(machine: Machine, pages: Floats, ep_size: int) -> Floats:
    """Time until every rank has read its hot pages from its own memory, launches included; `[...]`."""
    per_page = page_bytes(ep_size) / machine.expert_read_gb_per_s.value * _US_PER_MS / _BYTES_PER_GB
    times: Floats = pages.max(axis=-1) * per_page + machine.expert_launch_us.value / _US_PER_MS
    return times


def wait_ms(machine: Machine, pages: Floats, ep_size: int) -> Floats:
    """`link_ms` of reads in place, with the latency that a layer with any cold page adds; `[...]`."""
    has_cold = pages.max(axis=-1) > 0
    times: Floats = link_ms(machine, pages, ep_size) + has_cold * (machine.cold_layer_us.value / _US_PER_MS)
    return times


def combine(hot: Floats, cold: Floats, *, overlaps: bool) -> Floats:
    """Time of a routed product that reads hot pages in `hot` and cold ones in `cold` ms."""
    times: Floats = np.maximum(hot, cold) if overlaps else hot + cold
    return times


def other_ms(machine: Machine, base_ms: float, num_rows: float) -> float:
    """A step without its routed products, every row costing what arithmetic and links make of it.

    Args:
        machine: constants.
        base_ms: what the step of `BASE_ROWS` rows takes without routed products and collectives.
        num_rows: of the step.
    """
    per_row_us = machine.dense_us_per_row.value + machine.expert_us_per_row.value
    per_row_us += machine.collective_us_per_row.value
    return base_ms + machine.collectives_ms.value + (num_rows - BASE_ROWS) * per_row_us / _US_PER_MS


def layer_ms(
    machine: Machine, loads: Loads, window_ms: float, *, use_prefetch: bool = False, overlaps: bool = False
) -> tuple[Floats, Floats]:
    """Time of each routed product, and of it the link's, `[num_steps, num_layers]`.

    Args:
        machine: constants.
        loads: what is read.
        window_ms: before each product, while the links would be idle (collectives, which use them a little, included).
        use_prefetch: fill that window with copies of the pages that the layer before asked for.
        overlaps: hot and cold pages are read at once.
    """
    ep_size = loads.ep_size
    cold = loads.cold
    if use_prefetch:
        asked_ms = link_ms(machine, loads.foreseen + loads.mistaken, ep_size, copied=True)
        # What does not fit into the window is not asked for, so a prefetch never delays a read.
        share = np.minimum(1.0, window_ms / np.maximum(asked_ms, 1e-12))
        cold = cold - loads.foreseen * share[..., None]
    waits = wait_ms(machine, cold, ep_size)
    return combine(hot_ms(machine, loads.hot, ep_size), waits, overlaps=overlaps), waits


def step_cost(
    machine: Machine,
    loads: Loads,
    rest_ms: float,
    *,
    use_prefetch: bool = False,
    overlaps: bool = False,
) -> StepCost:
    """What the steps of a trace cost.

    Args:
        machine: constants.
        loads: what each step reads.
        rest_ms: of each step, without its routed products.
        use_prefetch: as in `layer_ms`.
        overlaps: as in `layer_ms`.
    """
    times, waits = layer_ms(
        machine, loads, rest_ms / NUM_LAYERS, use_prefetch=use_prefetch, overlaps=overlaps
    )
    slices = NUM_RANKS // loads.ep_size
    crossing = loads.cold + (loads.mistaken if use_prefetch else 0.0)
    return StepCost(
        expert_ms=times.sum(axis=1),
        link_ms=waits.sum(axis=1),
        other_ms=np.full(len(times), rest_ms),
        hot_bytes=loads.hot.sum(axis=(1, 2)) * page_bytes(loads.ep_size) * slices,
        link_bytes=crossing.sum(axis=(1, 2)) * page_bytes(loads.ep_size) * slices,
        busiest_bytes=crossing.max(axis=2).sum(axis=1) * page_bytes(loads.ep_size),
    )
