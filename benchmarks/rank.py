"""What does a step cost on one rank of eight, at the shapes of the release?

    python -m benchmarks.rank --config CONFIG_JSON [--json FILE] [--sequences N ...] [--rows N ...] [--context N]

Needs a GPU. Builds rank 0 of 8 with random weights, fills its caches, and replays decode steps as CUDA graphs: forward
and logits of every row, without collectives (there is one rank; what they would add is in no figure here). Experts are
chosen by a routing trace fitted to public counters (design section 10), whatever the router says; the router is
computed all the same. Every page is in GPU memory. Times are medians with min and max over steps; `kernels` says where
the time of a step goes. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.random_weights import RandomWeights
from kernels.formats import PageLayout
from model.batch import ForwardBatch, SequenceRows
from model.collectives import Collectives
from model.config import CheckpointConfig
from model.expert_pages import local_experts_per_layer, page_layout
from model.expert_source import PageGroup
from model.kv_cache import CacheGeometry, KvCaches
from model.numerics import Numerics
from model.parallel import ParallelLayout
from model.transformer import Transformer
from model.weights import load_weights
from placement.trace_generator import FOUR_DOMAINS, RoutingModel

DEVICE = torch.device("cuda")
WORLD_SIZE = 8
BLOCK_SIZE = 64
NUM_STEPS = 40
"""Steps of a trace that are timed."""


class NoCollectives(Collectives):
    """Of one rank among others that are not there: every sum is what this rank adds to it."""

    def __init__(self) -> None:
        super().__init__(ParallelLayout())


class ResidentPages:
    """All pages of a rank in GPU memory, random: an ExpertSource."""

    def __init__(self, layout: PageLayout, experts_per_layer: Sequence[int]) -> None:
        self.layout = layout
        self._pages = [self._random(count) for count in experts_per_layer]
        self._groups = [
            PageGroup(
                range(len(pages)),
                (),
                pages.data_ptr() + torch.arange(len(pages), device=DEVICE) * pages.stride(0),
            )
            for pages in self._pages
        ]

    def _random(self, count: int) -> Tensor:
        pages = torch.randint(0, 256, (count, self.layout.num_bytes), dtype=torch.uint8, device=DEVICE)
        for part in (self.layout.gate_scales, self.layout.up_scales, self.layout.down_scales):
            pages[:, part] = torch.randint_like(pages[:, part], 117, 122)
        return pages

    def in_place(self, layer: int, num_rows: int) -> PageGroup:
        """See ExpertSource."""
        return self._groups[layer]

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[PageGroup]:
        """See ExpertSource."""
        yield self._groups[layer]

    def wants_prediction(self, layer: int, num_rows: int) -> bool:
        """See ExpertSource."""
        return False

    def predict(self, layer: int, topk_idx: Tensor) -> None:
        """See ExpertSource."""
        raise AssertionError("nobody asked")


class TracedRouter:
    """Chooses what a trace says, layer after layer, and weighs it as the router's logits do."""

    def __init__(self, transformer: Transformer, num_layers: int, num_rows: int, num_topk: int) -> None:
        self.topk_idx = torch.zeros(num_layers, num_rows, num_topk, dtype=torch.int64, device=DEVICE)
        self._layer = 0
        self._choose = transformer.operators.choose_experts
        transformer.moe.operators = replace(transformer.operators, choose_experts=self)

    def __call__(self, *arguments: object) -> tuple[Tensor, Tensor]:
        """See `kernels.router.choose_experts`."""
        _, weights = self._choose(*arguments)
        layer, self._layer = self._layer, (self._layer + 1) % len(self.topk_idx)
        return self.topk_idx[layer], weights


class Rank:
    """Rank 0 of 8 with all its pages resident."""

    def __init__(self, config: CheckpointConfig, ep_size: int, num_slots: int, num_blocks: int) -> None:
        model = config.text_config
        layout = ParallelLayout(0, WORLD_SIZE, ep_size)
        weights = load_weights(RandomWeights(config), model, layout, DEVICE, torch.float32)
        self.config = model
        self.geometry = CacheGeometry(num_slots, num_blocks, BLOCK_SIZE)
        caches = KvCaches(model, self.geometry, torch.float32, DEVICE)
        fill_randomly(caches)
        counts = local_experts_per_layer(model, layout)[: model.num_hidden_layers]
        token_map = torch.arange(model.vocab_size) % model.engram_compressed_vocab_size
        self.transformer = Transformer(
            model,
            weights,
            layout,
            NoCollectives(),
            ResidentPages(page_layout(model, layout), counts),
            caches,
            token_map,
            Numerics(),
        )


