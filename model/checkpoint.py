"""Checkpoint: a folder in the released layout, verified as a whole when opened, read part by part.

Source: `spec/model.md` section 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.checkpoint_layout import CheckpointLayout, verify_layout
from model.config import CheckpointConfig
from model.inventory import StoredDtype, TensorSpec
from model.shard_file import CheckpointError, map_file
from model.value_check import find_bad_value

TORCH_DTYPES: Final = {
    StoredDtype.F8_E4M3: torch.float8_e4m3fn,
    StoredDtype.F8_E8M0: torch.uint8,
    StoredDtype.I8: torch.uint8,
    StoredDtype.BF16: torch.bfloat16,
    StoredDtype.F32: torch.float32,
}
"""What tensors are read as: scales as ue8m0 bytes, packed e2m1 codes as bytes."""


class TensorLocation(NamedTuple):
    """Where the bytes of a tensor lie, for readers that copy them themselves; row-major, contiguous."""

    path: Path
    offset: int
    num_bytes: int


class Checkpoint:
    """A verified checkpoint, open for reading by any number of threads.

    Layout is verified by `open`, values by the read that first touches them: an engine that has read all its
    tensors has seen no NaN scale and no number that is not finite.

    Invariant: every name of `expected_tensors(config)`, and no other, can be read.

    Args:
        path: the folder.
        layout: what verification found in it.
    """

    def __init__(self, path: Path, layout: CheckpointLayout) -> None:
        self.path = path
        self._layout = layout
        self._maps = {file: map_file(file) for file in {s.path for s in layout.sources.values()}}

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Verify a checkpoint and map its files; no tensor is read or allocated.

        Args:
            path: folder with `config.json`, the index and the shards.
        Raises: CheckpointError naming the file and the tensor.
        """
        return cls(path, verify_layout(path))

    @property
    def config(self) -> CheckpointConfig:
        """The whole `config.json`."""
        return self._layout.config

    @property
    def content_hash(self) -> str:
        """Identifies the checkpoint, wherever its folder is."""
        return self._layout.content_hash

    @property
    def files(self) -> tuple[Path, ...]:
        """Files with tensors in them."""
        return tuple(self._maps)

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors, in the order of computation."""
        return tuple(self._layout.sources)

    def spec(self, name: str) -> TensorSpec:
        """Stored dtype and shape of a tensor."""
        return self._layout.sources[name].stored.spec

    def location(self, name: str) -> TensorLocation:
        """File, first byte and size of a tensor. Who reads there checks the values: `find_bad_value`."""
        source = self._layout.sources[name]
        return TensorLocation(source.path, source.stored.offset, source.stored.spec.num_bytes)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Copy a tensor, or a part of it without touching the other rows.

        Args:
            name: canonical name.
            rows: part of the first axis; None means all.
            columns: part of the second axis, in stored elements (two codes each in a packed tensor).
        Returns: contiguous CPU tensor that owns its memory, dtype as in `TORCH_DTYPES`.
        Raises: CheckpointError if a value is NaN or not finite; ValueError if a slice leaves the tensor.
        """
        spec = self.spec(name)
        shape = tuple(map(len, _part(name, spec, rows, columns)))
        out = torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype])
        self.read_into(out, name, rows, columns)
        return out

    def read_into(
        self, out: Tensor, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> None:
        """As `read`, into memory of the caller's, such as a section of an expert page.

        Args:
            out: contiguous CPU tensor of the part's shape, dtype as in `TORCH_DTYPES`.
            name: canonical name.
            rows: part of the first axis; None means all.
            columns: part of the second axis, in stored elements.
        Raises: as `read`; `out` then holds the bad value.
        """
        spec = self.spec(name)
        part = _part(name, spec, rows, columns)
        shape = tuple(map(len, part))
        assert out.shape == shape, f"{name}: {out.shape=}, expected {shape}"
        assert out.dtype == TORCH_DTYPES[spec.dtype], f"{name}: {out.dtype=}"
        assert out.is_contiguous(), f"{name}: {out.stride()=}"
        copied = out.view(torch.uint8).numpy()
        np.copyto(copied, self._stored_bytes(name)[_byte_index(part, spec.dtype.num_bytes)])
        bad = find_bad_value(copied.reshape(-1), spec.dtype)
        if bad is not None:
            within_part = np.unravel_index(bad.index, shape)
            element = [axis[int(i)] for axis, i in zip(part, within_part, strict=True)]
            raise CheckpointError(self.location(name).path, f"element {element} is {bad.meaning}", name)

    def _stored_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, mapped: its shape with the last axis in bytes."""
        path, offset, num_bytes = self.location(name)
        spec = self.spec(name)
        *outer, last = spec.shape
        return self._maps[path][offset : offset + num_bytes].reshape(*outer, last * spec.dtype.num_bytes)


def _part(name: str, spec: TensorSpec, rows: slice | None, columns: slice | None) -> tuple[range, ...]:
    """The indices to read on each axis."""
    asked = (rows, columns)[: len(spec.shape)]
    if columns is not None and len(spec.shape) < 2:
        raise ValueError(f"{name} {list(spec.shape)} has no columns")
    return tuple(_axis_part(name, size, part) for size, part in zip(spec.shape, asked, strict=True))


def _axis_part(name: str, size: int, part: slice | None) -> range:
    if part is None:
        return range(size)
    start = 0 if part.start is None else part.start
    stop = size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: {part} is no range of an axis of {size}")
    return range(start, stop)


def _byte_index(part: tuple[range, ...], element_bytes: int) -> tuple[slice, ...]:
    *outer, last = part
    in_bytes = slice(last.start * element_bytes, last.stop * element_bytes)
    return (*(slice(axis.start, axis.stop) for axis in outer), in_bytes)
