"""EnginePlan: the hot sets of all ranks, kept as JSON. `placement.plan` makes it, an engine starts with it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from kernels.formats import PageLayout
from model.config import ModelConfig
from placement.adaptation import AdaptationSettings
from placement.hot_set import HotSet, Rates

VERSION: Final = 1

Arm = Literal["layer_offload", "static", "adaptive"]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PlanError(ValueError):
    """A plan that cannot be made or used: it is malformed, or does not fit the budget, the model or the ranks."""


class ExpertLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the experts of a model are cut over ranks; `model.parallel` says the same of everything that one rank holds.

    Invariant: `check_layout`.
    """

    world_size: _Positive
    ep_size: _Positive
    """Expert groups: rank r is in group `r // num_slices`, and the ranks of a group hold slices of the same experts."""
    experts_per_layer: tuple[_Positive, ...]
    """On all ranks; drafts after the backbone."""
    hidden_size: _Positive
    intermediate_size: _Positive
    """Width of a rank's slice of an expert."""
    page_bytes: _Positive

    @classmethod
    def of(cls, model: ModelConfig, world_size: int, ep_size: int) -> ExpertLayout:
        """Cut a model's experts.

        Args:
            model: its dimensions.
            world_size: ranks, at least 1.
            ep_size: expert groups among them, at least 1.
        Raises: PlanError if it cannot be cut this way.
        """
        width, rest = divmod(model.moe_intermediate_size, max(1, world_size // ep_size))
        if rest:
            raise PlanError(
                f"moe_intermediate_size = {model.moe_intermediate_size} cannot be cut into slices for world_size = "
                f"{world_size} and ep_size = {ep_size}"
            )
        layout = cls(
            world_size=world_size,
            ep_size=ep_size,
            experts_per_layer=tuple(map(model.num_experts_of, range(model.num_layers_with_drafts))),
            hidden_size=model.hidden_size,
            intermediate_size=width,
            page_bytes=_page_bytes(model.hidden_size, width),
        )
        check_layout(layout)
        return layout

    @property
    def num_slices(self) -> int:
        """Ranks that share one expert."""
        return self.world_size // self.ep_size

    @property
    def num_rank_pages(self) -> int:
        """Pages of one rank."""
        return sum(self.experts_per_layer) // self.ep_size

    @property
    def largest_layer(self) -> int:
        """Pages of a rank's largest layer."""
        return max(self.experts_per_layer) // self.ep_size

    def local_experts(self, group: int) -> list[range]:
        """Expert ids that an expert group holds, by layer."""
        return [
            range(group * n // self.ep_size, (group + 1) * n // self.ep_size) for n in self.experts_per_layer
        ]


class RankMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the pages of one rank take."""

    num_hot_pages: _Count
    hot_bytes: _Count
    """On the device, in resident slots."""
    staging_bytes: _Count
    """On the device, in the staging ring."""
    num_pool_pages: _Count
    pool_bytes: _Count
    """In the rank's region of the host pool if that holds every page, without header and checksums."""

    @classmethod
    def of(cls, layout: ExpertLayout, num_hot: int, num_staging_slots: int) -> RankMemory:
        """Memory of a rank with that many hot pages."""
        return cls(
            num_hot_pages=num_hot,
            hot_bytes=num_hot * layout.page_bytes,
            staging_bytes=num_staging_slots * layout.page_bytes,
            num_pool_pages=layout.num_rank_pages,
            pool_bytes=layout.num_rank_pages * layout.page_bytes,
        )


class Adaptation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How hot pages may change places while the engine runs."""

    settings: AdaptationSettings
    rates: tuple[tuple[_Amount, ...], ...]
    """Chance that a row chooses an expert, by layer and expert id, from the profile: what is believed at first."""


class Assumptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the expected numbers rest on."""

    labels: dict[str, _Count]
    """Tokens of the profile, by workload."""
    num_tokens: _Count
    """Of the profile. An expert that none of them chose counts as one that no row chooses."""
    num_rows: _Positive
    """Rows of a step in every layer, drafts included."""
    rows: Literal["independent"]
    """Rows choose experts independently of each other. Those of one request are alike, so they need fewer pages."""


class LayerExpectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer on all ranks."""

    hit_rate: _Share | None
    """Share of routed slots that go to hot pages; None if the profile has none in this layer."""
    cold_bytes: _Amount
    """That cross the links in a step; a page that several rows choose crosses once."""


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the profiled workload is expected to find."""

    hit_rate: _Share
    """Share of all routed slots that go to hot pages."""
    cold_bytes: _Amount
    """That cross the links of all ranks in a step."""
    cold_bytes_by_rank: tuple[_Amount, ...]
    layers: tuple[LayerExpectation, ...]


class EnginePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hot sets of all ranks of an engine. What is in `hot_experts` is hot, every other page is cold.

    Invariant: `check`.
    """

    version: Literal[1]
    model_hash: str
    """The checkpoint's `content_hash`."""
    arm: Arm
    layout: ExpertLayout
    budget_bytes: _Count
    """For expert pages on the device of each rank: hot ones and the staging ring."""
    num_staging_slots: _Count
    """Of each rank."""
    memory: tuple[RankMemory, ...]
    """By rank."""
    hot_experts: tuple[HotSet, ...]
    """Expert ids of the hot experts, by expert group and layer."""
    adaptation: Adaptation | None
    """Of the arm `adaptive`, and of no other."""
    assumptions: Assumptions
    expected: Expectation

    def of_rank(self, rank: int) -> HotSet:
        """The hot set of a rank, as local indices."""
        group = rank // self.layout.num_slices
        return tuple(
            tuple(expert - ids.start for expert in hot)
            for ids, hot in zip(self.layout.local_experts(group), self.hot_experts[group], strict=True)
        )

    def rates_of_rank(self, rank: int) -> Rates | None:
        """The rates of a rank's local experts; None unless the plan adapts."""
        if self.adaptation is None:
            return None
        ids = self.layout.local_experts(rank // self.layout.num_slices)
        return tuple(
            row[local.start : local.stop] for row, local in zip(self.adaptation.rates, ids, strict=True)
        )


def load(path: Path) -> EnginePlan:
    """Read a plan.

    Raises: PlanError that names the file and what is wrong in it.
    """
    try:
        return _decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from error


def save(plan: EnginePlan, path: Path) -> None:
    """Write a plan.

    Raises: PlanError if `load` would refuse it, or the file cannot be written.
    """
    content = msgspec.json.encode(plan) + b"\n"
    try:
        _decode(content)
        path.write_bytes(content)
    except (OSError, msgspec.MsgspecError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from error


def check(plan: EnginePlan) -> None:
    """Assert the invariant: each rank has each of its pages in one place and stays within the budget.

    What other fields repeat of the hot sets must be right too.

    Raises: PlanError that names the field.
    """
    check_layout(plan.layout)
    _check_lengths(plan)
    for group, layers in enumerate(plan.hot_experts):
        for layer, (ids, hot) in enumerate(zip(plan.layout.local_experts(group), layers, strict=True)):
            if not all(expert in ids for expert in hot) or not all(a < b for a, b in pairwise(hot)):
                raise PlanError(
                    f"hot_experts[{group}][{layer}] must ascend within {ids.start} to {ids.stop - 1}, got {hot}"
                )
    for rank, memory in enumerate(plan.memory):
        num_hot = sum(map(len, plan.of_rank(rank)))
        if memory != (taken := RankMemory.of(plan.layout, num_hot, plan.num_staging_slots)):
            raise PlanError(f"memory[{rank}] is {memory}, but the plan takes {taken}")
        if memory.hot_bytes + memory.staging_bytes > plan.budget_bytes:
            raise PlanError(
                f"budget_bytes is {plan.budget_bytes}, but rank {rank} has {memory.hot_bytes} bytes of hot pages "
                f"and {memory.staging_bytes} of staging slots"
            )
    check_adaptation(plan.arm, plan.adaptation)


def check_layout(layout: ExpertLayout) -> None:
    """Assert that all ranks get whole experts, or equal slices of them.

    Raises: PlanError that names the field.
    """
    if layout.world_size % layout.ep_size:
        raise PlanError(f"ep_size = {layout.ep_size} does not divide world_size = {layout.world_size}")
    if not layout.experts_per_layer:
        raise PlanError("experts_per_layer is empty")
    for layer, num_experts in enumerate(layout.experts_per_layer):
        if num_experts % layout.ep_size:
            raise PlanError(
                f"ep_size = {layout.ep_size} does not divide experts_per_layer[{layer}] = {num_experts}"
            )
    page_bytes = _page_bytes(layout.hidden_size, layout.intermediate_size)
    if layout.page_bytes != page_bytes:
        raise PlanError(f"page_bytes is {layout.page_bytes}, but such a page has {page_bytes}")


def check_adaptation(arm: Arm, adaptation: Adaptation | AdaptationSettings | None) -> None:
    """Assert that `adaptation` is there if and only if the arm needs it.

    Raises: PlanError.
    """
    if (adaptation is not None) != (arm == "adaptive"):
        raise PlanError(f"adaptation belongs to the arm adaptive and to no other; the arm is {arm}")


def check_fits(plan: EnginePlan, *, model_hash: str, layout: ExpertLayout, num_staging_slots: int) -> None:
    """Assert that an engine can run with a plan.

    Args:
        plan: a plan that was checked.
        model_hash: the checkpoint's `content_hash`.
        layout: of the engine.
        num_staging_slots: of each rank; 0 if cold pages are not staged.
    Raises: PlanError that names what differs.
    """
    differences = [("model_hash", plan.model_hash, model_hash)]
    differences += [
        (name, getattr(plan.layout, name), getattr(layout, name)) for name in ExpertLayout.__struct_fields__
    ]
    for name, planned, needed in differences:
        if planned != needed:
            raise PlanError(f"the plan is for another engine: {name} is {planned} in it and {needed} here")
    if num_staging_slots > plan.num_staging_slots:
        raise PlanError(
            f"the plan has room for {plan.num_staging_slots} staging slots, but num_staging_slots is "
            f"{num_staging_slots}"
        )


def _decode(content: bytes) -> EnginePlan:
    plan = msgspec.json.decode(content, type=EnginePlan)
    check(plan)
    return plan


def _check_lengths(plan: EnginePlan) -> None:
    layout = plan.layout
    num_layers = len(layout.experts_per_layer)
    for name, num_entries, expected in (
        ("memory", len(plan.memory), layout.world_size),
        ("hot_experts", len(plan.hot_experts), layout.ep_size),
        *((f"hot_experts[{group}]", len(hot), num_layers) for group, hot in enumerate(plan.hot_experts)),
        ("expected.cold_bytes_by_rank", len(plan.expected.cold_bytes_by_rank), layout.world_size),
        ("expected.layers", len(plan.expected.layers), num_layers),
        *(() if plan.adaptation is None else _rate_lengths(layout, plan.adaptation)),
    ):
        if num_entries != expected:
            raise PlanError(f"{name} has {num_entries} entries instead of {expected}")


def _rate_lengths(layout: ExpertLayout, adaptation: Adaptation) -> Iterator[tuple[str, int, int]]:
    yield "adaptation.rates", len(adaptation.rates), len(layout.experts_per_layer)
    for layer, (row, num_experts) in enumerate(zip(adaptation.rates, layout.experts_per_layer, strict=False)):
        yield f"adaptation.rates[{layer}]", len(row), num_experts


def _page_bytes(hidden_size: int, intermediate_size: int) -> int:
    try:
        return PageLayout(hidden_size, intermediate_size).num_bytes
    except ValueError as error:
        raise PlanError(str(error)) from error
