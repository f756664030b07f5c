"""Builders for model tests: a whole transformer over a tiny checkpoint, and sequences to run through it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from model.batch import ForwardBatch, SequenceRows
from model.checkpoint import Checkpoint
from model.collectives import Collectives
from model.config import ModelConfig
from model.dspark import DSpark
from model.engram_map import load_token_map
from model.expert_pages import fill_page, local_experts_per_layer, page_layout
from model.expert_source import PageGroup
from model.kv_cache import CacheGeometry, KvCaches
from model.numerics import Numerics
from model.parallel import ParallelLayout
from model.transformer import Hidden, Transformer
from model.weights import load_weights

GOLDEN = Numerics(torch.float64, quantize_expert_activations=True, round_index_scores=True)
"""The arithmetic of `tiny_golden.json` (spec appendix B)."""


class PlainExpertSource:
    """All pages of one rank in the device's memory; yields a layer's experts at once."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, layout: ParallelLayout, device: torch.device
    ) -> None:
        self.layout = page_layout(config, layout)
        self._pages: list[list[Tensor]] = []
        for layer, count in enumerate(local_experts_per_layer(config, layout)):
            self._pages.append([])
            for expert in range(count):
                page = torch.empty(self.layout.num_bytes, dtype=torch.uint8)
                fill_page(page, checkpoint, config, layout, layer, expert)
                self._pages[-1].append(page.to(device))

    def in_place(self, layer: int, num_rows: int) -> PageGroup | None:
        return None

    def wants_prediction(self, layer: int, num_rows: int) -> bool:
        return False

    def predict(self, layer: int, topk_idx: Tensor) -> None:
        raise AssertionError("nobody asked")

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[PageGroup]:
        yield PageGroup(experts, (), torch.tensor([page.data_ptr() for page in self._pages[layer]]))


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
            block_table=array("i", [1 + slot + i * self.geometry.num_slots for i in range(blocks)]).tobytes(),
            decoder_start=decoder_start,
        )

    def step(self, *sequences: SequenceRows) -> tuple[ForwardBatch, Hidden]:
        """Run one step and commit its taps to the draft rings."""
        batch = ForwardBatch.build(
            sequences, self.config, self.geometry, self.transformer.weights.norm.device
        )
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
    device: str = "cpu",
) -> TinyModel:
    """A transformer over the checkpoint in `directory`, recording every intermediate value."""
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config.text_config
    layout = layout or ParallelLayout()
    collectives = collectives or Collectives(layout)
    place = torch.device(device)
    geometry = CacheGeometry(
        num_slots, 1 + num_slots * -(-config.max_position_embeddings // block_size), block_size
    )
    recorder = Recorder()
    transformer = Transformer(
        config,
        load_weights(checkpoint, config, layout, place, numerics.accumulate),
        layout,
        collectives,
        PlainExpertSource(checkpoint, config, layout, place),
        KvCaches(config, geometry, numerics.accumulate, place),
        load_token_map(directory, config),
        numerics,
        recorder,
    )
    return TinyModel(transformer, geometry, recorder)
