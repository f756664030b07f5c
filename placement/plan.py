"""PlacementPlan: which expert pages of a rank are hot, that is, resident in a device slot. The command plans an engine.

    python -m placement.plan --profile FILE --config CHECKPOINT --world-size 8 --ep-size 1 --arm static \
        (--gpu-budget-gib 22.5 | --offload-gib 11) [--out plan.json] [--show]

Source: design section 6. Arms: `layer_offload` keeps whole layers cold, the first ones, and is what the others are
compared with; `static` keeps the pages hot that save the most expected bytes; `adaptive` starts with the same ones and
says how they may be swapped later.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final, get_args

import msgspec

from model.config import CheckpointConfig, ConfigError, ModelConfig
from placement.adaptation import AdaptationSettings
from placement.engine_plan import (
    VERSION,
    Adaptation,
    Arm,
    Assumptions,
    EnginePlan,
    Expectation,
    ExpertLayout,
    LayerExpectation,
    PlanError,
    RankMemory,
    check,
    check_adaptation,
    save,
)
from placement.hot_set import HotSet, Rates, choice_rates, expected_cold_pages, hottest, offload_layers
from placement.profile import Counts, Profile, ProfileError
from placement.profile import load as load_profile

MIN_STAGING_SLOTS: Final = 2
"""One is read while the other is filled."""
_STAGING_BYTES: Final = 256 * 2**20
"""Of a staging ring whose slots are not set."""


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The hot set of one rank; every other page is cold and read from the host pool.

    Invariant: the experts of a layer ascend.
    """

    hot_experts: HotSet
    """Local indices of each layer's hot experts; drafts after the backbone."""

    @property
    def num_hot(self) -> int:
        """Device slots that the plan takes."""
        return sum(map(len, self.hot_experts))


