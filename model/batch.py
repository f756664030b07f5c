"""ForwardBatch: one step's sequences as the index tensors that the model gathers and scatters with.

Everything that depends on positions is computed here, once per step and for all layers: which cached or new row is
each query's window key, where new rows and entries go, which cache entries a sequence can see
(`spec/model.md` sections 4.2 to 4.7, 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kernels.tensors import QueryRows, WindowPlaces
from model.config import ModelConfig
from model.kv_cache import CacheGeometry
from model.kv_layout import half_ring_size, window_ring_size


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's share of a step: `token_ids` at positions `start_position ..`."""

    state_slot: int
    start_position: int
    token_ids: Sequence[int]
    history: Sequence[int]
    """True tokens just before `start_position`, oldest first, at least `min(ngram - 1, start_position)` of them."""
    block_table: bytes
    """Block of each `block_size` tokens, at least as many as cover the last row; int32 each, machine's byte order."""
    decoder_start: int = 0
    """Decoder layers skip rows before this position; the windows of all but the first do not reach behind it."""

    @property
    def end_position(self) -> int:
        """Position after the last row."""
        return self.start_position + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that a run of layers evaluates, and where their window keys are."""

    queries: QueryRows
    places: WindowPlaces
    ring_rows: Tensor
    """`[num_new_keys]` int64: ring row of each window key that this step computes, -1 if later steps do not need it.
    Of the keys `places` counts from `new_offset`; there may be more of them than evaluated rows."""

    @property
    def num_rows(self) -> int:
        """Number of evaluated rows."""
        return self.queries.positions.shape[0]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Index tensors of one step; int64 all of them."""

    token_ids: Tensor
    """`[num_tokens]`."""
    lookback: Tensor
    """`[num_tokens, ngram]`: the row's token and the ones before it, newest first; -1 before the start."""
    encoder: Rows
    """All rows, with unbounded history."""
    boundary: Rows
    """Rows that the decoder's first layer evaluates. Its window keys come from all rows, and the windows reach behind
    `decoder_start`."""
    decoder: Rows
    """Rows that the layers after it evaluate."""
    decoder_rows: Tensor
    """`[decoder.num_rows]`: their indices among all rows."""
    last_rows: Tensor
    """`[num_sequences]`: index among the decoder rows of each sequence's last row; meaningless for a sequence that has
    none there."""
    half_start: Tensor
    """`[num_sequences]`: first row of each sequence's ring of compressor inputs."""
    half_rows: Tensor
    """`[num_tokens]`: row of that ring that keeps a token's compressor input, -1 if later steps do not need it."""
    entry_rows: dict[int, Tensor]
    """By compression ratio, `[num_tokens]`: cache row of the entry that a token completes, -1 if it completes none."""
    block_table: Tensor
    """`[num_sequences, max_blocks]`: each sequence's KV blocks, 0 as filler."""
    num_positions: int
    """Largest end of a sequence."""

    @classmethod
    def build(
        cls,
        sequences: Sequence[SequenceRows],
        config: ModelConfig,
        geometry: CacheGeometry,
        device: torch.device | None = None,
    ) -> ForwardBatch:
        """Lay out a step.

        Args:
            sequences: at least one, each with at least one token; distinct state slots.
            config: of the model.
            geometry: of the caches.
            device: where the tensors go, in one copy; None means CPU.
        """
        assert sequences, "a step needs at least one sequence"
        spans = _Spans(
            slots=torch.tensor([s.state_slot for s in sequences]),
            starts=torch.tensor([s.start_position for s in sequences]),
            ends=torch.tensor([s.end_position for s in sequences]),
        )
        floors = torch.tensor([s.decoder_start for s in sequences])
        decoder_spans = replace(spans, starts=spans.starts.maximum(floors).minimum(spans.ends))
        ring = window_ring_size(config)
        all_rows = _layout_rows(spans, torch.zeros_like(floors), ring)
        tail = _layout_rows(decoder_spans, floors, ring)
        positions, sequence = all_rows.queries
        block_table = _block_table(sequences)
        half_ring = half_ring_size(config)
        ratios = sorted({config.compress_ratios[layer] for layer in config.kv_source_layer_ids})
        batch = cls(
            token_ids=torch.tensor([t for s in sequences for t in s.token_ids]),
            lookback=_lookback(sequences, sequence, config.engram_max_ngram_size),
            encoder=all_rows,
            boundary=replace(all_rows, queries=tail.queries),
            decoder=tail,
            decoder_rows=tail.queries.positions + spans.row_offsets[tail.queries.sequence],
            last_rows=decoder_spans.bounds[1:] - 1,
            half_start=spans.slots * half_ring,
            half_rows=_kept_rows(spans, positions, sequence, half_ring),
            entry_rows={r: _entry_rows(positions, sequence, block_table, r, geometry) for r in ratios},
            block_table=block_table,
            num_positions=max(s.end_position for s in sequences),
        )
        return batch if device is None or device.type == "cpu" else _to_device(batch, device)


