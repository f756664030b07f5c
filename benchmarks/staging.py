"""What do cold expert pages cost: staged, read in place, or not cold at all?

    python -m benchmarks.staging [--json FILE] [--reload-gib N]

On a GPU: layers of the released model as one rank of eight has them, `ep8` with 48 whole experts, `ep1` with a slice of
each of 384; on a CPU small ones, for the machinery alone. Pages lie in a host pool as the engine makes it, registered
with CUDA, and go through the engine's own expert source. 30 % of every layer's experts are cold. Arms of a case take
turns; a run walks over layers, so that what a slot held for one of them is gone when it comes to that one again:

- `resident`: nothing is cold. `staged`: cold pages are copied into slots ahead of the product. `direct`: read in place.
- `copies`: only the copies of `staged`, all of a layer at once.
- `direct_gap`, `prefetched`: `direct` as a CUDA graph, with 150 us between layers for what else a layer computes,
  without and with a prefetch of the next layer's pages on a prediction of which 71 % is right (design section 10);
  where a page fits in the default of `prefetch_mib`.

Times are for one layer, host included. `overlap` is 1 - (staged - resident) / copies; `times_bound` is the time over
the larger of resident and what the copy ceiling allows for the layer's cold pages. `reload` is what a shard does after
a restart: hot pages from the pool to the GPU, checked. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from actors.config import ShardConfig
from actors.cuda_driver import CudaDriver
from actors.expert_tiers import TieredExpertSource, create_expert_source
from actors.host_pool import HostPool, MappedPool, hot_page_bits
from actors.messages import PoolContents, PoolRegion
from actors.page_directory import PageDirectory
from actors.page_loading import load_pages
from actors.page_reader import PageReader
from actors.pinned_memory import PinnedMemory
from actors.staging import create_copier
from kernels import experts as kernels
from kernels.formats import PageLayout
from kernels.reference import experts as reference
from model.expert_source import PageGroup
from placement.plan import PlacementPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_TOPK, LIMIT = 6, 10.0
COLD_SHARE, RECALL, GAP_US = 0.3, 0.71, 150
NUM_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The layers of one rank of eight."""

    ep_size: int
    hidden_size: int
    intermediate_size: int
    """Of the rank's share of an expert."""
    num_experts: int

    @property
    def num_local(self) -> int:
        """Experts of the rank."""
        return self.num_experts // self.ep_size


SHAPES = (
    [Shape(8, 5120, 2304, 384), Shape(1, 5120, 288, 384)]
    if DEVICE.type == "cuda"
    else [Shape(8, 256, 128, 64), Shape(1, 256, 32, 64)]
)
ROWS = (6, 48, 128, 512, 2048, 8192) if DEVICE.type == "cuda" else (6, 48)


