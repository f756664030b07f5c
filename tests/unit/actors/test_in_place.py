"""Layers that are read in place: every address has its page, prefetched or not, and every use is counted once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.config import ShardConfig
from actors.expert_tiers import TieredExpertSource, create_expert_source
from actors.host_pool import MappedPool
from actors.page_uses import LayerUses, PageUses
from kernels.reference.experts import view_memory
from model.expert_source import PageGroup
from placement.plan import PlacementPlan
from tests.unit.actors.builders import (
    FakeCheckpoint,
    create_contents,
    create_pool,
    create_reader,
    map_pool,
    random_page,
)

EXPERTS_PER_LAYER = (6, 3, 9, 4)
CPU = torch.device("cpu")
PLANS = st.tuples(*(st.sets(st.integers(0, n - 1)) for n in EXPERTS_PER_LAYER)).map(
    lambda hot: PlacementPlan(tuple(tuple(sorted(experts)) for experts in hot))
)
OWNER = create_pool(create_contents(EXPERTS_PER_LAYER, rank=1, world_size=2, ep_size=2))
FIRST = EXPERTS_PER_LAYER
"""Global id of local expert 0 on rank 1 of two."""


def create_source(plan: PlacementPlan, num_prefetched: int = 2, **config: object) -> TieredExpertSource:
    prefetch_mib = num_prefetched * OWNER.layout.num_bytes / 2**20
    shard = ShardConfig(staging="direct", prefetch_mib=prefetch_mib, **config)
    return create_expert_source(create_reader(map_pool(OWNER)), plan, shard, CPU)


def assert_holds_all(group: PageGroup, layer: int, pool: MappedPool) -> None:
    assert (list(group.experts), list(group.failed)) == (list(range(EXPERTS_PER_LAYER[layer])), [])
    for expert in group.experts:
        held = view_memory(int(group.addresses[expert]), pool.layout.num_bytes, CPU)
        assert torch.equal(held, random_page(pool.directory.index(layer, expert), pool.layout.num_bytes))


def chosen_experts(choices: list[set[int]]) -> Tensor:
    is_chosen = torch.zeros(len(EXPERTS_PER_LAYER), 2 * max(EXPERTS_PER_LAYER), dtype=torch.bool)
    for layer, experts in enumerate(choices):
        is_chosen[layer, sorted(experts)] = True
    return is_chosen


CHOICES = st.tuples(*(st.sets(st.integers(0, 2 * n - 1)) for n in EXPERTS_PER_LAYER))
STEPS = st.lists(st.tuples(CHOICES, CHOICES), max_size=6)
"""What each layer was predicted to choose, and what it chose, step by step."""


@given(PLANS, STEPS, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_pages_are_right_and_counted_whatever_was_predicted(plan, steps, num_prefetched):
    source, pool = create_source(plan, num_prefetched), map_pool(OWNER)
    hot = cold = useful = wasted = 0
    for predicted, chosen in steps:
        with source.step(1, lambda chosen=chosen: chosen_experts(chosen)):
            brought: set[int] = set()
            for layer, num_local in enumerate(EXPERTS_PER_LAYER):
                group = source.in_place(layer, 1)
                assert group is not None
                used = {e - FIRST[layer] for e in chosen[layer] if e >= FIRST[layer]}
                is_hot = used.intersection(plan.hot_experts[layer])
                hot, cold = hot + len(is_hot), cold + len(used) - len(is_hot)
                useful, wasted = useful + len(brought & used), wasted + len(brought - used)
                brought = set()
                if layer + 1 < len(EXPERTS_PER_LAYER) and source.wants_prediction(layer + 1, 1):
                    first = FIRST[layer + 1]
                    local = {e - first for e in predicted[layer + 1] if e >= first}
                    local.difference_update(plan.hot_experts[layer + 1])
                    brought = set(sorted(local)[:num_prefetched])
                    topk_idx = torch.tensor([sorted(predicted[layer + 1])], dtype=torch.int64)
                    source.predict(layer + 1, topk_idx)
                assert_holds_all(group, layer, pool)
                assert num_local == len(group.experts)
    traffic = source.take_traffic()
    assert (traffic.num_hot, traffic.num_cold) == (hot, cold)
    assert (traffic.num_prefetched_useful, traffic.num_prefetched_wasted) == (useful, wasted)
    assert traffic.direct_bytes == (cold - useful) * pool.layout.num_bytes
    assert traffic.staged_bytes == 0
    source.close()


def test_prefetching_is_tried_in_decode_steps_only_and_not_for_what_is_resident():
    source = create_source(PlacementPlan(((), (0, 1, 2), (), ())))
    nothing = chosen_experts([set()] * 4)
    with source.step(None, lambda: nothing):
        assert not source.wants_prediction(0, 1)
    with source.step(1, lambda: nothing):
        assert [source.wants_prediction(layer, 1) for layer in range(4)] == [True, False, True, True]
    source.close()


def test_without_a_budget_nothing_is_prefetched():
    source = create_source(PlacementPlan(((), (), (), ())), num_prefetched=0)
    with source.step(1, lambda: chosen_experts([set()] * 4)):
        assert not any(source.wants_prediction(layer, 1) for layer in range(4))
    source.close()


@pytest.mark.parametrize("staging", ["auto", "staged"])
def test_a_layer_without_cold_pages_is_read_in_place_by_any_number_of_rows(staging):
    plan = PlacementPlan(((0, 1, 2, 3, 4, 5), (0,), (), (0, 1, 2, 3)))
    source = create_expert_source(create_reader(map_pool(OWNER)), plan, ShardConfig(staging=staging), CPU)
    assert [source.in_place(layer, 8192) is not None for layer in range(4)] == [True, False, False, True]
    source.close()


def test_steps_of_more_rows_than_the_limit_are_staged():
    source = create_source(PlacementPlan(((), (), (), ())))
    source.max_rows_in_place = 16
    assert source.in_place(0, 16) is not None
    assert source.in_place(0, 17) is None
    assert not source.wants_prediction(1, 17)
    source.close()


def test_what_a_staged_step_chose_is_not_counted_with_the_next_one_in_place():
    source = create_source(PlacementPlan(((), (), (), ())), num_prefetched=0)
    chosen = [{FIRST[0]}, {FIRST[0] + 1}]
    since_last: list[set[int]] = []

    def take_chosen() -> Tensor:
        experts = set().union(*since_last)
        since_last.clear()
        return chosen_experts([experts, set(), set(), set()])

    for experts, num_rows in zip(chosen, (17, 1), strict=True):
        source.max_rows_in_place = 16
        with source.step(None, take_chosen):
            since_last.append(experts)
            if source.in_place(0, num_rows) is None:
                list(source.stream(0, [0]))
    traffic = source.take_traffic()
    assert (traffic.num_cold, traffic.direct_bytes) == (2, OWNER.layout.num_bytes)
    source.close()


def test_a_layer_with_a_page_on_disk_or_damaged_is_not_read_in_place():
    owner = create_pool(create_contents(EXPERTS_PER_LAYER))
    owner.page(owner.directory.index(2, 5))[0] ^= 1
    checkpoint = FakeCheckpoint()
    config = ShardConfig(staging="direct")
    plan = PlacementPlan(((), (), (), ()))
    source = create_expert_source(create_reader(map_pool(owner), checkpoint), plan, config, CPU)
    assert [source.in_place(layer, 1) is not None for layer in range(4)] == [True, True, False, True]
    source.close()
    partial = create_pool(create_contents(EXPERTS_PER_LAYER, max_host_pages=21))
    source = create_expert_source(create_reader(map_pool(partial)), plan, config, CPU)
    pages = [
        [partial.directory.index(layer, e) for e in range(n)] for layer, n in enumerate(EXPERTS_PER_LAYER)
    ]
    held = [all(map(partial.holds, layer)) for layer in pages]
    assert not all(held)
    assert [source.in_place(layer, 1) is not None for layer in range(4)] == held
    source.close()


def test_reading_in_place_what_a_gpu_cannot_read_is_refused():
    plan, config = PlacementPlan(((), (), (), ())), ShardConfig(staging="direct")
    with pytest.raises(ValueError, match="direct"):
        create_expert_source(create_reader(map_pool(OWNER)), plan, config, torch.device("cuda"))


@given(st.lists(CHOICES, max_size=5), PLANS, st.lists(st.booleans(), min_size=4, max_size=4))
@settings(deadline=None, max_examples=50)
def test_uses_are_counted_once_a_step_in_the_layers_that_were_read_in_place(steps, plan, layers):
    is_cold = torch.tensor(
        [
            [e < n and e not in plan.hot_experts[layer] for e in range(9)]
            for layer, n in enumerate(EXPERTS_PER_LAYER)
        ]
    )
    uses = PageUses(FIRST, is_cold, EXPERTS_PER_LAYER)
    expected = [[0, 0] for _ in EXPERTS_PER_LAYER]
    for step in steps:
        uses.add(chosen_experts(list(step)), layers, None)
        for layer, experts in enumerate(step):
            for expert in experts:
                if layers[layer] and expert >= FIRST[layer]:
                    expected[layer][bool(is_cold[layer, expert - FIRST[layer]])] += 1
    assert uses.by_layer() == [LayerUses(hot, cold, 0, 0) for hot, cold in expected]
