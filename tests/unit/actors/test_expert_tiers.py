"""Cold path = hot path, in whatever order copies finish: no slot is read early, late or under another
page."""

import functools
import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.config import ShardConfig
from actors.expert_tiers import TieredExpertSource, create_expert_source
from actors.group_stream import split_groups
from actors.host_pool import HostPool, MappedPool
from actors.in_place import InPlaceLayers
from actors.page_loading import load_pages
from actors.staging import ColdPages, DirectPages, Fetched, StagedPages, ThreadCopier
from kernels.reference.experts import view_memory
from model.expert_source import ExpertPageError, PageGroup
from placement.plan import PlacementPlan, spread_evenly
from tests.unit.actors.builders import (
    FakeCheckpoint,
    create_contents,
    create_pool,
    create_reader,
    map_pool,
    random_page,
)

EXPERTS_PER_LAYER = (6, 1, 9, 4)
ALL_EXPERTS = [list(range(count)) for count in EXPERTS_PER_LAYER]
NOTHING_HOT = PlacementPlan(tuple(() for _ in EXPERTS_PER_LAYER))
CPU = torch.device("cpu")


@functools.cache
def shared_pool(max_host_pages: int | None = None) -> HostPool:
    return create_pool(create_contents(EXPERTS_PER_LAYER, max_host_pages=max_host_pages))


