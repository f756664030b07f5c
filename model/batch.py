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
from model.kv_cache import CacheGeometry, half_ring_size, window_ring_size


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's share of a step: `token_ids` at positions `start_position ..`."""

    state_slot: int
    start_position: int
    token_ids: Sequence[int]
    history: Sequence[int]
    """True tokens just before `start_position`, oldest first, at least `min(ngram - 1, start_position)` of them."""
    block_table: Sequence[int]
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
    entry_idx: dict[int, Tensor]
    """By ratio, `[num_sequences, max_entries]` int64: cache index of each sequence's visible entries, 0 as filler."""
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
        ring = window_ring_size(config)
        starts = [s.start_position for s in sequences]
        decoder_starts = [min(max(s.start_position, s.decoder_start), s.end_position) for s in sequences]
        all_rows = _layout_rows(sequences, starts, [0] * len(sequences), config.sliding_window, ring)
        tail = _layout_rows(
            sequences, decoder_starts, [s.decoder_start for s in sequences], config.sliding_window, ring
        )
        first_rows = [begin for begin, _ in all_rows.spans]
        decoder_rows = torch.cat(
            [
                torch.arange(first + kept_from - start, first + s.end_position - start)
                for s, first, start, kept_from in zip(
                    sequences, first_rows, starts, decoder_starts, strict=True
                )
            ]
        )
        ratios = sorted({config.compress_ratios[layer] for layer in config.kv_source_layer_ids})
        half_rows, half_idx = _tail_rows(sequences, starts, all_rows.spans, half_ring_size(config))
        num_entries = {r: tuple(s.end_position // r for s in sequences) for r in ratios}
        batch = cls(
            token_ids=torch.tensor([t for s in sequences for t in s.token_ids]),
            lookback=_lookback(sequences, config.engram_max_ngram_size),
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
            last_rows=torch.tensor([end - 1 for _, end in tail.spans]),
            writes={
                r: _entry_writes(sequences, first_rows, r, geometry, half_ring_size(config)) for r in ratios
            },
            half_rows=half_rows,
            half_idx=half_idx,
            entry_idx={
                r: _entry_table(sequences, num_entries[r], geometry.entries_per_block(r)) for r in ratios
            },
            num_entries=num_entries,
        )
        return _to(batch, device)


def _layout_rows(
    sequences: Sequence[SequenceRows], starts: Sequence[int], floors: Sequence[int], window: int, ring: int
) -> Rows:
    """Rows from `starts[i]` to each sequence's end; window keys before `floors[i]` do not exist."""
    spans: list[tuple[int, int]] = []
    positions, owners, new, cached = [], [], [], []
    begin = 0
    for index, (s, start, floor) in enumerate(zip(sequences, starts, floors, strict=True)):
        num_rows = s.end_position - start
        spans.append((begin, begin + num_rows))
        position = torch.arange(start, s.end_position)
        key = position.unsqueeze(1) - torch.arange(window - 1, -1, -1)  # [num_rows, window], oldest first
        is_new = key >= start
        in_ring = (key >= max(floor, 0)) & ~is_new
        new.append(torch.where(is_new, key - start + begin, -1))
        cached.append(torch.where(in_ring, s.state_slot * ring + key % ring, -1))
        positions.append(position)
        owners.append(torch.full((num_rows,), index))
        begin += num_rows
    kept, kept_ring = _tail_rows(sequences, starts, spans, ring)
    return Rows(
        positions=torch.cat(positions),
        sequence=torch.cat(owners),
        spans=tuple(spans),
        window_new=torch.cat(new),
        window_ring=torch.cat(cached),
        kept=kept,
        kept_ring=kept_ring,
    )


def _tail_rows(
    sequences: Sequence[SequenceRows], starts: Sequence[int], spans: Sequence[tuple[int, int]], ring: int
) -> tuple[Tensor, Tensor]:
    """The last `ring` rows of each sequence (each ring row is written once) and their places in the rings."""
    rows, places = [], []
    for s, start, (begin, end) in zip(sequences, starts, spans, strict=True):
        row = torch.arange(max(begin, end - ring), end)
        rows.append(row)
        places.append(s.state_slot * ring + (start + row - begin) % ring)
    return torch.cat(rows), torch.cat(places)


def _lookback(sequences: Sequence[SequenceRows], ngram: int) -> Tensor:
    rows = []
    for s in sequences:
        known = [-1] * (ngram - 1) + list(s.history)
        tokens = torch.tensor(known[len(known) - (ngram - 1) :] + list(s.token_ids))
        rows.append(tokens.unfold(0, ngram, 1).flip(1))
    return torch.cat(rows)


def _entry_writes(
    sequences: Sequence[SequenceRows],
    first_rows: Sequence[int],
    ratio: int,
    geometry: CacheGeometry,
    half_ring: int,
) -> EntryWrites:
    rows, previous_rows, previous_halves, positions, cache_idx = [], [], [], [], []
    for s, first_row in zip(sequences, first_rows, strict=True):
        last = torch.arange(s.start_position, s.end_position)
        last = last[(last + 1) % ratio == 0]
        first = last - (ratio - 1)
        block = torch.tensor(s.block_table)[last // geometry.block_size]
        rows.append(first_row + last - s.start_position)
        previous_rows.append(torch.where(first >= s.start_position, first_row + first - s.start_position, -1))
        previous_halves.append(s.state_slot * half_ring + first % half_ring)
        positions.append(first)
        cache_idx.append(block * geometry.entries_per_block(ratio) + last % geometry.block_size // ratio)
    return EntryWrites(
        rows=torch.cat(rows),
        previous_rows=torch.cat(previous_rows),
        previous_halves=torch.cat(previous_halves),
        positions=torch.cat(positions),
        cache_idx=torch.cat(cache_idx),
    )


def _entry_table(sequences: Sequence[SequenceRows], num_entries: Sequence[int], per_block: int) -> Tensor:
    table = torch.zeros(len(sequences), max(num_entries), dtype=torch.int64)
    for row, s, n in zip(table, sequences, num_entries, strict=True):
        blocks = torch.tensor(s.block_table, dtype=torch.int64)[: -(-n // per_block)]
        row[:n] = (blocks.unsqueeze(1) * per_block + torch.arange(per_block)).flatten()[:n]
    return table


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
