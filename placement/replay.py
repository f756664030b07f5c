"""Replay: what a trace reads under an arm, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from placement.adaptation import PRIOR_HALF_LIVES, AdaptationPolicy, AdaptationSettings
from placement.constants import NUM_RANKS, Machine
from placement.cost_model import Loads, StepCost, page_bytes, step_cost
from placement.hot_mask import Mask, hot_by_weight, num_hot_pages, whole_layers_cold
from placement.trace import Trace
from placement.trace_generator import NUM_TOPK

ArmName = Literal["layer_offload", "static", "adaptive"]
STEPS_PER_PROPOSAL: Final = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to use the memory."""

    name: ArmName
    ep_size: int = NUM_RANKS
    offload_gib: float = 9.75
    """Expert bytes of each rank that are not resident."""
    use_prefetch: bool = False
    adaptation: AdaptationSettings = AdaptationSettings()
    prior_half_lives: float = PRIOR_HALF_LIVES
    """What the profile counts for when adaptation starts, in half-lives of traffic."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a trace costs under an arm, and how well the hot set fits it; arrays by step."""

    cost: StepCost
    hit_rate: NDArray[np.float64]
    """Share of routed slots that hot pages serve."""
    swapped_bytes: NDArray[np.float64]
    """Of one rank, for adaptation."""


def hot_mask(arm: Arm, profile: NDArray[np.number]) -> Mask:
    """The hot set that an arm starts with."""
    if arm.name == "layer_offload":
        return whole_layers_cold(arm.offload_gib)
    return hot_by_weight(profile, num_hot_pages(arm.offload_gib, arm.ep_size), arm.ep_size)


def replay(
    trace: Trace,
    arm: Arm,
    profile: NDArray[np.number],
    machine: Machine,
    rest_ms: float,
    *,
    overlaps: bool = False,
) -> Replay:
    """Run a trace under an arm.

    Args:
        trace: of the released model's layers and experts; with predictions if the arm prefetches.
        arm: how memory is used.
        profile: routed slots by layer and expert, from which the first hot set comes.
        machine: constants.
        rest_ms: as in `cost_model.step_cost`.
        overlaps: as in `cost_model.layer_ms`.
    """
    mask = hot_mask(arm, profile)
    if arm.name != "adaptive":
        loads, hits = read_loads(trace, slice(None), mask, arm)
        cost = step_cost(machine, loads, rest_ms, use_prefetch=arm.use_prefetch, overlaps=overlaps)
        return Replay(cost, hits, np.zeros(trace.num_steps))
    followers = _Followers(mask, arm, profile)
    parts: list[StepCost] = []
    all_hits: list[NDArray[np.float64]] = []
    swapped = np.zeros(trace.num_steps)
    for start in range(0, trace.num_steps, STEPS_PER_PROPOSAL):
        steps = slice(start, min(start + STEPS_PER_PROPOSAL, trace.num_steps))
        loads, hits = read_loads(trace, steps, followers.mask, arm)
        part = step_cost(machine, loads, rest_ms, use_prefetch=arm.use_prefetch, overlaps=overlaps)
        parts.append(part)
        all_hits.append(hits)
        num_steps = steps.stop - steps.start
        num_bytes = followers.follow(
            trace.routed_slots(steps), num_steps * trace.num_rows, part.step_ms.sum() / 1e3
        )
        swapped[steps] = num_bytes / num_steps
    fields = StepCost.__dataclass_fields__
    cost = StepCost(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})
    # Swaps are paid in full, on a link that every rank uses: in truth most of them hide behind computation.
    swap_ms = swapped * NUM_RANKS / (machine.all_links_gb_per_s.value * 1e6)
    cost.other_ms[:] += swap_ms
    return Replay(cost, np.concatenate(all_hits), swapped)


class _Followers:
    """The adaptation policies of all groups of ranks; the ranks of a group see and decide the same."""

    def __init__(self, mask: Mask, arm: Arm, profile: NDArray[np.number]) -> None:
        # What the profile expects within the time that the policy looks back.
        num_slots = NUM_TOPK * arm.adaptation.half_life_tokens * arm.prior_half_lives
        expected = profile * (num_slots / np.maximum(profile.sum(axis=1, keepdims=True), 1))
        self.mask = mask.copy()
        self._width = mask.shape[1] // arm.ep_size
        self._page_bytes = page_bytes(arm.ep_size)
        self._policies = []
        for group in range(arm.ep_size):
            hot = [np.flatnonzero(row).tolist() for row in self.mask[:, self._experts(group)]]
            experts_per_layer = [self._width] * len(hot)
            self._policies.append(
                AdaptationPolicy(
                    hot,
                    experts_per_layer,
                    self._page_bytes,
                    arm.adaptation,
                    prior=expected[:, self._experts(group)].ravel(),
                )
            )

    def follow(self, routed_slots: NDArray[np.int64], num_tokens: int, elapsed_s: float) -> int:
        """Observe and swap; returns the bytes of the group that swaps most."""
        most = 0
        for group, policy in enumerate(self._policies):
            experts = self._experts(group)
            policy.observe(routed_slots[:, experts].ravel(), num_tokens)
            most = max(most, len(policy.propose(elapsed_s)))
            self.mask[:, experts] = policy.is_hot.reshape(-1, self._width)
        return most * self._page_bytes

    def _experts(self, group: int) -> slice:
        return slice(group * self._width, (group + 1) * self._width)


def read_loads(trace: Trace, steps: slice, mask: Mask, arm: Arm) -> tuple[Loads, NDArray[np.float64]]:
    """What the steps read, and the share of routed slots that is hot in each."""
    counts = trace.row_counts(steps)
    is_read = counts > 0
    cold = is_read & ~mask
    foreseen = mistaken = np.zeros((*is_read.shape[:2], arm.ep_size))
    if arm.use_prefetch:
        is_asked = (trace.predicted_counts(steps) > 0) & ~mask
        is_asked[:, 0] = False  # No layer comes before the first.
        foreseen = _by_group(is_asked & is_read, arm.ep_size)
        mistaken = _by_group(is_asked & ~is_read, arm.ep_size)
    loads = Loads(_by_group(is_read & mask, arm.ep_size), _by_group(cold, arm.ep_size), foreseen, mistaken)
    hits = (counts * mask).sum(axis=(1, 2)) / counts.sum(axis=(1, 2))
    return loads, hits


def _by_group(pages: Mask, ep_size: int) -> NDArray[np.float64]:
    num_steps, num_layers, _ = pages.shape
    groups: NDArray[np.float64] = pages.reshape(num_steps, num_layers, ep_size, -1).sum(
        axis=3, dtype=np.float64
    )
    return groups
