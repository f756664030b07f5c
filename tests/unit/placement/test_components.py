from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.config import CheckpointConfig
from model.inventory import StoredDtype, TensorSpec, expected_tensors
from model.parallel import ParallelLayout
from model.tiny import tiny_config
from model.weights import EngramWeights, load_weights
from placement.components import components, engram_table_bytes, largest_fp8_matrix

RELEASED = CheckpointConfig.load(Path(__file__).parents[2] / "data" / "released_config.json")
COMPONENTS = components(RELEASED)
TINY = CheckpointConfig.model_validate(tiny_config())
DTYPES = {
    StoredDtype.F8_E4M3: torch.float8_e4m3fn,
    StoredDtype.F8_E8M0: torch.uint8,
    StoredDtype.BF16: torch.bfloat16,
    StoredDtype.F32: torch.float32,
}

TABLE = """
routed experts | 92,160 | 543,581,798,400 | 288,777,830,400
shared experts | 240 | 1,415,577,600 | 1,416,960,000
attention core | 520 | 5,064,696,320 | 5,069,721,600
indexers | 32 | 43,516,416 | 45,130,752
compressors | 11 | 18,352,128 | 36,704,256
routers | 120 | 78,673,920 | 157,409,280
hyper-connections | 240 | 39,323,760 | 157,295,040
layer norms | 80 | 409,600 | 819,200
engram projections | 8 | 314,654,720 | 315,043,840
embed | 1 | 661,913,600 | 1,323,827,200
head | 1 | 661,913,600 | 1,323,827,200
final norm | 1 | 5,120 | 10,240
engram tables | 4 | 196,613,849,600 | 202,758,032,400
DSpark routed experts | 2,304 | 13,589,544,960 | 7,219,445,760
DSpark other | 97 | 635,817,570 | 713,428,872
vision, aligner, delimiters | 266 | 485,268,480 | 970,536,960
"""
"""Section 11 of the specification: component, tensors, parameters, bytes."""
LINES = [tuple(line.split(" | ")) for line in TABLE.strip().splitlines()]


@pytest.mark.parametrize(("name", "num_tensors", "num_parameters", "num_bytes"), LINES)
def test_a_component_has_the_line_of_the_specification(
    name: str, num_tensors: str, num_parameters: str, num_bytes: str
) -> None:
    (found,) = [component for component in COMPONENTS if component.name == name]
    numbers = [found.num_tensors, found.num_parameters, found.num_bytes]
    assert [f"{number:,}" for number in numbers] == [num_tensors, num_parameters, num_bytes]


def test_the_checkpoint_is_the_sum_of_its_components() -> None:
    found = COMPONENTS
    assert [component.name for component in found] == [name for name, *_ in LINES]
    assert sum(component.num_bytes for component in found) == 510_286_023_000
    assert round(510_286_023_000 / 2**30, 1) == 475.2
    assert sum(component.num_tensors for component in found) == 96_085
    backbone = found[:12]
    assert sum(component.num_tensors for component in backbone) == 93_414
    assert sum(component.num_parameters for component in backbone) == 551_880_835_184


def test_without_vision_there_is_no_such_component() -> None:
    text_only = components(RELEASED.model_copy(update={"vision_config": None}))
    assert text_only == COMPONENTS[:-1]


class ShapeReader:
    """A TensorReader of tensors that have shapes alone."""

    def __init__(self, tensors: dict[str, TensorSpec]) -> None:
        self._tensors = tensors

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        spec = self._tensors[name]
        whole = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
        part = whole if rows is None else whole[rows]
        return part if columns is None else part[:, columns]


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


@pytest.mark.parametrize(
    ("config", "world_size", "rank"),
    [
        (RELEASED, 1, 0),
        (RELEASED, 4, 3),
        (RELEASED, 8, 0),
        (RELEASED, 8, 7),
        (TINY, 1, 0),
        (TINY, 2, 1),
    ],
)
def test_a_rank_keeps_what_its_loader_keeps(config: CheckpointConfig, world_size: int, rank: int) -> None:
    layout, text = ParallelLayout(rank, world_size), config.text_config
    reader = ShapeReader(expected_tensors(config))
    weights = load_weights(reader, text, layout, torch.device("meta"), torch.float32)
    tables = [
        table
        for layer in weights.layers
        if isinstance(layer.engram, EngramWeights)
        for table in (layer.engram.codes, layer.engram.scales)
    ]
    table_bytes = sum(table.nbytes for table in tables)
    kept_bytes = sum(tensor.nbytes for tensor in tensors_in(weights)) - table_bytes
    assert sum(component.device_bytes for component in components(config, world_size)) == kept_bytes
    assert engram_table_bytes(text, layout) == table_bytes
    table_shapes = {table.shape for table in tables}
    matrices = [
        tensor
        for tensor in tensors_in(weights)
        if tensor.dtype == torch.float8_e4m3fn and tensor.shape not in table_shapes
    ]
    assert largest_fp8_matrix(text, world_size) == max(matrix.numel() for matrix in matrices)


def test_the_ranks_together_keep_every_table_row_once() -> None:
    tables = {component.name: component.num_bytes for component in COMPONENTS}["engram tables"]
    ranks = [ParallelLayout(rank, 8, 8) for rank in range(8)]
    assert sum(engram_table_bytes(RELEASED.text_config, rank) for rank in ranks) == tables
