"""Attention works through its rows tile by tile: bounded memory, the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import row_tiles
from kernels.reference import attention, indexer
from model.attention import Attention
from model.numerics import Numerics
from tests.model.builders import GOLDEN, create_tiny_model
from tests.model.test_golden import TOKENS


def test_tiles_hold_the_rows_that_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tiles, "TILE_BYTES", 1000)

    def sizes(num_rows: int, row_bytes: int) -> list[int]:
        tiles = list(row_tiles.split_rows(5, 5 + num_rows, row_bytes))
        assert [row for tile in tiles for row in range(99)[tile]] == list(range(5, 5 + num_rows))
        return [tile.stop - tile.start for tile in tiles]

    assert sizes(7, 300) == [3, 3, 1]
    assert sizes(6, 333) == [3, 3]
    assert sizes(2, 300) == [2]
    assert sizes(2, 5000) == [1, 1], "a row is never cut"
    assert sizes(3, 0) == [3]
    assert sizes(0, 300) == []


@pytest.mark.parametrize("numerics", [GOLDEN, Numerics()], ids=["fp64", "fp32"])
def test_no_bit_depends_on_the_tiles(
    numerics: Numerics, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prefill() -> Tensor:
        """What two sequences leave for the head, in two chunks, one of them with decoder replay."""
        model = create_tiny_model(tiny_checkpoints["A"], numerics)
        model.step(model.rows(TOKENS[5:], 0, 23, slot=1), model.rows(TOKENS, 0, 40, decoder_start=54))
        _, hidden = model.step(
            model.rows(TOKENS[5:], 23, 24, slot=1), model.rows(TOKENS, 40, 70, decoder_start=54)
        )
        return hidden.normed

    expected = prefill()
    for tile_rows in (1, 2, 3):

        def split_rows(begin: int, end: int, row_bytes: int, tile_rows: int = tile_rows) -> Iterator[slice]:
            return (slice(row, min(row + tile_rows, end)) for row in range(begin, end, tile_rows))

        for operators in (attention, indexer):
            monkeypatch.setattr(operators, "split_rows", split_rows)
        assert torch.equal(prefill(), expected), f"{tile_rows=}"


class PeakMemory(TorchDispatchMode):
    """Largest sum of the storages alive at once, of those allocated in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in old and key not in self._alive:
                self._alive[key] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, key, None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def test_the_budget_bounds_the_memory_of_attention(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = create_tiny_model(tiny_checkpoints["A"], Numerics())
    peaks: list[int] = []
    attend = Attention.attend

    def measured_attend(self: Attention, *args: Any) -> Tensor:
        with PeakMemory() as memory:
            result = attend(self, *args)
        peaks.append(memory.peak)
        return result

    monkeypatch.setattr(Attention, "attend", measured_attend)

    def peak(tile_bytes: int) -> int:
        monkeypatch.setattr(row_tiles, "TILE_BYTES", tile_bytes)
        peaks.clear()
        model.step(model.rows(TOKENS * 2, 0, 120))
        return max(peaks)

    bound = peak(0)  # one row a tile: what the budget does not reach
    budget = bound // 4
    assert peak(1 << 30) > bound + 2 * budget, "the step is too small to tell"
    assert peak(budget) <= bound + budget
