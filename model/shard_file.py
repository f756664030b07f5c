"""One safetensors file: its header, read and checked, and its bytes, mapped.

Layout of a file: 8 bytes little-endian header length, a JSON header, the tensors' bytes without gaps.
Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from model.inventory import StoredDtype, TensorSpec

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_Size = Annotated[int, msgspec.Meta(ge=0)]


class CheckpointError(ValueError):
    """A checkpoint that cannot be served: which file, which tensor if it is about one, and what is wrong."""

    def __init__(self, path: Path, problem: str, tensor: str | None = None) -> None:
        super().__init__(path, problem, tensor)
        self.path = path
        self.problem = problem
        self.tensor = tensor

    def __str__(self) -> str:
        subject = f"{self.path}: tensor {self.tensor}" if self.tensor else str(self.path)
        return f"{subject}: {self.problem}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    spec: TensorSpec
    offset: int
    """First byte, counted from the start of the file."""

    @property
    def end(self) -> int:
        """Byte after the last."""
        return self.offset + self.spec.num_bytes


class _HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: StoredDtype
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class ShardFile:
    """A safetensors file whose header fits its size; nothing of the tensors has been read.

    Invariant: the tensors cover everything behind the header, without gap or overlap.

    Args:
        path: the file.
    Raises: CheckpointError if it cannot be read, is truncated or its header does not describe it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            num_bytes = path.stat().st_size
            self.header = _read_header(path, num_bytes)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read ({error.strerror})") from error
        self._data_start = _LENGTH_BYTES + len(self.header)
        self.tensors = _parse_header(path, self.header, self._data_start)
        _check_extents(path, self.tensors, self._data_start, num_bytes)

    def read_first_data(self, num_bytes: int) -> bytes:
        """The first bytes behind the header, fewer if there are no more."""
        with self.path.open("rb") as file:
            file.seek(self._data_start)
            return file.read(num_bytes)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """All bytes of a file that is not empty, read-only; a page is read when it is first touched."""
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)


def _read_header(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        limit = min(num_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES)
        if length > limit:
            raise CheckpointError(
                path,
                f"is truncated or no safetensors file: its first bytes announce a header of {length} bytes, "
                f"the file has {num_bytes}, a header at most {_MAX_HEADER_BYTES}",
            )
        return file.read(length)


def _parse_header(path: Path, header: bytes, data_start: int) -> dict[str, StoredTensor]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(path, f"its header is no JSON object ({error})") from error
    entries.pop("__metadata__", None)
    return {name: _parse_entry(path, name, raw, data_start) for name, raw in entries.items()}


def _parse_entry(path: Path, name: str, raw: msgspec.Raw, data_start: int) -> StoredTensor:
    try:
        entry = msgspec.json.decode(raw, type=_HeaderEntry)
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            path, f"its header entry {bytes(raw)[:200]!r} is invalid: {error}", name
        ) from error
    spec = TensorSpec(entry.dtype, entry.shape)
    begin, end = entry.data_offsets
    if end - begin != spec.num_bytes:
        raise CheckpointError(
            path,
            f"data_offsets [{begin}, {end}] span {end - begin} bytes, "
            f"but {spec.dtype} {list(spec.shape)} takes {spec.num_bytes}",
            name,
        )
    return StoredTensor(spec, data_start + begin)


def _check_extents(path: Path, tensors: dict[str, StoredTensor], data_start: int, num_bytes: int) -> None:
    """Check that the tensors lie end to end from `data_start` to the end of the file."""
    end, previous = data_start, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].end)):
        if stored.offset < end:
            raise CheckpointError(
                path, f"starts at byte {stored.offset}, inside {previous}, which ends at {end}", name
            )
        if stored.offset > end:
            raise CheckpointError(path, f"starts at byte {stored.offset}, but {previous} ends at {end}", name)
        if stored.end > num_bytes:
            raise CheckpointError(
                path, f"ends at byte {stored.end}, but the file has {num_bytes}: it is truncated", name
            )
        end, previous = stored.end, name
    if end != num_bytes:
        raise CheckpointError(path, f"has {num_bytes} bytes, but its last tensor {previous} ends at {end}")