class Layers:
    """NUM_LAYERS layers in a host pool, and the engine's ways to read them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layout = PageLayout(shape.hidden_size, shape.intermediate_size)
        rng = random.Random(0)
        num_hot = shape.num_local - round(COLD_SHARE * shape.num_local)
        hot = [tuple(sorted(rng.sample(range(shape.num_local), num_hot))) for _ in range(NUM_LAYERS)]
        self.plan = PlacementPlan(tuple(hot))
        self.pool = create_pool(shape, self.layout, NUM_LAYERS, self.plan)
        self.mapped = map_pool(self.pool)
        self.pinned = pin(self.mapped)
        self.reader = PageReader(self.mapped, _no_checkpoint)
        everything = PlacementPlan(tuple(tuple(range(shape.num_local)) for _ in range(NUM_LAYERS)))
        create = partial(create_expert_source, self.reader, device=DEVICE, pinned=self.pinned)
        self.resident = create(everything, config=ShardConfig())
        self.staged = create(self.plan, config=ShardConfig(staging="staged"))
        self.direct = create(self.plan, config=ShardConfig(staging="direct"))
        self.copier = create_copier(DEVICE, self.pinned)
        max_cold = shape.num_local - num_hot
        self.copied = torch.empty(max_cold, self.layout.num_bytes, dtype=torch.uint8, device=DEVICE)

    def close(self) -> None:
        """Give up the memory."""
        for source in (self.resident, self.staged, self.direct):
            source.close()
        self.copier.close()
        if self.pinned is not None:
            self.pinned.close()


def _no_checkpoint(out: Tensor, page: int) -> None:
    raise OSError(f"page {page}: there is no checkpoint here")


def create_pool(
    shape: Shape, layout: PageLayout, num_layers: int, plan: PlacementPlan | None = None
) -> HostPool:
    """A complete region of random pages with sensible scales, laid out for a plan as the engine does it."""
    experts_per_layer = (shape.num_local,) * num_layers
    pool = HostPool(
        PoolContents(
            model_hash="benchmark",
            rank=0,
            world_size=8,
            ep_size=shape.ep_size,
            hidden_size=layout.hidden_size,
            intermediate_size=layout.intermediate_size,
            experts_per_layer=experts_per_layer,
            hot_pages=b"" if plan is None else hot_page_bits(plan, PageDirectory(experts_per_layer)),
        )
    )
    for page in range(pool.directory.num_pages):
        content = torch.randint(0, 256, (layout.num_bytes,), dtype=torch.uint8, device=DEVICE)
        for part in (layout.gate_scales, layout.up_scales, layout.down_scales):
            content[part] = torch.randint_like(content[part], 117, 122)
        pool.page(page).copy_(content)
        pool.seal(page)
    pool.complete()
    return pool


def map_pool(pool: HostPool) -> MappedPool:
    """A shard's side of it."""
    return MappedPool(pool.region, pool.region.contents, writable=DEVICE.type == "cuda")


def pin(mapped: MappedPool) -> PinnedMemory | None:
    """Register it with CUDA, if there is one."""
    return PinnedMemory(mapped.pages, CudaDriver()) if DEVICE.type == "cuda" else None


