"""While pages change places, every address holds its page, and every page is hot or cold exactly once."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import page_swaps
from actors.config import ShardConfig
from actors.expert_tiers import TieredExpertSource, create_expert_source
from actors.page_swaps import MAX_SWAPS, PageSwapper, RoutedCounts
from kernels.reference.experts import view_memory
from model.expert_source import PageGroup
from placement.adaptation import AdaptationPolicy, AdaptationSettings
from placement.plan import PlacementPlan
from tests.unit.actors.builders import (
    FakeCheckpoint,
    create_contents,
    create_pool,
    create_reader,
    map_pool,
    random_page,
)
from tests.unit.actors.test_expert_tiers import ScriptedCopier

EXPERTS_PER_LAYER = (6, 3, 9, 4)
NUM_PAGES = sum(EXPERTS_PER_LAYER)
CPU = torch.device("cpu")
OWNER = create_pool(create_contents(EXPERTS_PER_LAYER))
EAGER = AdaptationSettings(
    half_life_tokens=5, min_gain=0, min_sigmas=0, max_bytes_per_s=1e12, max_burst_bytes=1e12
)
PLANS = st.tuples(*(st.sets(st.integers(0, n - 1)) for n in EXPERTS_PER_LAYER)).map(
    lambda hot: PlacementPlan(tuple(tuple(sorted(experts)) for experts in hot))
)
FORWARDS = st.lists(
    st.tuples(*(st.sets(st.integers(0, n - 1)).map(sorted) for n in EXPERTS_PER_LAYER)),
    min_size=1,
    max_size=8,
)


class Rank:
    """An expert source whose hot set follows what the test says was routed."""

    def __init__(
        self, plan, staging, rng, settings=EAGER, pool=OWNER, checkpoint=None, is_movable=None
    ) -> None:
        self.num_hot = plan.num_hot
        self.pool = map_pool(pool)
        shard = ShardConfig(staging=staging, num_staging_slots=4, prefetch_mib=0)
        reader = create_reader(self.pool, checkpoint)
        self.source: TieredExpertSource = create_expert_source(reader, plan, shard, CPU)
        self.copier = ScriptedCopier(rng)
        self.routed = torch.zeros(NUM_PAGES, dtype=torch.int64)
        self.num_tokens = 0
        policy = AdaptationPolicy(
            plan.hot_experts, EXPERTS_PER_LAYER, self.pool.layout.num_bytes, settings, is_movable=is_movable
        )
        counts = RoutedCounts(lambda: self.routed, lambda: self.num_tokens)
        self.time_s = 0.0
        self.swapper = PageSwapper(self.source, policy, counts, self.copier, now=lambda: self.time_s)

    def step(self, forward) -> None:
        for layer, experts in enumerate(forward):
            group = self.source.in_place(layer, 1)
            for shown in [group] if group is not None else self.source.stream(layer, experts):
                self.assert_holds(shown, layer)
                self.copier.progress()
                self.assert_holds(shown, layer)
            for expert in experts:
                self.routed[self.pool.directory.index(layer, expert)] += 1
        self.num_tokens += 1
        self.time_s += 1.0
        self.copier.progress()
        self.swapper.between_steps()

    def assert_holds(self, group: PageGroup, layer: int) -> None:
        for expert in group.experts:
            held = view_memory(int(group.addresses[expert]), self.pool.layout.num_bytes, CPU)
            page = self.pool.directory.index(layer, expert)
            assert torch.equal(held, random_page(page, self.pool.layout.num_bytes)), f"{layer=} {expert=}"

    def num_resident(self) -> int:
        return sum(map(len, self.source.hot_experts()))

    def close(self) -> None:
        self.swapper.close()
        self.source.close()


@given(PLANS, FORWARDS, st.sampled_from(["staged", "direct"]), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_every_address_holds_its_page_while_pages_change_places(plan, forwards, staging, rng):
    page_swaps.STEPS_PER_LOOK, before = 1, page_swaps.STEPS_PER_LOOK
    try:
        rank = Rank(plan, staging, rng)
        for forward in forwards:
            rank.step(forward)
            news = rank.swapper.news()
            assert news.num_swaps_under_way <= MAX_SWAPS
            assert rank.num_resident() + news.num_swaps_under_way == rank.num_hot
        rank.close()
    finally:
        page_swaps.STEPS_PER_LOOK = before


def run_steady(rank: Rank, forward, num_steps: int = 60) -> None:
    for _ in range(num_steps):
        rank.step(forward)


def test_what_is_routed_becomes_hot_and_stays():
    rank = Rank(PlacementPlan(((0, 1), (), (0, 1, 2), ())), "direct", random.Random(0))
    wanted = ([4, 5], [2], [8], [0])
    run_steady(rank, wanted)
    assert [set(w) <= set(h) for w, h in zip(wanted, rank.source.hot_experts(), strict=True)] == [True] * 4
    num_swaps = rank.swapper.news().num_swaps
    run_steady(rank, wanted)
    assert rank.swapper.news().num_swaps == num_swaps == 5
    assert rank.swapper.news().swapped_bytes == 5 * rank.pool.layout.num_bytes
    rank.close()


def test_while_paused_nothing_moves_and_counting_goes_on():
    rank = Rank(PlacementPlan(((0, 1), (), (), ())), "direct", random.Random(0))
    rank.swapper.set_paused(True)
    run_steady(rank, ([4, 5], [], [], []))
    assert rank.source.hot_experts()[0] == (0, 1)
    assert (rank.swapper.news().is_paused, rank.swapper.news().num_tokens) == (True, 48)
    rank.swapper.set_paused(False)
    run_steady(rank, ([4, 5], [], [], []))
    assert rank.source.hot_experts()[0] == (4, 5)
    rank.close()


def test_no_more_bytes_move_than_the_budget_allows():
    page_bytes = OWNER.layout.num_bytes
    slow = AdaptationSettings(5, 0, 0, max_bytes_per_s=page_bytes / 32, max_burst_bytes=page_bytes)
    rank = Rank(PlacementPlan(((0, 1, 2), (), (), ())), "direct", random.Random(0), slow)
    moved = []
    for _ in range(4):
        run_steady(rank, ([3, 4, 5], [], [], []), 32)
        moved.append(rank.swapper.news().num_swaps)
    assert moved == [1, 2, 3, 3]
    rank.close()


def test_a_page_that_is_damaged_never_becomes_hot_and_its_partner_stays():
    owner = create_pool(create_contents(EXPERTS_PER_LAYER))
    owner.page(owner.directory.index(0, 4))[3] ^= 1
    checkpoint = FakeCheckpoint()
    checkpoint.unreadable.add(owner.directory.index(0, 4))
    plan = PlacementPlan(((0,), (), (), ()))
    rank = Rank(plan, "staged", random.Random(0), pool=owner, checkpoint=checkpoint)
    for _ in range(60):
        rank.step(([4], [], [], []))
    assert rank.source.hot_experts()[0] == (0,)
    assert rank.swapper.news().num_swaps == 0
    rank.close()


def test_pages_that_only_the_checkpoint_has_stay_where_they_are():
    is_movable = np.ones(NUM_PAGES, bool)
    is_movable[4] = False
    rank = Rank(PlacementPlan(((0,), (), (), ())), "direct", random.Random(0), is_movable=is_movable)
    run_steady(rank, ([4, 5], [], [], []))
    assert rank.source.hot_experts()[0] == (5,)
    rank.close()
