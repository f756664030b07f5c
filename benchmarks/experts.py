"""How fast are the expert kernels, next to what the memory and two plain alternatives allow?

    python -m benchmarks.experts [--json FILE]

Needs a GPU. One MoE layer of the released model, as one rank of eight has it: `ep8` with 48 whole experts, `ep1` with a
slice of each of 384. For several numbers of rows a step, the routed product with its grouping and its sum over choices:

- `resident`: pages in GPU memory. `mapped`: read in place from pinned host memory. `staged`: copied by the copy
  engine to GPU memory, eight pages ahead of the product that reads them.
- `bf16`: the same weights as BF16 in GPU memory, sorted rows and `torch.nn.functional.grouped_mm`.
- `dequantize`: pages in GPU memory, dequantised in each step to what `bf16` then multiplies.

All but `staged` and `dequantize` are replays of a CUDA graph that walks over as many routings as make the pages
exceed the L2 cache. The arms of a case take turns; times are for one layer. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from kernels.expert_rows import combine
from kernels.experts import expert_mlp
from kernels.formats import PageLayout
from kernels.reference.expert_pages import load_codes, load_scales
from kernels.reference.quantize import dequantize_mxfp4

HIDDEN, INTER, NUM_EXPERTS, NUM_TOPK, LIMIT = 5120, 2304, 384, 6, 10.0
DEVICE = torch.device("cuda")
STAGED_GROUP = 8
"""Pages of one copy and of one product of the `staged` arm."""
BYTES_TO_ROTATE = 1000 * 2**20
"""Pages that a graph reads at least: twenty times the L2 cache of an H200."""

CEILING_OF_ARM = {"resident": "hbm_read", "mapped": "pcie_copy", "staged": "pcie_copy"}
"""Which bandwidth bounds an arm's page bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    ep_size: int
    num_rows: int
    num_candidates: int
    """Experts that the routing chooses from, on all ranks."""
    num_local_candidates: int
    """Of them on this rank."""


CASES = [
    *(Case(8, 1, 6, 5), Case(8, 6, 22, 5), Case(8, 8, 48, 48), Case(8, 48, 384, 48)),
    *(Case(8, 48, 48, 48), Case(8, 128, 384, 48)),
    *(Case(8, 512, 384, 48), Case(8, 2048, 384, 48), Case(8, 8192, 384, 48)),
    *(Case(1, 1, 6, 6), Case(1, 6, 22, 22), Case(1, 48, 384, 384), Case(1, 128, 384, 384)),
    *(Case(1, 512, 384, 384), Case(1, 2048, 384, 384), Case(1, 8192, 384, 384)),
]