class Case:
    """A number of rows, with a routing for every layer."""

    def __init__(self, layers: Layers, num_rows: int) -> None:
        self.layers = layers
        shape = layers.shape
        self.x = torch.randn(num_rows, shape.hidden_size, device=DEVICE).to(torch.bfloat16)
        self.topk_weights = torch.rand(num_rows, NUM_TOPK, device=DEVICE)
        self.topk_idx = [self._route(num_rows) for _ in range(NUM_LAYERS)]
        self.predicted = [self._predict(topk_idx) for topk_idx in self.topk_idx]
        out_type = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
        self.out = torch.zeros(num_rows, NUM_TOPK, shape.hidden_size, dtype=out_type, device=DEVICE)
        cold = [
            [e for e in self.needed(layer) if e not in layers.plan.hot_experts[layer]]
            for layer in range(NUM_LAYERS)
        ]
        self.cold_pages = [
            [layers.mapped.directory.index(layer, e) for e in experts] for layer, experts in enumerate(cold)
        ]
        self.cold_bytes = sum(map(len, cold)) / NUM_LAYERS * layers.layout.num_bytes
        self.num_needed = sum(len(self.needed(layer)) for layer in range(NUM_LAYERS)) / NUM_LAYERS

    def _route(self, num_rows: int) -> Tensor:
        num_experts = self.layers.shape.num_experts
        # Rows of one sequence agree more than chance has it: 22 of 384 experts for six rows (design section 10).
        num_candidates = (
            min(num_experts, max(NUM_TOPK, round(22 * num_rows / 6))) if num_rows < 100 else num_experts
        )
        candidates = torch.randperm(num_experts, device=DEVICE)[:num_candidates]
        order = torch.rand(num_rows, num_candidates, device=DEVICE).argsort(dim=1)[:, :NUM_TOPK]
        return candidates[order].sort(dim=1).values.contiguous()

    def _predict(self, topk_idx: Tensor) -> Tensor:
        is_right = torch.rand(topk_idx.shape, device=DEVICE) < RECALL
        return torch.where(is_right, topk_idx, torch.randint_like(topk_idx, self.layers.shape.num_experts))

    def needed(self, layer: int) -> list[int]:
        """Local experts that a layer's rows choose; waits for the device."""
        return [e for e in torch.unique(self.topk_idx[layer]).tolist() if e < self.layers.shape.num_local]

    def resident(self) -> None:
        """Arm."""
        for layer in range(NUM_LAYERS):
            self._multiply(layer, self._in_place(self.layers.resident, layer))

    def staged(self) -> None:
        """Arm."""
        for layer in range(NUM_LAYERS):
            for group in self.layers.staged.stream(layer, self.needed(layer)):
                self._multiply(layer, group)

    def direct(self) -> None:
        """Arm."""
        for layer in range(NUM_LAYERS):
            self._multiply(layer, self._in_place(self.layers.direct, layer))

    def direct_gap(self) -> None:
        """Arm."""
        for layer in range(NUM_LAYERS):
            self._multiply(layer, self._in_place(self.layers.direct, layer))
            sleep()

    def prefetched(self) -> None:
        """Arm."""
        for layer in range(NUM_LAYERS):
            group = self._in_place(self.layers.direct, layer)
            if layer + 1 < NUM_LAYERS:
                self.layers.direct.predict(layer + 1, self.predicted[layer + 1])
            self._multiply(layer, group)
            sleep()

    def copies(self) -> None:
        """Arm."""
        for pages in self.cold_pages:
            targets = self.layers.copied[: len(pages)].unbind()
            reads = [partial(self.layers.reader.read, page) for page in pages]
            for copy in self.layers.copier.start(reads, targets):
                copy.join()

    def _in_place(self, source: TieredExpertSource, layer: int) -> PageGroup:
        group = source.in_place(layer, len(self.x))
        assert group is not None, f"{layer=}"
        return group

    def _multiply(self, layer: int, group: PageGroup) -> None:
        shape = self.layers.shape
        routing = (self.topk_idx[layer], self.topk_weights, group.addresses)
        if DEVICE.type == "cuda":
            kernels.expert_mlp(
                *(self.x, *routing, group.is_member, 0, self.layers.layout, self.out),
                num_experts=shape.num_experts,
                limit=LIMIT,
            )
        else:
            reference.expert_mlp(
                *(self.x, *routing, group.experts, 0, self.layers.layout, self.out),
                limit=LIMIT,
                quantize_activations=False,
            )


