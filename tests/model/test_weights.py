"""A rank reads its own rows and columns of the checkpoint and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.parallel import ParallelLayout
from model.weights import load_weights

WORLD = 8
CUT_MATRICES = ("attn.wq_b", "attn.wo_a", "attn.wo_b", "experts.w1", "experts.w2", "experts.w3", "engram.wkv")
CUT = (
    "embed.weight",
    "head.weight",
    "attn.attn_sink",
    *(f"{name}.weight" for name in CUT_MATRICES),
    *(f"{name}.scale" for name in CUT_MATRICES),
)
"""Ends of the names of tensors of which every rank holds an equal part."""
UNREAD = ("bias_vl", ".ffn.experts.")


class RecordingReader:
    """Counts the elements that are read of each tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.num_read: Counter[str] = Counter()

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        part = self._checkpoint.read(name, rows, columns)
        self.num_read[name] += part.numel()
        return part


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints: dict[str, Path]) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoints["wide"])


def read_by(checkpoint: Checkpoint, rank: int) -> Counter[str]:
    reader = RecordingReader(checkpoint)
    config = checkpoint.config.text_config
    load_weights(reader, config, ParallelLayout(rank, WORLD, WORLD), torch.device("cpu"), torch.float32)
    return reader.num_read


def size_of(checkpoint: Checkpoint, name: str) -> int:
    return torch.Size(checkpoint.spec(name).shape).numel()


def is_cut(name: str) -> bool:
    # The drafter looks up any token's Markov embedding, so every rank has all of them.
    return name.endswith(CUT) and "indexer" not in name and "markov_head.embed" not in name


def test_a_rank_reads_an_equal_part_of_what_is_cut_and_all_of_the_rest_once(checkpoint: Checkpoint) -> None:
    for rank in (0, 5, WORLD - 1):
        num_read = read_by(checkpoint, rank)
        for name in checkpoint.names:
            if ".engram.embed." in name:
                continue  # cut at look-up columns, which are of about equal size
            expected = size_of(checkpoint, name) // (WORLD if is_cut(name) else 1)
            assert num_read[name] == (0 if any(part in name for part in UNREAD) else expected), (
                f"{rank=} {name=}"
            )


def test_the_ranks_together_read_every_engram_row_once(checkpoint: Checkpoint) -> None:
    total: Counter[str] = Counter()
    for rank in range(WORLD):
        total += read_by(checkpoint, rank)
    for name in (n for n in checkpoint.names if ".engram.embed." in n):
        assert total[name] == size_of(checkpoint, name)


def test_a_model_that_cannot_be_cut_is_refused_by_the_dimension(tiny_checkpoints: dict[str, Path]) -> None:
    narrow = Checkpoint.open(tiny_checkpoints["A"])
    with pytest.raises(ValueError, match="o_groups = 2 cannot be cut into 4 parts"):
        load_weights(
            narrow, narrow.config.text_config, ParallelLayout(0, 4, 4), torch.device("cpu"), torch.float32
        )