class Rank:
    """The experts of one rank, three times: in GPU memory, in host memory, and as BF16."""

    def __init__(self, ep_size: int) -> None:
        self.num_local = NUM_EXPERTS // ep_size
        self.layout = PageLayout(HIDDEN, INTER * ep_size // 8)
        self.pages = torch.randint(
            0, 256, (self.num_local, self.layout.num_bytes), dtype=torch.uint8, device=DEVICE
        )
        for part in (self.layout.gate_scales, self.layout.up_scales, self.layout.down_scales):
            self.pages[:, part] = torch.randint_like(self.pages[:, part], 117, 122)
        self.host_pages = torch.empty(self.pages.shape, dtype=torch.uint8, pin_memory=True).copy_(self.pages)
        self.addresses = _addresses(self.pages)
        self.host_addresses = _addresses(self.host_pages)
        inter = self.layout.intermediate_size
        self.gate_up = torch.empty(self.num_local, HIDDEN, 2 * inter, dtype=torch.bfloat16, device=DEVICE)
        self.down = torch.empty(self.num_local, inter, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        self.dequantize(range(self.num_local))

    def dequantize(self, experts: range | list[int]) -> None:
        """Pages to BF16."""
        layout, inter = self.layout, self.layout.intermediate_size
        for expert in experts:
            page = self.pages[expert]
            for codes, scales, rows, to in (
                (layout.gate_codes, layout.gate_scales, inter, self.gate_up[expert, :, :inter]),
                (layout.up_codes, layout.up_scales, inter, self.gate_up[expert, :, inter:]),
                (layout.down_codes, layout.down_scales, HIDDEN, self.down[expert]),
            ):
                to.copy_(dequantize_mxfp4(load_codes(page[codes], rows), load_scales(page[scales], rows)).T)


class Inputs:
    """Rows and as many routings as keep the pages out of the L2 cache."""

    def __init__(self, case: Case, rank: Rank) -> None:
        self.x = torch.randn(case.num_rows, HIDDEN, device=DEVICE).to(torch.bfloat16)
        self.topk_weights = torch.rand(case.num_rows, NUM_TOPK, device=DEVICE)
        first = self._route(case, rank)
        page_bytes = rank.layout.num_bytes
        sets = max(4, -(-BYTES_TO_ROTATE // (self._num_distinct(first, rank) * page_bytes)))
        self.routings = [first, *(self._route(case, rank) for _ in range(sets - 1))]
        distinct = [self._num_distinct(topk_idx, rank) for topk_idx in self.routings]
        self.num_distinct = sum(distinct) / len(distinct)
        self.page_bytes = self.num_distinct * page_bytes
        local = [int((topk_idx < rank.num_local).sum()) for topk_idx in self.routings]
        self.num_local_rows = sum(local) / len(local)

    @staticmethod
    def _route(case: Case, rank: Rank) -> Tensor:
        local = torch.randperm(rank.num_local, device=DEVICE)[: case.num_local_candidates]
        others = torch.randperm(NUM_EXPERTS - rank.num_local, device=DEVICE) + rank.num_local
        candidates = torch.cat((local, others[: case.num_candidates - case.num_local_candidates]))
        if case.num_candidates < NUM_EXPERTS:  # every candidate has rows
            order = torch.arange(case.num_rows * NUM_TOPK, device=DEVICE).view(-1, NUM_TOPK) % len(candidates)
        else:
            order = torch.rand(case.num_rows, NUM_EXPERTS, device=DEVICE).argsort(dim=1)[:, :NUM_TOPK]
        return candidates[order].sort(dim=1).values.contiguous()

    @staticmethod
    def _num_distinct(topk_idx: Tensor, rank: Rank) -> int:
        return int((topk_idx.unique() < rank.num_local).sum())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    limits = ceilings()
    record: dict[str, object] = {
        "command": "python -m benchmarks.experts",
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "hidden": HIDDEN,
        "intermediate": INTER,
        "ceilings": limits,
    }
    results: list[dict[str, object]] = []
    for ep_size in (8, 1):
        rank = Rank(ep_size)
        for case in CASES:
            if case.ep_size == ep_size:
                results += measure(case, rank, options.rounds, limits)
        del rank
    record["results"] = results
    line = json.dumps(record)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(line)


def ceilings() -> dict[str, float]:
    """Bandwidths of this GPU, in GB/s: reading its memory, copying from the host, and a copy's read plus write."""
    size = 2 * 2**30
    memory = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(size // 2, dtype=torch.uint8, pin_memory=True)
    words = memory.view(torch.int64)
    read_us = _median_us(lambda: words.max())
    pcie_us = _median_us(lambda: memory[: size // 2].copy_(host, non_blocking=True))
    copy_us = _median_us(lambda: memory[: size // 2].copy_(memory[size // 2 :]))
    return {
        "hbm_read": round(size / read_us / 1e3, 1),
        "hbm_copy": round(size / copy_us / 1e3, 1),
        "pcie_copy": round(size / 2 / pcie_us / 1e3, 1),
    }


def measure(case: Case, rank: Rank, rounds: int, limits: dict[str, float]) -> list[dict[str, object]]:
    """All arms of a case, in turns; `limits` are the ceilings of this run."""
    inputs = Inputs(case, rank)
    arms: dict[str, tuple[Callable[[], None], int]] = {
        name: (_capture(step, inputs), len(inputs.routings))
        for name, step in (
            ("resident", lambda i: _kernel(inputs, rank, i, rank.addresses)),
            ("mapped", lambda i: _kernel(inputs, rank, i, rank.host_addresses)),
            ("bf16", lambda i: _grouped_mm(inputs, rank, i)),
        )
    }
    slots = torch.empty(2 * STAGED_GROUP, rank.layout.num_bytes, dtype=torch.uint8, device=DEVICE)
    arms["staged"] = (lambda: _staged(inputs, rank, inputs.routings[0], slots), 1)
    arms["dequantize"] = (lambda: _dequantize_then_multiply(inputs, rank, inputs.routings[0]), 1)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds + 1):
        for name, (run, num_layers) in arms.items():
            elapsed_us = _elapsed_us(run) / num_layers
            if round_ > 0:  # the first one warms up
                times[name].append(elapsed_us)
    resident_us = statistics.median(times["resident"])
    flop = 6 * HIDDEN * rank.layout.intermediate_size * inputs.num_local_rows
    records: list[dict[str, object]] = []
    for name, values in times.items():
        median_us = statistics.median(values)
        gb_per_s = inputs.page_bytes / median_us / 1e3
        ceiling = limits.get(CEILING_OF_ARM.get(name, ""))
        records.append(
            {
                "ep_size": case.ep_size,
                "rows": case.num_rows,
                "local_rows": round(inputs.num_local_rows, 1),
                "distinct_experts": round(inputs.num_distinct, 1),
                "arm": name,
                "median_us": round(median_us, 1),
                "min_us": round(min(values), 1),
                "max_us": round(max(values), 1),
                "page_mb": round(inputs.page_bytes / 1e6, 1),
                "page_gb_per_s": round(gb_per_s, 1),
                "share_of_ceiling": None if ceiling is None else round(gb_per_s / ceiling, 3),
                "tflop_per_s": round(flop / median_us / 1e6, 1),
                "times_resident": round(median_us / resident_us, 2),
            }
        )
    return records


def _kernel(inputs: Inputs, rank: Rank, topk_idx: Tensor, addresses: Tensor) -> None:
    out = torch.empty(*topk_idx.shape, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    routing = (topk_idx, inputs.topk_weights, addresses, None, 0, rank.layout, out)
    expert_mlp(inputs.x, *routing, num_experts=NUM_EXPERTS, limit=LIMIT)
    combine(out, topk_idx, range(rank.num_local))


def _staged(inputs: Inputs, rank: Rank, topk_idx: Tensor, slots: Tensor) -> None:
    """Copies run on a stream of their own, one group ahead; the table says which slot has which page."""
    needed = [e for e in topk_idx.unique().tolist() if e < rank.num_local]
    groups = [needed[i : i + STAGED_GROUP] for i in range(0, len(needed), STAGED_GROUP)]
    out = torch.empty(*topk_idx.shape, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    copies, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    copies.wait_stream(compute)
    copied = [torch.cuda.Event() for _ in groups]
    used = [torch.cuda.Event() for _ in groups]
    for index, group in enumerate(groups):
        half = slots[index % 2 * STAGED_GROUP :]
        with torch.cuda.stream(copies):
            if index >= 2:
                copies.wait_event(used[index - 2])
            for slot, expert in zip(half, group, strict=False):
                slot.copy_(rank.host_pages[expert], non_blocking=True)
            copied[index].record(copies)
        table = torch.zeros(rank.num_local, dtype=torch.int64)
        table[group] = torch.tensor([slot.data_ptr() for slot in half[: len(group)]])
        compute.wait_event(copied[index])
        addresses = table.to(DEVICE)
        routing = (topk_idx, inputs.topk_weights, addresses, addresses != 0, 0, rank.layout, out)
        expert_mlp(inputs.x, *routing, num_experts=NUM_EXPERTS, limit=LIMIT)
        used[index].record(compute)
    combine(out, topk_idx, range(rank.num_local))


def _grouped_mm(inputs: Inputs, rank: Rank, topk_idx: Tensor) -> None:
    """BF16 weights: rows sorted by expert, two grouped products, outputs back in token order."""
    key = topk_idx.flatten()
    order = key.argsort(stable=True)
    ends = torch.searchsorted(key[order], torch.arange(rank.num_local, device=DEVICE), right=True)
    ends = ends.to(torch.int32)
    rows = inputs.x[order // NUM_TOPK]
    gate, up = grouped_mm(rows, rank.gate_up, offs=ends).chunk(2, dim=1)
    weights = inputs.topk_weights.flatten()[order].unsqueeze(1)
    gate, up = gate.float().clamp_max(LIMIT), up.float().clamp(-LIMIT, LIMIT)
    h = (torch.nn.functional.silu(gate) * up * weights).to(torch.bfloat16)
    parts = torch.empty(len(key), HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    parts[order] = grouped_mm(h, rank.down, offs=ends)
    combine(parts.view(*topk_idx.shape, HIDDEN), topk_idx, range(rank.num_local))


def _dequantize_then_multiply(inputs: Inputs, rank: Rank, topk_idx: Tensor) -> None:
    rank.dequantize([e for e in topk_idx.unique().tolist() if e < rank.num_local])
    _grouped_mm(inputs, rank, topk_idx)


def _addresses(pages: Tensor) -> Tensor:
    return torch.tensor([page.data_ptr() for page in pages], device=DEVICE)


def _capture(step: Callable[[Tensor], None], inputs: Inputs) -> Callable[[], None]:
    """A graph of the step for every routing."""
    step(inputs.routings[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for topk_idx in inputs.routings:
            step(topk_idx)
    return graph.replay


def _elapsed_us(run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _median_us(run: Callable[[], object]) -> float:
    return statistics.median(_elapsed_us(run) for _ in range(7))


if __name__ == "__main__":
    main()
