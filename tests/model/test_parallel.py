"""The cut over ranks as arithmetic, and sums and gathers over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from model.collectives import Collectives
from model.config import CheckpointConfig, ModelConfig
from model.parallel import ParallelLayout

RELEASED_CONFIG = Path(__file__).parent.parent / "data" / "released_config.json"
CUTS = [(world, ep) for world in (1, 2, 4, 6, 8) for ep in (1, 2, 3, 4, 6, 8) if world % ep == 0]


def create_config(**changes: int) -> ModelConfig:
    """The released model with other dimensions."""
    return CheckpointConfig.load(RELEASED_CONFIG).text_config.model_copy(update=changes)


def all_ranks(world_size: int, ep_size: int = 1) -> list[ParallelLayout]:
    return [ParallelLayout(rank, world_size, ep_size) for rank in range(world_size)]


@pytest.mark.parametrize(("world_size", "ep_size"), CUTS)
def test_every_element_of_a_cut_dimension_has_one_rank(world_size: int, ep_size: int) -> None:
    parts = [layout.shard(48) for layout in all_ranks(world_size, ep_size)]
    assert [n for part in parts for n in range(48)[part]] == list(range(48))
    assert {part.stop - part.start for part in parts} == {48 // world_size}


@pytest.mark.parametrize(("world_size", "ep_size"), CUTS)
def test_every_column_of_every_expert_has_one_rank(world_size: int, ep_size: int) -> None:
    held = [
        (expert, column)
        for layout in all_ranks(world_size, ep_size)
        for expert in layout.local_experts(24)
        for column in range(96)[layout.expert_slice(96)]
    ]
    assert sorted(held) == [(expert, column) for expert in range(24) for column in range(96)]


@pytest.mark.parametrize(("world_size", "ep_size"), CUTS)
def test_ranks_of_one_expert_group_are_consecutive(world_size: int, ep_size: int) -> None:
    layouts = all_ranks(world_size, ep_size)
    num_slices = world_size // ep_size
    expected = [(group, part) for group in range(ep_size) for part in range(num_slices)]
    assert [(layout.ep_rank, layout.slice_rank) for layout in layouts] == expected
    assert {layout.num_slices for layout in layouts} == {num_slices}


def test_rank_five_of_eight_in_four_groups_holds_the_second_half_of_the_third_quarter() -> None:
    layout = ParallelLayout(rank=5, world_size=8, ep_size=4)
    assert layout.local_experts(384) == range(192, 288)
    assert layout.expert_slice(2304) == slice(1152, 2304)
    assert layout.shard(64) == slice(40, 48)


def test_one_rank_holds_everything() -> None:
    layout = ParallelLayout()
    assert (layout.shard(7), layout.local_experts(7), layout.expert_slice(7)) == (
        slice(0, 7),
        range(7),
        slice(0, 7),
    )
    layout.check(create_config())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 8, "ep_size": 3}, "ep_size 3 does not divide world_size 8"),
        ({"world_size": 2, "ep_size": 4}, "ep_size 4 does not divide world_size 2"),
        ({"rank": 2, "world_size": 2}, "rank 2 is outside world_size 2"),
        ({"rank": -1, "world_size": 2}, "rank -1 is outside world_size 2"),
    ],
)
def test_an_impossible_layout_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelLayout(**arguments)


def test_a_dimension_that_does_not_divide_is_not_cut() -> None:
    with pytest.raises(ValueError, match="10 cannot be cut into 4 equal parts"):
        ParallelLayout(rank=1, world_size=4).shard(10)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_released_model_can_be_cut_over_the_ranks_of_a_machine(world_size: int) -> None:
    for ep_size in (1, 2, 4, 8):
        if world_size % ep_size == 0:
            for layout in all_ranks(world_size, ep_size):
                layout.check(create_config())


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"num_attention_heads": 60}, ParallelLayout(0, 8), "num_attention_heads = 60 .* 8 parts"),
        ({"o_groups": 4}, ParallelLayout(0, 8), "o_groups = 4 .* 8 parts"),
        ({"vocab_size": 129281}, ParallelLayout(0, 2), "vocab_size = 129281 .* 2 parts"),
        (
            {"moe_intermediate_size": 2208},
            ParallelLayout(0, 2),
            "moe_intermediate_size = 2208 .* multiple of 32",
        ),
        ({"n_routed_experts": 100}, ParallelLayout(0, 8, 8), "n_routed_experts = 100 .* 8 parts"),
        ({"engram_n_heads": 3}, ParallelLayout(0, 2), "Engram look-ups = 9 .* 2 parts"),
        ({"dspark_n_routed_experts": 12}, ParallelLayout(0, 8, 8), "dspark_n_routed_experts = 12 .* 8 parts"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_the_name_of_the_dimension(
    changes: dict[str, int], layout: ParallelLayout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layout.check(create_config(**changes))


def test_one_rank_keeps_what_it_has() -> None:
    collectives = Collectives(ParallelLayout())
    x = torch.randn(2, 3)
    assert collectives.all_reduce(x) is x
    assert collectives.all_gather_last(x) is x


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(ValueError, match="world_size 2 needs a process group"):
        Collectives(ParallelLayout(0, 2))


MAX_WORLD = 4
WORLDS = (2, 4)
# In FP32 the sum depends on the order: only from left to right these give 1 over four ranks.
ADDENDS = (1e8, 1.0, -1e8, 1.0)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def part_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What one rank brings: `[3, 5, 4]`."""
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(rank)).to(dtype)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def run_rank(rank: int, store: str, out: Path) -> None:
    """One of `MAX_WORLD` processes: takes part in every world that has its rank and saves what it gets."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=MAX_WORLD)
    groups = {world: dist.new_group(list(range(world))) for world in WORLDS}
    for world in WORLDS:
        if rank >= world:
            continue
        collectives = Collectives(ParallelLayout(rank, world), groups[world])
        x = part_of(rank)
        results = {
            "addends": collectives.all_reduce(torch.tensor([ADDENDS[rank]])),
            "transposed sum": collectives.all_reduce(x.transpose(0, 2)),
            "row of sum": collectives.all_reduce(x[1:2]),
            "no rows": collectives.all_reduce(x[:0]),
            "gathered": collectives.all_gather_last(x),
            "transposed gathered": collectives.all_gather_last(x.transpose(0, 2)),
            "no rows gathered": collectives.all_gather_last(x[:0]),
            "input": x,
        }
        for dtype in DTYPES:
            results[f"sum {dtype}"] = collectives.all_reduce(part_of(rank, dtype))
        torch.save(results, out / f"{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Tensor]]]:
    """What each rank of each world got."""
    out = tmp_path_factory.mktemp("ranks")
    mp.spawn(run_rank, args=(str(out / "store"), out), nprocs=MAX_WORLD)
    return {world: [torch.load(out / f"{world}-{rank}.pt") for rank in range(world)] for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
def test_sums_are_added_in_rank_order_and_equal_on_every_rank(
    world: int, results: dict[int, list[dict[str, Tensor]]]
) -> None:
    for of_rank in results[world]:
        for dtype in DTYPES:
            expected = in_rank_order([part_of(rank, dtype) for rank in range(world)])
            assert of_rank[f"sum {dtype}"].dtype == dtype
            assert torch.equal(of_rank[f"sum {dtype}"], expected)
        assert torch.equal(of_rank["addends"], in_rank_order([torch.tensor([a]) for a in ADDENDS[:world]]))
    assert in_rank_order([torch.tensor([a]) for a in ADDENDS]).item() == 1


@pytest.mark.parametrize("world", WORLDS)
def test_a_row_of_a_sum_does_not_depend_on_the_rows_beside_it(
    world: int, results: dict[int, list[dict[str, Tensor]]]
) -> None:
    for of_rank in results[world]:
        whole = of_rank[f"sum {torch.float32}"]
        assert torch.equal(of_rank["row of sum"], whole[1:2])
        assert torch.equal(of_rank["transposed sum"], whole.transpose(0, 2))
        assert of_rank["no rows"].shape == (0, 5, 4)


@pytest.mark.parametrize("world", WORLDS)
def test_parts_are_joined_along_the_last_axis_in_rank_order(
    world: int, results: dict[int, list[dict[str, Tensor]]]
) -> None:
    parts = [part_of(rank) for rank in range(world)]
    for of_rank in results[world]:
        assert torch.equal(of_rank["gathered"], torch.cat(parts, dim=-1))
        transposed = torch.cat([part.transpose(0, 2) for part in parts], dim=-1)
        assert torch.equal(of_rank["transposed gathered"], transposed)
        assert of_rank["no rows gathered"].shape == (0, 5, 4 * world)


def test_what_a_rank_brings_is_not_changed(results: dict[int, list[dict[str, Tensor]]]) -> None:
    for world in WORLDS:
        for rank, of_rank in enumerate(results[world]):
            assert torch.equal(of_rank["input"], part_of(rank))
