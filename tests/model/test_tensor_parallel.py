"""Any world size and expert layout gives the results of one rank: exactly in FP64, within a bound in FP32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from model.collectives import Collectives
from model.dspark import Anchor
from model.numerics import Numerics
from model.parallel import ParallelLayout
from model.sampler import greedy
from tests.model.builders import GOLDEN, create_tiny_model

WORLD = 8
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)]
"""Pairs of world size and ep_size."""
TOKENS = [3 + (37 * n * n + 11 * n + 5) % 497 for n in range(40)]
MEAN_KL_BOUND = 2e-3
"""FP32 sums in another order, on a model without discrete choices (spec 13.1)."""
MODES = {
    "fp64": ("wide", GOLDEN),
    # The golden mode rounds each expert's output before the sum over experts; serving sums first.
    "fp64, bf16 experts": ("wide", Numerics(torch.float64, round_index_scores=True)),
    "fp32": ("wide_smooth", Numerics()),
}


def run(
    directory: Path, numerics: Numerics, layout: ParallelLayout, group: dist.ProcessGroup | None
) -> Tensor:
    """Logits of a chunked prefill, and a draft's logits below them."""
    model = create_tiny_model(directory, numerics, layout, Collectives(layout, group))
    logits = model.prefill(TOKENS, splits=(13,))
    anchor = Anchor(0, len(TOKENS) - 1, int(greedy(logits[-1:])))
    return torch.cat((logits, model.dspark.draft([anchor], greedy).logits[0]))


def run_rank(rank: int, store: str, checkpoints: dict[str, Path], out: Path) -> None:
    """One of `WORLD` processes: takes part in every layout that has its rank; rank 0 saves the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    groups = {world: dist.new_group(list(range(world))) for world in sorted({w for w, _ in LAYOUTS})}
    for world, ep_size in LAYOUTS:
        if rank >= world:
            continue
        for number, (variant, numerics) in enumerate(MODES.values()):
            result = run(checkpoints[variant], numerics, ParallelLayout(rank, world, ep_size), groups[world])
            if rank == 0:
                torch.save(result, out / f"{world}-{ep_size}-{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of all layouts."""
    out = tmp_path_factory.mktemp("ranks")
    checkpoints = {variant: tiny_checkpoints[variant] for variant, _ in MODES.values()}
    mp.spawn(run_rank, args=(str(out / "store"), checkpoints, out), nprocs=WORLD)
    return out


@pytest.fixture(scope="module")
def alone(tiny_checkpoints: dict[str, Path]) -> dict[str, Tensor]:
    """What one rank computes, by mode."""
    return {
        mode: run(tiny_checkpoints[variant], numerics, ParallelLayout(), None)
        for mode, (variant, numerics) in MODES.items()
    }


@pytest.mark.parametrize(("world", "ep_size"), LAYOUTS)
@pytest.mark.parametrize("mode", ["fp64", "fp64, bf16 experts"])
def test_fp64_results_do_not_depend_on_the_layout(
    mode: str, world: int, ep_size: int, results: Path, alone: dict[str, Tensor]
) -> None:
    """Equal once rounded to FP32: the FP64 sums themselves are added in another order."""
    together = torch.load(results / f"{world}-{ep_size}-{list(MODES).index(mode)}.pt")
    assert torch.equal(together.to(torch.float32), alone[mode].to(torch.float32))


@pytest.mark.parametrize(("world", "ep_size"), LAYOUTS)
def test_fp32_results_stay_within_the_bound(
    world: int, ep_size: int, results: Path, alone: dict[str, Tensor]
) -> None:
    together = torch.load(results / f"{world}-{ep_size}-{list(MODES).index('fp32')}.pt")
    log_p = alone["fp32"][: len(TOKENS)].to(torch.float64).log_softmax(-1)
    log_q = together[: len(TOKENS)].to(torch.float64).log_softmax(-1)
    mean_kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert mean_kl < MEAN_KL_BOUND, f"{mean_kl=}"
