"""Builders for model tests: a whole transformer over a tiny checkpoint, and sequences to run through it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kernels.formats import PageLayout
from model.batch import ForwardBatch, SequenceRows
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.dspark import DSpark
from model.engram_map import load_token_map
from model.expert_source import PageGroup
from model.kv_cache import CacheGeometry, KvCaches
from model.numerics import Numerics
from model.parallel import Collectives, ParallelLayout
from model.transformer import Hidden, Transformer
from model.weights import load_weights

GOLDEN = Numerics(torch.float64, quantize_expert_activations=True, round_index_scores=True)
"""The arithmetic of `tiny_golden.json` (spec appendix B)."""


class PlainExpertSource:
    """All pages of one rank in ordinary memory; yields a layer's experts in groups of `group_size`."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, layout: ParallelLayout, group_size: int = 1000
    ) -> None:
        part = layout.expert_slice(config.moe_intermediate_size)
        self.layout = PageLayout(config.hidden_size, part.stop - part.start)
        self._group_size = group_size
        self._pages = []
        for layer, name in enumerate(config.layer_names):
            experts = layout.local_experts(config.num_experts_of(layer))
            self._pages.append([self._pack(checkpoint, f"{name}.ffn.experts.{e}", part) for e in experts])

    def _pack(self, checkpoint: Checkpoint, name: str, part: slice) -> Tensor:
        codes, scales = _scaled(part, 2), _scaled(part, 32)
        parts = (
            checkpoint.read(f"{name}.w1.weight", rows=part),
            checkpoint.read(f"{name}.w3.weight", rows=part),
            checkpoint.read(f"{name}.w1.scale", rows=part),
            checkpoint.read(f"{name}.w3.scale", rows=part),
            checkpoint.read(f"{name}.w2.weight", columns=codes),
            checkpoint.read(f"{name}.w2.scale", columns=scales),
        )
        return torch.cat([p.flatten() for p in parts])

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[PageGroup]:
        addresses = torch.tensor([page.data_ptr() for page in self._pages[layer]])
        for start in range(0, len(experts), self._group_size):
            yield PageGroup(experts[start : start + self._group_size], (), addresses)


def _scaled(part: slice, divisor: int) -> slice:
    return slice(part.start // divisor, part.stop // divisor)


class Recorder:
    """A probe that keeps every value it sees."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], list[Tensor]] = defaultdict(list)

    def __call__(self, layer: int, name: str, value: Tensor) -> None:
        self.values[layer, name].append(value.clone())

    def last(self, layer: int, name: str) -> Tensor:
        """The last row of the last value seen."""
        return self.values[layer, name][-1][-1]


@dataclass
class TinyModel:
    """One rank's transformer with its caches, and the means to run sequences through it."""

    transformer: Transformer
    geometry: CacheGeometry
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    @property
    def dspark(self) -> DSpark:
        return DSpark(self.transformer)

    def rows(
        self, tokens: Sequence[int], start: int, end: int, slot: int = 0, decoder_start: int = 0
    ) -> SequenceRows:
        """Tokens `start .. end - 1` of a sequence that owns slot `slot` and an interleaved set of blocks."""
        blocks = -(-self.config.max_position_embeddings // self.geometry.block_size)
        return SequenceRows(
            state_slot=slot,
            start_position=start,
            token_ids=tokens[start:end],
            history=tokens[max(0, start - 3) : start],
            block_table=[1 + slot + i * self.geometry.num_slots for i in range(blocks)],
            decoder_start=decoder_start,
        )

    def step(self, *sequences: SequenceRows) -> tuple[ForwardBatch, Hidden]:
        """Run one step and commit its taps to the draft rings."""
        batch = ForwardBatch.build(sequences, self.config, self.geometry)
        hidden = self.transformer.forward(batch)
        self.dspark.commit(hidden.taps, batch.decoder)
        return batch, hidden

    def prefill(
        self, tokens: Sequence[int], splits: Sequence[int] = (), slot: int = 0, decoder_start: int = 0
    ) -> Tensor:
        """Logits of all (decoder) rows of `tokens`, cut into chunks at the positions `splits`."""
        bounds = [0, *splits, len(tokens)]
        logits = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            _, hidden = self.step(self.rows(tokens, start, end, slot, decoder_start))
            logits.append(self.transformer.logits(hidden.normed))
        return torch.cat(logits)


def create_tiny_model(
    directory: Path,
    numerics: Numerics = GOLDEN,
    layout: ParallelLayout | None = None,
    collectives: Collectives | None = None,
    num_slots: int = 4,
    block_size: int = 8,
    group_size: int = 1000,
) -> TinyModel:
    """A transformer over the checkpoint in `directory`, recording every intermediate value."""
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config.text_config
    layout = layout or ParallelLayout()
    collectives = collectives or Collectives(layout)
    device = torch.device("cpu")
    geometry = CacheGeometry(
        num_slots, 1 + num_slots * -(-config.max_position_embeddings // block_size), block_size
    )
    recorder = Recorder()
    transformer = Transformer(
        config,
        load_weights(checkpoint, config, layout, device, numerics.accumulate),
        layout,
        collectives,
        PlainExpertSource(checkpoint, config, layout, group_size),
        KvCaches(config, geometry, numerics.accumulate, device),
        load_token_map(directory, config),
        numerics,
        recorder,
    )
    return TinyModel(transformer, geometry, recorder)