def fill_randomly(caches: KvCaches) -> None:
    """Finite codes everywhere, so that scores differ."""
    for rows in (*caches.windows, *caches.entries.values()):
        rows.codes.view(torch.uint8).copy_(torch.randint_like(rows.codes.view(torch.uint8), 0, 112))
    for keys in caches.index_keys.values():
        keys.codes.copy_(torch.randint_like(keys.codes, 0, 256))
    for rows in (*caches.windows, *caches.index_keys.values()):
        rows.scales.fill_(120)
    for rows in caches.entries.values():
        rows.scales.copy_(torch.full_like(rows.scales, 0.25, dtype=torch.float32))


class DecodeStep:
    """A step of some sequences, captured: forward and logits."""

    def __init__(self, rank: Rank, num_sequences: int, num_rows: int, context: int) -> None:
        self.rank = rank
        config, blocks = rank.config, -(-(context + num_rows) // BLOCK_SIZE)
        sequences = [
            SequenceRows(
                state_slot=slot,
                start_position=context,
                token_ids=[(31 * slot + 7 * i) % config.vocab_size for i in range(num_rows)],
                history=[5, 6, 7],
                block_table=array("i", range(1 + slot * blocks, 1 + (slot + 1) * blocks)).tobytes(),
            )
            for slot in range(num_sequences)
        ]
        self.batch = ForwardBatch.build(sequences, config, rank.geometry, DEVICE)
        rows = num_sequences * num_rows
        self.router = TracedRouter(
            rank.transformer, config.num_hidden_layers, rows, config.num_experts_per_tok
        )
        trace = RoutingModel().generate(
            FOUR_DOMAINS, NUM_STEPS, num_sequences=num_sequences, rows_per_sequence=num_rows
        )
        chosen = torch.from_numpy(trace.topk_idx.astype("int64")).sort(dim=-1).values
        self.trace = chosen.transpose(1, 2).contiguous().to(DEVICE)  # [step, layer, row, topk]
        self.router.topk_idx.copy_(self.trace[0])
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        free = torch.cuda.mem_get_info()[0]
        with torch.cuda.graph(self.graph):
            self.logits = self.run()
        self.graph_bytes = free - torch.cuda.mem_get_info()[0]

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Without the graph."""
        hidden = self.rank.transformer.forward(self.batch)
        return self.rank.transformer.logits(hidden.normed)

    def times_ms(self) -> list[float]:
        """Of each step of the trace."""
        pairs = []
        for topk_idx in self.trace:
            self.router.topk_idx.copy_(topk_idx)
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            self.graph.replay()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def kernels(self) -> dict[str, tuple[float, float]]:
        """Microseconds and launches of a step, by kernel."""
        num_steps = 5
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for topk_idx in self.trace[:num_steps]:
                self.router.topk_idx.copy_(topk_idx)
                self.graph.replay()
            torch.cuda.synchronize()
        total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in profiled.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                total[event.name][0] += event.device_time / num_steps
                total[event.name][1] += 1 / num_steps
        return {name: (us, count) for name, (us, count) in sorted(total.items(), key=lambda i: -i[1][0])}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="config.json of the release")
    parser.add_argument("--json", type=Path, help="also write the record to this file")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6], help="of each sequence")
    parser.add_argument("--context", type=int, default=2048, help="tokens before the step")
    parser.add_argument("--ep-size", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    blocks = -(-(options.context + max(options.rows)) // BLOCK_SIZE)
    most = max(options.sequences)
    rank = Rank(CheckpointConfig.load(options.config), options.ep_size, most, 1 + most * blocks)
    results = []
    for num_sequences in options.sequences:
        for num_rows in options.rows:
            results.append(measure(rank, num_sequences, num_rows, options.context))
            torch.cuda.empty_cache()
    record = {
        "command": "python -m benchmarks.rank",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "world_size": WORLD_SIZE,
        "ep_size": options.ep_size,
        "context": options.context,
        "collectives": "not included: the other ranks are not there",
        "pages": "all resident",
        "routing": "trace, four domains",
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


def measure(rank: Rank, num_sequences: int, num_rows: int, context: int) -> dict[str, object]:
    """One size of step."""
    step = DecodeStep(rank, num_sequences, num_rows, context)
    step.times_ms()
    times = step.times_ms()
    return {
        "sequences": num_sequences,
        "rows_per_sequence": num_rows,
        "step_ms": {
            "median": round(statistics.median(times), 3),
            "min": round(min(times), 3),
            "max": round(max(times), 3),
        },
        "finite": bool(torch.isfinite(step.logits).all()),
        "graph_mib": round(step.graph_bytes / 2**20, 1),
        "kernels": {
            name: {"us": round(us, 1), "launches": round(count, 1)}
            for name, (us, count) in step.kernels().items()
        },
    }


if __name__ == "__main__":
    main()