def default_num_staging_slots(page_bytes: int, largest_layer: int) -> int:
    """Slots of a staging ring that is not set: as many as 256 MiB hold, at least 8, for two layers at most.

    Args:
        page_bytes: of every page.
        largest_layer: pages of a rank's largest layer.
    """
    return max(MIN_STAGING_SLOTS, min(max(8, _STAGING_BYTES // page_bytes), 2 * largest_layer))


def spread_evenly(experts_per_layer: Sequence[int], max_resident_pages: int | None) -> PlacementPlan:
    """Plan without a profile: the same share of every layer is hot, its first experts.

    Args:
        experts_per_layer: local experts of each layer, at least one in all.
        max_resident_pages: bound of `num_hot`; None means no bound.
    Returns: a plan that uses the whole bound, as far as there are pages.
    """
    return PlacementPlan(tuple(tuple(range(n)) for n in _even_shares(experts_per_layer, max_resident_pages)))


def host_experts(
    experts_per_layer: Sequence[int], max_host_pages: int | None, plan: PlacementPlan | None = None
) -> HotSet:
    """Which pages the host pool holds if not all: cold ones before hot ones, which are the last to need it.

    Where not all of a kind have room, it is the same share of every layer, the last experts: `spread_evenly` makes the
    first ones hot.

    Args:
        experts_per_layer: local experts of each layer, at least one in all.
        max_host_pages: bound of their number; None means no bound.
        plan: which pages are hot; None: not known.
    """
    hot = [()] * len(experts_per_layer) if plan is None else plan.hot_experts
    cold = [
        tuple(e for e in range(n) if e not in h)
        for n, h in zip(experts_per_layer, map(frozenset, hot), strict=True)
    ]
    num_cold = sum(map(len, cold))
    held_cold = _last_shares(cold, max_host_pages)
    held_hot = _last_shares(hot, None if max_host_pages is None else max(0, max_host_pages - num_cold))
    return tuple(tuple(sorted(c + h)) for c, h in zip(held_cold, held_hot, strict=True))


def _last_shares(layers: Sequence[tuple[int, ...]], max_pages: int | None) -> HotSet:
    """The same share of every layer, its last experts, `max_pages` in all or every page."""
    shares = _even_shares([len(experts) for experts in layers], max_pages)
    return tuple(experts[len(experts) - share :] for experts, share in zip(layers, shares, strict=True))


def _even_shares(experts_per_layer: Sequence[int], max_pages: int | None) -> list[int]:
    """The same share of every layer, `max_pages` in all or every page."""
    num_pages = sum(experts_per_layer)
    num_taken = num_pages if max_pages is None else min(max_pages, num_pages)
    # Rounding the running total, not each share, spends the bound exactly.
    ends = [
        num_before * num_taken // max(1, num_pages) for num_before in accumulate(experts_per_layer, initial=0)
    ]
    return [end - start for start, end in pairwise(ends)]


def create_plan(
    profile: Profile,
    model: ModelConfig,
    layout: ExpertLayout,
    *,
    arm: Arm,
    budget_bytes: int,
    num_staging_slots: int | None = None,
    num_rows: int | None = None,
    adaptation: AdaptationSettings | None = None,
) -> EnginePlan:
    """Choose the hot set of every rank.

    Args:
        profile: of the workload to come.
        model: dimensions of the profiled model.
        layout: how it is cut.
        arm: how to choose.
        budget_bytes: for expert pages on the device of each rank: hot ones and the staging ring.
        num_staging_slots: of each rank; None: `default_num_staging_slots`.
        num_rows: rows of a step; None: those that verify one request's drafts. Only the expected bytes depend on it.
        adaptation: for the arm `adaptive` alone; None: the defaults.
    Raises: PlanError.
    """
    counts = profile.counts
    profiled = tuple(map(len, counts))
    if profiled != layout.experts_per_layer:
        raise PlanError(f"the profile has {profiled} experts by layer, the model {layout.experts_per_layer}")
    if not any(map(any, counts)):
        raise PlanError("the profile has no routed token, so it does not tell experts apart")
    if arm == "adaptive":
        adaptation = adaptation or AdaptationSettings()
    check_adaptation(arm, adaptation)
    if num_staging_slots is None:
        num_staging_slots = default_num_staging_slots(layout.page_bytes, layout.largest_layer)
    max_hot = budget_bytes // layout.page_bytes - num_staging_slots
    if max_hot < 0:
        raise PlanError(
            f"{_size(budget_bytes)} for each rank's pages have no room for {num_staging_slots} staging slots of "
            f"{layout.page_bytes} bytes: raise the budget or take fewer slots"
        )
    rates = choice_rates(counts, [model.num_topk_of(layer) for layer in range(len(counts))])
    local = [layout.local_experts(group) for group in range(layout.ep_size)]
    local_rates = [_part(rates, ids) for ids in local]
    local_hot = [_choose(arm, group_rates, max_hot) for group_rates in local_rates]
    hot = tuple(_part_ids(ids, group_hot) for ids, group_hot in zip(local, local_hot, strict=True))
    num_rows = model.dspark_block_size + 1 if num_rows is None else num_rows
    cold = [expected_cold_pages(*group, num_rows) for group in zip(local_rates, local_hot, strict=True)]
    plan = EnginePlan(
        version=VERSION,
        model_hash=profile.model_hash,
        arm=arm,
        layout=layout,
        budget_bytes=budget_bytes,
        num_staging_slots=num_staging_slots,
        memory=tuple(
            RankMemory.of(layout, sum(map(len, group_hot)), num_staging_slots)
            for group_hot in hot
            for _ in range(layout.num_slices)
        ),
        hot_experts=hot,
        adaptation=None if adaptation is None else Adaptation(adaptation, _rounded(rates)),
        assumptions=Assumptions(profile.labels, profile.num_tokens, num_rows, "independent"),
        expected=_expect(counts, layout, hot, cold),
    )
    check(plan)
    return plan


def budget_of_offload(layout: ExpertLayout, offload_bytes: int, num_staging_slots: int) -> int:
    """Bytes of a rank's hot pages and staging ring when at least `offload_bytes` of its pages are cold.

    Raises: PlanError if a rank has fewer bytes of pages.
    """
    num_cold = -(-offload_bytes // layout.page_bytes)
    if num_cold > layout.num_rank_pages:
        raise PlanError(
            f"{_size(offload_bytes)} of each rank's pages cannot be cold: it has "
            f"{_size(layout.num_rank_pages * layout.page_bytes)}"
        )
    return (layout.num_rank_pages - num_cold + num_staging_slots) * layout.page_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True, help="from /v1/placement/profile")
    parser.add_argument(
        "--config", type=Path, required=True, help="the checkpoint's folder or its config.json"
    )
    parser.add_argument("--world-size", type=int, required=True, help="ranks, as shard.world_size")
    parser.add_argument("--ep-size", type=int, help="as shard.ep_size; by default the world size")
    parser.add_argument("--arm", choices=get_args(Arm), required=True)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gpu-budget-gib", type=float, help="each rank's hot pages and staging slots, at most")
    size.add_argument("--offload-gib", type=float, help="each rank's cold pages, at least")
    parser.add_argument("--staging-slots", type=int, help="as shard.num_staging_slots, by default as there")
    parser.add_argument("--rows-per-step", type=int, help="by default one request and its drafts")
    parser.add_argument("--half-life-tokens", type=int, help="arm adaptive: after which a token counts half")
    parser.add_argument("--min-gain", type=float, help="arm adaptive: by which share a cold page must lead")
    parser.add_argument("--swap-gib-per-s", type=float, help="arm adaptive: of each rank's link, at most")
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--show", action="store_true", help="say what is in the plan")
    options = parser.parse_args(arguments)
    if options.out is None and not options.show:
        parser.error("nothing to do: give --out FILE, --show or both")
    try:
        plan = _create_from(options)
        if options.out is not None:
            save(plan, options.out)
    except (PlanError, ProfileError, ConfigError) as error:
        sys.exit(f"placement.plan: {error}")
    if options.show:
        sys.stdout.writelines(f"{line}\n" for line in describe(plan))


def _create_from(options: argparse.Namespace) -> EnginePlan:
    """The plan that a command line asks for."""
    for name in ("world_size", "ep_size", "staging_slots", "rows_per_step"):
        value, least = getattr(options, name), 0 if name == "staging_slots" else 1
        if value is not None and value < least:
            raise PlanError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    profile = load_profile(options.profile)
    path = options.config / "config.json" if options.config.is_dir() else options.config
    model = CheckpointConfig.load(path).text_config
    layout = ExpertLayout.of(model, options.world_size, options.ep_size or options.world_size)
    num_staging_slots = options.staging_slots
    if num_staging_slots is None:
        num_staging_slots = default_num_staging_slots(layout.page_bytes, layout.largest_layer)
    if options.gpu_budget_gib is not None:
        budget_bytes = _bytes_of("--gpu-budget-gib", options.gpu_budget_gib)
    else:
        offload_bytes = _bytes_of("--offload-gib", options.offload_gib)
        budget_bytes = budget_of_offload(layout, offload_bytes, num_staging_slots)
    return create_plan(
        profile,
        model,
        layout,
        arm=options.arm,
        budget_bytes=budget_bytes,
        num_staging_slots=num_staging_slots,
        num_rows=options.rows_per_step,
        adaptation=_adaptation_from(options),
    )


def _adaptation_from(options: argparse.Namespace) -> AdaptationSettings | None:
    """None if no option is about it."""
    settings = {"half_life_tokens": options.half_life_tokens, "min_gain": options.min_gain}
    if options.swap_gib_per_s is not None:
        rate = _bytes_of("--swap-gib-per-s", options.swap_gib_per_s)
        settings |= {"max_bytes_per_s": rate, "max_burst_bytes": rate}
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        return msgspec.convert(given, AdaptationSettings) if given else None
    except msgspec.ValidationError as error:
        raise PlanError(f"adaptation: {error}") from error


def describe(plan: EnginePlan) -> Iterable[str]:
    """What an operator wants to know about a plan, line by line."""
    layout, memory, expected, basis = plan.layout, plan.memory[0], plan.expected, plan.assumptions
    yield f"model {plan.model_hash}, world size {layout.world_size}, ep size {layout.ep_size}, arm {plan.arm}"
    yield (
        f"each rank: {memory.num_hot_pages} hot pages of {memory.num_pool_pages}, {layout.page_bytes} bytes each: "
        f"{_size(memory.hot_bytes)}, and {plan.num_staging_slots} staging slots: {_size(memory.staging_bytes)}, "
        f"of {_size(plan.budget_bytes)}; host pool: {_size(memory.pool_bytes)}"
    )
    if plan.adaptation is not None:
        yield f"adaptation: {msgspec.json.encode(plan.adaptation.settings).decode()}"
    labels = ", ".join(f"{label}: {num_tokens}" for label, num_tokens in sorted(basis.labels.items()))
    yield f"assumed: {basis.num_tokens} profiled tokens ({labels}), {basis.num_rows} independent rows a step"
    yield (
        f"expected: hit rate {expected.hit_rate:.1%}, {_size(expected.cold_bytes)} cold a step on all ranks, "
        f"{_size(max(expected.cold_bytes_by_rank))} on the busiest"
    )
    for layer, (num_experts, of_layer) in enumerate(
        zip(layout.experts_per_layer, expected.layers, strict=True)
    ):
        num_hot = sum(len(group[layer]) for group in plan.hot_experts)
        rate = "not in the profile" if of_layer.hit_rate is None else f"hit rate {of_layer.hit_rate:.1%}"
        num_cold = of_layer.cold_bytes / (layout.num_slices * layout.page_bytes)
        yield f"  layer {layer}: {num_hot} of {num_experts} hot, {rate}, {num_cold:.2f} cold experts a step"


def _choose(arm: Arm, rates: Rates, max_hot: int) -> HotSet:
    if arm == "layer_offload":
        return offload_layers([len(row) for row in rates], max_hot)
    return hottest(rates, max_hot)


def _rounded(rates: Rates) -> Rates:
    """To six digits: there are thousands of them in the file."""
    return tuple(tuple(float(f"{rate:.6g}") for rate in row) for row in rates)


def _part(rates: Rates, local: Sequence[range]) -> Rates:
    """The rates of an expert group."""
    return tuple(row[ids.start : ids.stop] for row, ids in zip(rates, local, strict=True))


def _part_ids(local: Sequence[range], hot: HotSet) -> HotSet:
    """A group's hot set as expert ids."""
    return tuple(tuple(ids[expert] for expert in experts) for ids, experts in zip(local, hot, strict=True))


def _expect(
    counts: Counts, layout: ExpertLayout, hot: Sequence[HotSet], cold: Sequence[Sequence[float]]
) -> Expectation:
    """What to expect of `hot`, by expert group; `cold` are the cold pages that a step needs, by group and layer."""
    num_hits = [
        sum(row[expert] for group in hot for expert in group[layer]) for layer, row in enumerate(counts)
    ]
    num_slots = [sum(row) for row in counts]
    return Expectation(
        hit_rate=sum(num_hits) / sum(num_slots),
        cold_bytes=layout.num_slices * layout.page_bytes * sum(map(sum, cold)),
        cold_bytes_by_rank=tuple(
            layout.page_bytes * sum(group) for group in cold for _ in range(layout.num_slices)
        ),
        layers=tuple(
            LayerExpectation(
                hit_rate=hits / slots if slots else None,
                cold_bytes=layout.num_slices * layout.page_bytes * sum(pages),
            )
            for hits, slots, pages in zip(num_hits, num_slots, zip(*cold, strict=True), strict=True)
        ),
    )


def _bytes_of(option: str, gib: float) -> int:
    if not (math.isfinite(gib) and gib >= 0):
        raise PlanError(f"{option} must be a number from 0 on, got {gib}")
    return int(gib * 2**30)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f} GiB"


if __name__ == "__main__":
    main()