class ScriptedCopier:
    """Spoils a target when its copy starts and fills it at a random moment, the last one being `join`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._under_way: list[ScriptedCopy] = []

    def start(self, reads: Sequence[Callable[[], Tensor]], targets: Sequence[Tensor]) -> "list[ScriptedCopy]":
        return [self._start(read(), target) for read, target in zip(reads, targets, strict=True)]

    def _start(self, source: Tensor, target: Tensor) -> "ScriptedCopy":
        assert source.data_ptr() not in {copy.source.data_ptr() for copy in self._under_way}, "fetched twice"
        target.fill_(0xEE)
        copy = ScriptedCopy(self, source, target)
        self._under_way.append(copy)
        return copy

    def close(self) -> None:
        self.progress()

    def progress(self) -> None:
        """Finish some copies, in any order."""
        for copy in self._rng.sample(self._under_way, self._rng.randint(0, len(self._under_way))):
            self.finish(copy)

    def finish(self, copy: "ScriptedCopy") -> None:
        if copy in self._under_way:
            copy.target.copy_(copy.source)
            self._under_way.remove(copy)


class ScriptedCopy:
    def __init__(self, copier: ScriptedCopier, source: Tensor, target: Tensor) -> None:
        self.source = source
        self.target = target
        self._copier = copier

    def is_done(self) -> bool:
        return self not in self._copier._under_way

    def join(self) -> None:
        self._copier.finish(self)


def create_source(cold: ColdPages, plan: PlacementPlan, pool: MappedPool) -> TieredExpertSource:
    copier, pages = ThreadCopier(), create_reader(pool)
    hot = [pages.directory.index(layer, e) for layer, hot in enumerate(plan.hot_experts) for e in hot]
    resident = load_pages(pages, hot, copier, CPU)
    copier.close()
    in_place = InPlaceLayers(pages, CPU, can_read_pool=False)
    return TieredExpertSource(pages, plan, resident, cold, in_place)


def create_staged_pages(
    pool: MappedPool, copier: ScriptedCopier | ThreadCopier, num_slots: int
) -> StagedPages:
    memory = torch.full((num_slots, pool.layout.num_bytes), 0xDD, dtype=torch.uint8)
    return StagedPages(memory, pool.read, copier)


def assert_group_holds_its_pages(group: PageGroup, layer: int, pool: MappedPool) -> None:
    for expert in group.experts:
        held = view_memory(int(group.addresses[expert]), pool.layout.num_bytes, CPU)
        expected = random_page(pool.directory.index(layer, expert), pool.layout.num_bytes)
        assert torch.equal(held, expected), f"{layer=} {expert=}"


PLANS = st.tuples(*(st.sets(st.sampled_from(experts)) for experts in ALL_EXPERTS)).map(
    lambda hot: PlacementPlan(tuple(tuple(sorted(experts)) for experts in hot))
)
FORWARDS = st.lists(
    st.tuples(*(st.just(experts) | st.sets(st.sampled_from(experts)).map(sorted) for experts in ALL_EXPERTS)),
    max_size=4,
)
"""Layers that need all of their experts, as in a prefill, and others."""


@given(PLANS, FORWARDS, st.integers(2, 7), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_every_group_holds_its_pages_while_copies_finish_in_any_order(plan, forwards, num_slots, rng):
    pool = map_pool(shared_pool())
    copier = ScriptedCopier(rng)
    staged = create_staged_pages(pool, copier, num_slots)
    source = create_source(staged, plan, pool)
    for forward in forwards:
        for layer, experts in enumerate(forward):
            streamed: list[int] = []
            for group in source.stream(layer, experts):
                assert_group_holds_its_pages(group, layer, pool)
                copier.progress()
                assert_group_holds_its_pages(group, layer, pool)
                streamed += group.experts
            assert sorted(streamed) == experts
            staged.check_integrity()


@given(PLANS, FORWARDS, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_a_stream_that_is_abandoned_leaves_the_slots_to_the_next_one(plan, forwards, rng):
    pool = map_pool(shared_pool())
    copier = ScriptedCopier(rng)
    staged = create_staged_pages(pool, copier, num_slots=2)
    source = create_source(staged, plan, pool)
    streams = []  # as a traceback would, keep them from ending when they are dropped
    for forward in forwards:
        for layer, experts in enumerate(forward):
            streams.append(source.stream(layer, experts))
            for group in streams[-1]:
                assert_group_holds_its_pages(group, layer, pool)
                if rng.random() < 0.5:
                    break
    for group in source.stream(2, ALL_EXPERTS[2]):
        assert_group_holds_its_pages(group, 2, pool)
    staged.check_integrity()


@given(
    PLANS,
    FORWARDS,
    st.sampled_from(["staged", "direct"]),
    st.integers(2, 7),
    st.sampled_from([None, 0, 7, 13]),
)
@settings(max_examples=60, deadline=None)
def test_no_tier_changes_what_is_read(plan, forwards, staging, num_staging_slots, max_host_pages):
    pool = map_pool(shared_pool(max_host_pages))
    config = ShardConfig(staging=staging, num_staging_slots=num_staging_slots)
    source = create_expert_source(create_reader(pool), plan, config, CPU)
    for forward in forwards:
        for layer, experts in enumerate(forward):
            groups = source.stream(layer, experts)
            streamed = [(assert_group_holds_its_pages(g, layer, pool), *g.experts)[1:] for g in groups]
            assert sorted(expert for group in streamed for expert in group) == experts
    source.close()


def test_traffic_counts_hot_and_cold_uses_and_copied_bytes_once():
    pool = map_pool(shared_pool())
    plan = spread_evenly(EXPERTS_PER_LAYER, 10)
    source = create_expert_source(create_reader(pool), plan, ShardConfig(), CPU)
    assert [list(group.experts) for group in source.stream(0, [0, 2, 3, 4])] == [[0, 2], [3, 4]]
    traffic = source.take_traffic()
    assert (traffic.num_hot, traffic.num_cold) == (2, 2)
    assert traffic.staged_bytes == 2 * pool.layout.num_bytes
    list(source.stream(0, [3]))
    again = source.take_traffic()
    assert (again.num_hot, again.num_cold, again.staged_bytes) == (0, 1, 0)
    assert traffic.num_disk_reads == again.num_disk_reads == 0
    source.close()


def test_traffic_counts_what_was_read_from_the_checkpoint():
    pool = map_pool(shared_pool(13))
    on_disk = [e for e in ALL_EXPERTS[0] if not pool.holds(pool.directory.index(0, e))]
    assert len(on_disk) == 3
    source = create_expert_source(create_reader(pool), NOTHING_HOT, ShardConfig(), CPU)
    list(source.stream(0, ALL_EXPERTS[0]))
    assert source.take_traffic().num_disk_reads == 3
    list(source.stream(2, [8]))
    assert source.take_traffic().num_disk_reads == 0
    assert [layer.num_disk_reads for layer in source.traffic_by_layer()] == [3, 0, 0, 0]
    assert [layer.num_cold for layer in source.traffic_by_layer()] == [6, 0, 1, 0]
    source.close()


def test_a_layer_that_needs_every_page_is_followed_by_pages_of_the_next_one_in_every_free_slot():
    pool, rng = map_pool(shared_pool()), random.Random(0)
    copier = ScriptedCopier(rng)
    source = create_source(create_staged_pages(pool, copier, num_slots=6), NOTHING_HOT, pool)

    def copied() -> list[int]:
        return [layer.staged_bytes // pool.layout.num_bytes for layer in source.traffic_by_layer()]

    list(source.stream(0, ALL_EXPERTS[0]))
    list(source.stream(2, ALL_EXPERTS[2]))
    assert copied() == [6, 0, 9, 0]
    list(source.stream(0, ALL_EXPERTS[0]))
    assert copied()[2] == 9 + 6, "what came after layer 0 last time"
    for group in source.stream(2, ALL_EXPERTS[2]):
        assert_group_holds_its_pages(group, 2, pool)
    assert copied()[2] == 9 + 9
    list(source.stream(0, ALL_EXPERTS[0]))
    streamed = [e for group in source.stream(3, ALL_EXPERTS[3]) for e in group.experts]
    assert streamed == ALL_EXPERTS[3], "another layer than last time"
    source.close()


def test_a_layer_that_needs_few_pages_brings_none_of_the_next_one():
    pool = map_pool(shared_pool())
    source = create_source(
        create_staged_pages(pool, ScriptedCopier(random.Random(0)), num_slots=9), NOTHING_HOT, pool
    )
    for _ in range(3):
        list(source.stream(0, [0, 4]))
        list(source.stream(2, [1]))
    traffic = source.take_traffic()
    assert traffic.staged_bytes <= 3 * 3 * pool.layout.num_bytes
    source.close()


class GatedPool:
    """Reads of the pool that wait until the test lets them go."""

    def __init__(self, pool: MappedPool) -> None:
        self._pool = pool
        self.gate = threading.Event()
        self.started = threading.Event()

    def read(self, page: int) -> Tensor:
        self.started.set()
        assert self.gate.wait(20)
        return self._pool.read(page)


def test_cold_pages_are_copied_while_the_hot_ones_before_them_compute():
    pool = map_pool(shared_pool())
    gated, copier = GatedPool(pool), ThreadCopier()
    memory = torch.empty(2, pool.layout.num_bytes, dtype=torch.uint8)
    plan = PlacementPlan(((0, 1), (), (), ()))
    source = create_source(StagedPages(memory, gated.read, copier), plan, pool)
    stream = source.stream(0, [0, 1, 2])
    assert list(next(stream).experts) == [0, 1]
    assert gated.started.wait(20)
    gated.gate.set()
    assert_group_holds_its_pages(next(stream), 0, pool)
    copier.close()


@pytest.mark.parametrize("staging", ["staged", "direct"])
def test_a_lost_cold_page_is_reported_as_failed_and_no_other_is(staging):
    owner = create_pool(create_contents(EXPERTS_PER_LAYER))
    page = owner.directory.index(2, 5)
    owner.page(page)[0] ^= 1
    checkpoint = FakeCheckpoint()
    checkpoint.unreadable.add(page)
    pool = map_pool(owner)
    config = ShardConfig(staging=staging, num_staging_slots=4)
    source = create_expert_source(create_reader(pool, checkpoint), NOTHING_HOT, config, CPU)
    for _ in range(3):
        failed = []
        for layer in (0, 2, 3):
            for group in source.stream(layer, ALL_EXPERTS[layer]):
                assert_group_holds_its_pages(group, layer, pool)
                failed += [(layer, expert) for expert in group.failed]
        assert failed == [(2, 5)]
        (message,) = source.take_failures()
        assert "layer 2, expert 5" in message
    source.close()


def test_a_lost_hot_page_is_found_at_start():
    owner = create_pool(create_contents(EXPERTS_PER_LAYER))
    owner.page(0)[0] ^= 1
    checkpoint = FakeCheckpoint()
    checkpoint.damaged.add(0)
    pages = create_reader(map_pool(owner), checkpoint)
    with pytest.raises(ExpertPageError, match="layer 0, expert 0"):
        create_expert_source(pages, spread_evenly(EXPERTS_PER_LAYER, None), ShardConfig(), CPU)


@given(st.sets(st.integers(0, 30)).map(sorted), st.sets(st.integers(0, 30)), st.integers(1, 5))
@settings(deadline=None)
def test_hot_experts_are_one_group_and_cold_ones_fill_those_that_follow(experts, hot, max_cold):
    groups = split_groups(experts, hot, max_cold)
    first = [expert for expert in experts if expert in hot]
    assert not first or (list(groups[0].experts), groups[0].cold) == (first, ())
    rest = groups[1:] if first else groups
    assert [expert for group in rest for expert in group.cold] == [e for e in experts if e not in hot]
    assert all(group.experts == group.cold for group in rest)
    assert all(len(group.cold) == max_cold for group in rest[:-1])
    assert not rest or 0 < len(rest[-1].cold) <= max_cold


def test_direct_pages_are_addressed_in_the_pool_itself():
    pool = map_pool(shared_pool())
    direct = DirectPages(pool.read, pool.directory.num_pages)
    assert direct.fetch([7]) == Fetched()
    assert direct.join(7) == pool.pages[7].data_ptr()
