"""The layout of a step: each sequence's own, whatever is beside it, at a cost that does not depend on how many."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.batch import EntryWrites, ForwardBatch, Rows, SequenceRows
from model.config import CheckpointConfig
from model.kv_cache import CacheGeometry
from model.kv_layout import window_ring_size

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


def shifted(row_idx: Tensor, offset: int) -> Tensor:
    """Row indices of a sequence whose rows begin at `offset`."""
    return torch.where(row_idx < 0, row_idx, row_idx + offset)


def rows_of(rows: Rows, index: int) -> dict[str, Any]:
    """What `rows` says of one sequence."""
    part = slice(*rows.spans[index])
    return {
        "positions": rows.positions[part].tolist(),
        "sequence": set(rows.sequence[part].tolist()),
        "window_new": rows.window_new[part],
        "window_ring": rows.window_ring[part].tolist(),
    }


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
        begins = [begin for begin, _ in step.encoder.spans]
        decoder_begins = [begin for begin, _ in step.decoder.spans]

        assert step.token_ids.tolist() == concatenated([a.token_ids for a in alone])
        assert step.lookback.tolist() == concatenated([a.lookback for a in alone])
        for name in ("encoder", "boundary", "decoder"):
            rows = getattr(step, name)
            offsets = decoder_begins if name == "decoder" else begins
            for index, other in enumerate(getattr(a, name) for a in alone):
                actual, expected = rows_of(rows, index), rows_of(other, 0)
                assert actual["sequence"] <= {index}
                assert actual["positions"] == expected["positions"]
                assert actual["window_ring"] == expected["window_ring"]
                assert torch.equal(actual["window_new"], shifted(expected["window_new"], offsets[index]))
            others = [getattr(a, name) for a in alone]
            assert rows.kept.tolist() == concatenated(
                [shifted(o.kept, b) for o, b in zip(others, offsets, strict=True)]
            )
            assert rows.kept_ring.tolist() == concatenated([o.kept_ring for o in others])
        pairs = list(zip(alone, begins, strict=True))
        assert step.decoder_rows.tolist() == concatenated([a.decoder_rows + b for a, b in pairs])
        assert step.last_rows.tolist() == concatenated(
            [a.last_rows + b for a, b in zip(alone, decoder_begins, strict=True)]
        )
        assert step.half_rows.tolist() == concatenated([a.half_rows + b for a, b in pairs])
        assert step.half_idx.tolist() == concatenated([a.half_idx for a in alone])
        for ratio, writes in step.writes.items():
            parts = [a.writes[ratio] for a in alone]
            assert writes.rows.tolist() == concatenated(
                [p.rows + b for p, b in zip(parts, begins, strict=True)]
            )
            assert writes.previous_rows.tolist() == concatenated(
                [shifted(p.previous_rows, b) for p, b in zip(parts, begins, strict=True)]
            )
            for name in ("previous_halves", "positions", "cache_idx"):
                assert getattr(writes, name).tolist() == concatenated([getattr(p, name) for p in parts])
        for index, a in enumerate(alone):
            num_blocks = a.block_table.shape[1]
            assert torch.equal(step.block_table[index, :num_blocks], a.block_table[0])
            assert not step.block_table[index, num_blocks:].any()


def test_a_chunk_reads_old_keys_from_the_ring_and_new_ones_from_the_step() -> None:
    batch = build(create_sequence(5, 8, slot=2))
    ring = window_ring_size(CONFIG)
    assert batch.encoder.window_new.tolist() == [[-1, -1, -1, 0], [-1, -1, 0, 1], [-1, 0, 1, 2]]
    places = [[2 * ring + p % ring if p < 5 else -1 for p in range(i - 3, i + 1)] for i in range(5, 8)]
    assert batch.encoder.window_ring.tolist() == places
    assert batch.lookback.tolist() == [[2000 + p for p in range(i, i - 4, -1)] for i in range(5, 8)]


def test_entries_go_where_the_block_table_says() -> None:
    batch = build(create_sequence(5, 20, slot=1))
    # Positions 5 .. 19 lie in blocks 200, 201 and 202, which hold eight tokens or four pairs each.
    single: EntryWrites = batch.writes[1]
    assert single.cache_idx.tolist() == [(200 + p // 8) * 8 + p % 8 for p in range(5, 20)]
    pairs = batch.writes[2]
    assert pairs.positions.tolist() == list(range(4, 20, 2))
    assert pairs.cache_idx.tolist() == [(200 + p // 8) * 4 + p % 8 // 2 for p in range(4, 20, 2)]
    assert pairs.previous_rows.tolist() == [-1, *range(1, 15, 2)]  # token 4 came in an earlier step


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