def sleep() -> None:
    """What else a layer computes."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(int(GAP_US * cycles_per_us()))


@cache
def cycles_per_us() -> float:
    """Of the GPU's clock, as it runs now."""
    num_cycles = 10_000_000
    return (
        num_cycles
        / statistics.median(elapsed_s(lambda: torch.cuda._sleep(num_cycles)) for _ in range(5))
        / 1e6
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--reload-gib", type=float, default=8.0 if DEVICE.type == "cuda" else 0.01)
    options = parser.parse_args()
    torch.manual_seed(0)
    ceiling = copy_ceiling()
    record: dict[str, object] = {
        "command": "python -m benchmarks.staging",
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cold_share": COLD_SHARE,
        "layers": NUM_LAYERS,
        "gap_us": GAP_US,
        "recall": RECALL,
        "copy_ceiling_gb_per_s": round(ceiling, 2),
        "reload": [measure_reload(shape, options.reload_gib) for shape in SHAPES],
    }
    results: list[dict[str, object]] = []
    for shape in SHAPES:
        layers = Layers(shape)
        for num_rows in ROWS:
            results += measure(Case(layers, num_rows), options.rounds, ceiling)
        layers.close()
        del layers
    record["results"] = results
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


def copy_ceiling() -> float:
    """GB/s of one large copy from pinned memory (CPU: within memory)."""
    size = 2**30 if DEVICE.type == "cuda" else 2**26
    host = torch.empty(size, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda").zero_()
    target = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    return (
        size
        / statistics.median(elapsed_s(lambda: target.copy_(host, non_blocking=True)) for _ in range(7))
        / 1e9
    )


def measure_reload(shape: Shape, gib: float) -> dict[str, object]:
    """What a shard does before its first step, in a new process after another one was killed."""
    layout = PageLayout(shape.hidden_size, shape.intermediate_size)
    num_layers = max(1, round(gib * 2**30 / layout.num_bytes / shape.num_local))
    pool = create_pool(shape, layout, num_layers)
    context = multiprocessing.get_context("spawn")
    runs: list[dict[str, float]] = []
    for _ in range(4):
        results: multiprocessing.SimpleQueue[dict[str, float]] = context.SimpleQueue()
        shard = context.Process(target=load_as_a_shard, args=(pool.region, results))
        shard.start()
        runs.append(results.get())
        shard.kill()
        shard.join()
    pool.close()
    return {
        "ep_size": shape.ep_size,
        "gib": round(runs[0]["gib"], 2),
        "register_s": [round(run["register_s"], 3) for run in runs[1:]],
        "load_s": [round(run["load_s"], 3) for run in runs[1:]],
        "gb_per_s": [round(run["gib"] * 2**30 / 1e9 / run["load_s"], 1) for run in runs[1:]],
    }


def load_as_a_shard(region: PoolRegion, results: multiprocessing.SimpleQueue[dict[str, float]]) -> None:
    """Map the pool, register it, load and check all of its pages, and wait for the end."""
    if DEVICE.type == "cuda":
        torch.zeros(1, device=DEVICE)
    mapped = MappedPool(region, region.contents, writable=DEVICE.type == "cuda")
    start = time.perf_counter()
    pinned = pin(mapped)
    registered = time.perf_counter()
    copier = create_copier(DEVICE, pinned)
    loaded = load_pages(PageReader(mapped, _no_checkpoint), range(mapped.directory.num_pages), copier, DEVICE)
    synchronize()
    end = time.perf_counter()
    results.put({"gib": loaded.nbytes / 2**30, "register_s": registered - start, "load_s": end - registered})
    signal.pause()
    del pinned


def measure(case: Case, rounds: int, ceiling: float) -> list[dict[str, object]]:
    """All arms of a case, in turns; `ceiling` in GB/s."""
    arms: dict[str, Callable[[], None]] = {
        "resident": case.resident,
        "staged": case.staged,
        "direct": case.direct,
        "copies": case.copies,
    }
    if DEVICE.type == "cuda" and case.layers.direct.prefetches and len(case.x) <= 128:
        arms |= {"direct_gap": capture(case.direct_gap), "prefetched": capture(case.prefetched)}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds + 1):
        for name, run in arms.items():
            elapsed = elapsed_s(run) / NUM_LAYERS
            if round_ > 0:  # the first one warms up
                times[name].append(1e6 * elapsed)
    median = {name: statistics.median(values) for name, values in times.items()}
    bound = max(median["resident"], case.cold_bytes / ceiling / 1e3)
    common = {
        "ep_size": case.layers.shape.ep_size,
        "rows": len(case.x),
        "needed_pages": round(case.num_needed, 1),
        "cold_mb": round(case.cold_bytes / 1e6, 1),
    }
    records: list[dict[str, object]] = []
    for name, values in times.items():
        extra: dict[str, object] = {}
        if name == "staged" and case.cold_bytes:
            extra["overlap"] = round(1 - (median["staged"] - median["resident"]) / median["copies"], 3)
        if name == "copies" and case.cold_bytes:
            rate = case.cold_bytes / median["copies"] / 1e3
            extra |= {"gb_per_s": round(rate, 1), "share_of_ceiling": round(rate / ceiling, 3)}
        records.append(
            common
            | {"arm": name, "median_us": round(median[name], 1), "min_us": round(min(values), 1)}
            | {"max_us": round(max(values), 1), "times_bound": round(median[name] / bound, 3)}
            | extra
        )
    return records


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of what the arm launches."""
    run()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def elapsed_s(run: Callable[[], object]) -> float:
    """Seconds until the device is done, too."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