@dataclass(frozen=True, slots=True)
class _Spans:
    """The position range of each sequence, whose rows lie one sequence after the other; `[num_sequences]` int64."""

    slots: Tensor
    starts: Tensor
    ends: Tensor

    @property
    def bounds(self) -> Tensor:
        """`[num_sequences + 1]`: sequence `i` has the rows `bounds[i] .. bounds[i + 1] - 1`."""
        return torch.nn.functional.pad((self.ends - self.starts).cumsum(0), (1, 0))

    @property
    def row_offsets(self) -> Tensor:
        """`[num_sequences]`: position `p` of sequence `i` is in row `p + row_offsets[i]`."""
        return self.bounds[:-1] - self.starts


def _layout_rows(spans: _Spans, floors: Tensor, ring: int) -> Rows:
    """Rows of all positions in `spans`; window keys before `floors[i]` do not exist."""
    sequence = torch.repeat_interleave(spans.bounds.diff())
    offsets = spans.row_offsets
    positions = torch.arange(len(sequence)) - offsets[sequence]
    return Rows(
        queries=QueryRows(positions, sequence),
        places=WindowPlaces(
            ring_start=spans.slots * ring, first_new=spans.starts, new_offset=offsets, floor=floors
        ),
        ring_rows=_kept_rows(spans, positions, sequence, ring),
    )


def _kept_rows(spans: _Spans, positions: Tensor, sequence: Tensor, ring: int) -> Tensor:
    """Place in the rings of the last `ring` rows of each sequence (each ring row is written once), -1 for others."""
    place = (spans.slots * ring)[sequence] + positions % ring
    return torch.where(positions >= (spans.ends - ring)[sequence], place, -1)


def _lookback(sequences: Sequence[SequenceRows], sequence: Tensor, ngram: int) -> Tensor:
    num_before = ngram - 1
    tokens: list[int] = []  # of each sequence: `num_before` earlier tokens, then the new ones
    for s in sequences:
        tokens += [-1] * max(0, num_before - len(s.history))
        tokens += s.history[max(0, len(s.history) - num_before) :]
        tokens += s.token_ids
    place = torch.arange(len(sequence)) + (sequence + 1) * num_before
    return torch.tensor(tokens)[place.unsqueeze(1) - torch.arange(ngram)]


def _block_table(sequences: Sequence[SequenceRows]) -> Tensor:
    width = max(len(s.block_table) for s in sequences)
    padded = bytearray().join(s.block_table.ljust(width, b"\0") for s in sequences)
    return torch.frombuffer(padded, dtype=torch.int32).view(len(sequences), -1).to(torch.int64)


def _entry_rows(
    positions: Tensor, sequence: Tensor, block_table: Tensor, ratio: int, geometry: CacheGeometry
) -> Tensor:
    place = geometry.entry_idx(block_table, sequence, positions // ratio, ratio)
    return torch.where((positions + 1) % ratio == 0, place, -1)


def _to_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """The same batch on the device: many small tensors in one copy."""
    parts: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        parts.append(tensor.reshape(-1))
        return tensor

    _map_tensors(batch, collect)
    flat = torch.cat(parts).pin_memory().to(device, non_blocking=True)
    moved = iter(flat.split([part.numel() for part in parts]))
    result: ForwardBatch = _map_tensors(batch, lambda tensor: next(moved).view(tensor.shape))
    return result


def _map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced, always in the same order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, QueryRows | WindowPlaces):
        return type(value)(*(_map_tensors(item, change) for item in value))
    if isinstance(value, ForwardBatch | Rows):
        return type(value)(**{f.name: _map_tensors(getattr(value, f.name), change) for f in fields(value)})
    return value
