"""The layout of a step: each sequence's own, whatever is beside it, at a cost that does not depend on how many."""

from __future__ import annotations

import itertools
import random
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.batch import ForwardBatch, Rows, SequenceRows
from model.config import CheckpointConfig
from model.kv_cache import CacheGeometry
from model.kv_layout import half_ring_size, window_ring_size

CONFIG = CheckpointConfig.load(Path(__file__).parent.parent / "data" / "released_config.json").text_config
CONFIG = CONFIG.model_copy(update={"sliding_window": 4})
BLOCK_SIZE = 8
GEOMETRY = CacheGeometry(num_slots=8, num_blocks=1000, block_size=BLOCK_SIZE)


def create_sequence(start: int, end: int, slot: int = 0, decoder_start: int = 0) -> SequenceRows:
    """Tokens `1000 * slot + position`, blocks `100 * (slot + 1) + number`."""
    return SequenceRows(
        state_slot=slot,
        start_position=start,
        token_ids=[1000 * slot + p for p in range(start, end)],
        history=[1000 * slot + p for p in range(max(0, start - 3), start)],
        block_table=array("i", [100 * (slot + 1) + b for b in range(-(-end // BLOCK_SIZE))]).tobytes(),
        decoder_start=decoder_start,
    )


def build(*sequences: SequenceRows) -> ForwardBatch:
    return ForwardBatch.build(sequences, CONFIG, GEOMETRY)


def moved(row_idx: Tensor, offset: int) -> list[int]:
    """Row indices of a sequence whose rows begin at `offset`."""
    return torch.where(row_idx < 0, row_idx, row_idx + offset).tolist()


def windows(rows: Rows) -> list[list[tuple[str, int] | None]]:
    """Where each evaluated row finds the keys of its window, oldest position first: as `WindowPlaces` says."""
    ring = window_ring_size(CONFIG)
    found = []
    for position, sequence in zip(*(t.tolist() for t in rows.queries), strict=True):
        start, first_new, offset, floor = (int(t[sequence]) for t in rows.places)
        keys: list[tuple[str, int] | None] = []
        for key in range(position - CONFIG.sliding_window + 1, position + 1):
            if key < floor:
                keys.append(None)
            elif key >= first_new:
                keys.append(("new", key + offset))
            else:
                keys.append(("ring", start + key % ring))
        found.append(keys)
    return found


def concatenated(values: list[Tensor]) -> list[Any]:
    return torch.cat(values).tolist()


def test_a_step_lays_out_every_sequence_as_if_it_were_alone() -> None:
    draw = random.Random(0)
    for _ in range(100):
        sequences = []
        for slot in draw.sample(range(8), draw.randint(1, 5)):
            start = draw.choice([0, 1, 2, draw.randrange(60)])
            end = start + draw.choice([1, 2, draw.randrange(1, 60)])
            sequences.append(create_sequence(start, end, slot, draw.choice([0, start, draw.randrange(130)])))
        step, alone = build(*sequences), [build(s) for s in sequences]
        begins = list(itertools.accumulate((a.encoder.num_rows for a in alone), initial=0))[:-1]
        decoder_begins = list(itertools.accumulate((a.decoder.num_rows for a in alone), initial=0))[:-1]

        for name in ("token_ids", "lookback", "half_start", "half_rows"):
            assert getattr(step, name).tolist() == concatenated([getattr(a, name) for a in alone]), name
        for name in ("encoder", "boundary", "decoder"):
            rows, others = getattr(step, name), [getattr(a, name) for a in alone]
            offsets = decoder_begins if name == "decoder" else begins
            assert rows.queries.positions.tolist() == concatenated([o.queries.positions for o in others])
            assert rows.queries.sequence.tolist() == [
                i for i, o in enumerate(others) for _ in range(o.num_rows)
            ]
            assert rows.ring_rows.tolist() == concatenated([o.ring_rows for o in others])
            assert windows(rows) == [
                [("new", key[1] + offset) if key and key[0] == "new" else key for key in keys]
                for other, offset in zip(others, offsets, strict=True)
                for keys in windows(other)
            ]
        pairs = list(zip(alone, begins, strict=True))
        assert step.decoder_rows.tolist() == [row for a, b in pairs for row in moved(a.decoder_rows, b)]
        assert step.last_rows.tolist() == concatenated(
            [a.last_rows + b for a, b in zip(alone, decoder_begins, strict=True)]
        )
        for ratio, rows in step.entry_rows.items():
            assert rows.tolist() == concatenated([a.entry_rows[ratio] for a in alone])
        for index, a in enumerate(alone):
            num_blocks = a.block_table.shape[1]
            assert torch.equal(step.block_table[index, :num_blocks], a.block_table[0])
            assert not step.block_table[index, num_blocks:].any()
        assert step.num_positions == max(s.end_position for s in sequences)


def test_a_chunk_reads_old_keys_from_the_ring_and_new_ones_from_the_step() -> None:
    batch = build(create_sequence(5, 8, slot=2))
    ring = window_ring_size(CONFIG)

    def place(position: int) -> tuple[str, int]:
        return ("ring", 2 * ring + position % ring) if position < 5 else ("new", position - 5)

    assert windows(batch.encoder) == [[place(p) for p in range(i - 3, i + 1)] for i in range(5, 8)]
    assert batch.encoder.ring_rows.tolist() == [2 * ring + p % ring for p in range(5, 8)]
    assert batch.lookback.tolist() == [[2000 + p for p in range(i, i - 4, -1)] for i in range(5, 8)]


def test_only_the_last_rows_of_a_long_chunk_are_kept() -> None:
    batch = build(create_sequence(3, 60, slot=1))
    for kept, size in (
        (batch.encoder.ring_rows, window_ring_size(CONFIG)),
        (batch.half_rows, half_ring_size(CONFIG)),
    ):
        assert kept.tolist() == [size + p % size if p >= 60 - size else -1 for p in range(3, 60)]


def test_entries_go_where_the_block_table_says() -> None:
    batch = build(create_sequence(5, 20, slot=1))
    # Positions 5 .. 19 lie in blocks 200, 201 and 202, which hold eight tokens or four pairs each.
    assert batch.entry_rows[1].tolist() == [(200 + p // 8) * 8 + p % 8 for p in range(5, 20)]
    pairs = [(200 + p // 8) * 4 + p % 8 // 2 if p % 2 else -1 for p in range(5, 20)]
    assert batch.entry_rows[2].tolist() == pairs


def test_building_takes_no_more_tensor_operations_for_many_long_sequences_than_for_a_short_one() -> None:
    class CountOperations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    def count(*sequences: SequenceRows) -> int:
        with CountOperations() as operations:
            build(*sequences)
        return operations.count

    few = count(create_sequence(1, 2))
    assert count(*(create_sequence(700, 750, slot) for slot in range(8))) <= few
