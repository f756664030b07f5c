"""ForwardBatch: one step's sequences as the index tensors that the model gathers and scatters with.

Everything that depends on positions is computed here, once per step and for all layers: which cached or new row is
each query's window key, where new rows and entries go, which cache entries a sequence can see
(`spec/model.md` sections 4.2 to 4.7, 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

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
    """The rows that a run of layers evaluates, and their window keys."""

    positions: Tensor
    """`[num_rows]` int64."""
    sequence: Tensor
    """`[num_rows]` int64: index of the row's sequence in the batch."""
    spans: tuple[tuple[int, int], ...]
    """Half-open row range of each sequence; may be empty."""
    window_new: Tensor
    """`[num_rows, window]` int64: row of this step that is the key, oldest position first; -1 if it is not new."""
    window_ring: Tensor
    """`[num_rows, window]` int64: ring row that is the key; -1 if the key is new or does not exist."""
    kept: Tensor
    """`[num_kept]` int64: rows that outlive the step in the rings (the last ones of each sequence)."""
    kept_ring: Tensor
    """`[num_kept]` int64: their ring rows."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True)
class EntryWrites:
    """Compressed entries that become complete in this step, at one compression ratio."""

    rows: Tensor
    """`[num_entries]` int64: the row of each entry's last token."""
    previous_rows: Tensor
    """`[num_entries]` int64: ratio 2: the row of its first token, -1 if that token came in an earlier step."""
    previous_halves: Tensor
    """`[num_entries]` int64: ratio 2: where an earlier first token's state lies."""
    positions: Tensor
    """`[num_entries]` int64: position of the first token, at which the entry is rotated."""
    cache_idx: Tensor
    """`[num_entries]` int64: where the entry goes."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Index tensors of one step."""

    token_ids: Tensor
    """`[num_tokens]` int64."""
    lookback: Tensor
    """`[num_tokens, ngram]` int64: the row's token and the ones before it, newest first; -1 before the start.
    On the CPU, where the Engram tables are."""
    encoder: Rows
    """All rows, with unbounded history."""
    boundary: Rows
    """Rows that the decoder's first layer evaluates. Its window keys come from all rows, so `window_new` and `kept`
    index those and the windows reach behind `decoder_start`."""
    decoder: Rows
    """Rows that the layers after it evaluate."""
    decoder_rows: Tensor
    """`[decoder.num_rows]` int64: their indices among all rows."""
    last_rows: Tensor
    """`[num_sequences]` int64: index among the decoder rows of each sequence's last row; meaningless for a sequence
    that has none there."""
    writes: dict[int, EntryWrites]
    """By compression ratio."""
    half_rows: Tensor
    """`[num_kept]` int64: rows whose compressor state is kept."""
    half_idx: Tensor
    """`[num_kept]` int64: where it goes."""
    block_table: Tensor
    """`[num_sequences, max_blocks]` int64: each sequence's KV blocks, 0 as filler."""
    num_entries: dict[int, tuple[int, ...]]
    """By ratio: entries of each sequence once this step's are written."""

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
            device: where the tensors go; None means CPU.
        """
        assert sequences, "a step needs at least one sequence"
        device = device or torch.device("cpu")
        spans = _Spans(
            slots=torch.tensor([s.state_slot for s in sequences]),
            starts=torch.tensor([s.start_position for s in sequences]),
            ends=torch.tensor([s.end_position for s in sequences]),
        )
        floors = torch.tensor([s.decoder_start for s in sequences])
        decoder_spans = replace(spans, starts=spans.starts.maximum(floors).minimum(spans.ends))
        ring = window_ring_size(config)
        all_rows = _layout_rows(spans, torch.zeros_like(floors), config.sliding_window, ring)
        tail = _layout_rows(decoder_spans, floors, config.sliding_window, ring)
        decoder_rows = tail.positions + spans.row_offsets[tail.sequence]
        block_table = _block_table(sequences)
        ratios = sorted({config.compress_ratios[layer] for layer in config.kv_source_layer_ids})
        half_ring = half_ring_size(config)
        half_rows, half_idx = _last_rows(spans, all_rows.positions, all_rows.sequence, half_ring)
        batch = cls(
            token_ids=torch.tensor([t for s in sequences for t in s.token_ids]),
            lookback=_lookback(sequences, all_rows.sequence, config.engram_max_ngram_size),
            encoder=all_rows,
            boundary=replace(
                all_rows,
                positions=tail.positions,
                sequence=tail.sequence,
                spans=tail.spans,
                window_new=all_rows.window_new[decoder_rows],
                window_ring=all_rows.window_ring[decoder_rows],
            ),
            decoder=tail,
            decoder_rows=decoder_rows,
            last_rows=decoder_spans.bounds[1:] - 1,
            writes={r: _entry_writes(spans, all_rows, block_table, r, geometry, half_ring) for r in ratios},
            half_rows=half_rows,
            half_idx=half_idx,
            block_table=block_table,
            num_entries={r: tuple(s.end_position // r for s in sequences) for r in ratios},
        )
        return _to(batch, device)


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


def _layout_rows(spans: _Spans, floors: Tensor, window: int, ring: int) -> Rows:
    """Rows of all positions in `spans`; window keys before `floors[i]` do not exist."""
    bounds = spans.bounds
    sequence = torch.repeat_interleave(bounds.diff())
    offsets = spans.row_offsets[sequence]
    positions = torch.arange(len(sequence)) - offsets
    key = positions.unsqueeze(1) - torch.arange(window - 1, -1, -1)  # [num_rows, window], oldest first
    is_new = key >= spans.starts[sequence].unsqueeze(1)
    in_ring = (key >= floors[sequence].unsqueeze(1)) & ~is_new
    ring_start = (spans.slots * ring)[sequence].unsqueeze(1)
    kept, kept_ring = _last_rows(spans, positions, sequence, ring)
    ends = bounds.tolist()
    return Rows(
        positions=positions,
        sequence=sequence,
        spans=tuple(zip(ends, ends[1:], strict=False)),
        window_new=torch.where(is_new, key + offsets.unsqueeze(1), -1),
        window_ring=torch.where(in_ring, ring_start + key % ring, -1),
        kept=kept,
        kept_ring=kept_ring,
    )


def _last_rows(spans: _Spans, positions: Tensor, sequence: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    """The last `ring` rows of each sequence (each ring row is written once) and their places in the rings."""
    rows = (positions >= (spans.ends - ring)[sequence]).nonzero().squeeze(1)
    return rows, (spans.slots * ring)[sequence[rows]] + positions[rows] % ring


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


def _entry_writes(
    spans: _Spans, all_rows: Rows, block_table: Tensor, ratio: int, geometry: CacheGeometry, half_ring: int
) -> EntryWrites:
    rows = ((all_rows.positions + 1) % ratio == 0).nonzero().squeeze(1)
    sequence, last = all_rows.sequence[rows], all_rows.positions[rows]
    first = last - (ratio - 1)
    return EntryWrites(
        rows=rows,
        previous_rows=torch.where(first >= spans.starts[sequence], rows - (ratio - 1), -1),
        previous_halves=(spans.slots * half_ring)[sequence] + first % half_ring,
        positions=first,
        cache_idx=geometry.entry_idx(block_table, sequence, last // ratio, ratio),
    )


def _to(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    if device.type == "cpu":
        return batch
    return replace(
        batch,
        **{f.name: _move(getattr(batch, f.name), device) for f in fields(batch) if f.name != "lookback"},
    )


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    if isinstance(value, Rows | EntryWrites):
        return type(value)(**{f.name: _move(getattr(value, f.name), device) for f in fields(value)})
    return value
