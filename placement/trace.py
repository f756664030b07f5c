"""Trace: which experts the router chose, step by step. Recorded traces and generated ones look the same.

A file is a NumPy archive (`.npz`, compressed) with `version`, `label`, `num_experts`, `topk_idx` and, if the next
layer's router was asked ahead, `predicted_idx`.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

VERSION: Final = 1

Ids = NDArray[np.uint16]


class TraceError(ValueError):
    """A trace that cannot be used; the message says what is wrong in it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The routing of consecutive steps.

    Invariant: the ids of one row and layer differ from each other and are below `num_experts`.
    """

    label: str
    num_experts: int
    topk_idx: Ids
    """`[num_steps, num_rows, num_layers, num_topk]`: what the router chose."""
    predicted_idx: Ids | None = None
    """Same shape: what the layer's router said to the hidden state of the layer before. None if it was not asked."""

    @property
    def num_steps(self) -> int:
        """Steps recorded."""
        return int(self.topk_idx.shape[0])

    @property
    def num_rows(self) -> int:
        """Rows of one step."""
        return int(self.topk_idx.shape[1])

    @property
    def num_layers(self) -> int:
        """Layers with routed experts."""
        return int(self.topk_idx.shape[2])

    def row_counts(self, steps: slice = slice(None)) -> NDArray[np.int32]:
        """Rows by step, layer and expert, `[num_steps, num_layers, num_experts]`; 0 is an expert not chosen."""
        return _row_counts(self.topk_idx[steps], self.num_experts)

    def predicted_counts(self, steps: slice = slice(None)) -> NDArray[np.int32]:
        """As `row_counts`, of the predictions.

        Raises: TraceError if the trace has none.
        """
        if self.predicted_idx is None:
            raise TraceError(f"trace {self.label!r} has no predictions of the next layer's router")
        return _row_counts(self.predicted_idx[steps], self.num_experts)

    def routed_slots(self, steps: slice = slice(None)) -> NDArray[np.int64]:
        """Routed slots by layer and expert over all of `steps`, `[num_layers, num_experts]`: what a profile counts."""
        layers = np.arange(self.num_layers)[:, None] * self.num_experts
        flat = (self.topk_idx[steps] + layers).ravel()
        counts = np.bincount(flat, minlength=self.num_layers * self.num_experts)
        return counts.reshape(self.num_layers, self.num_experts)


def save(trace: Trace, path: Path) -> None:
    """Write a trace.

    Raises: TraceError if it breaks the invariant.
    """
    check(trace)
    arrays: dict[str, Any] = {
        "version": np.int64(VERSION),
        "label": np.str_(trace.label),
        "num_experts": np.int64(trace.num_experts),
        "topk_idx": trace.topk_idx,
    }
    if trace.predicted_idx is not None:
        arrays["predicted_idx"] = trace.predicted_idx
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path) -> Trace:
    """Read a trace.

    Raises: TraceError that names the file and what is wrong in it.
    """
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise TraceError("not an archive")
            with archive:
                fields = {name: archive[name] for name in archive.files}
        trace = _from_fields(fields)
        check(trace)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise TraceError(f"{path}: {error}") from error
    return trace


def check(trace: Trace) -> None:
    """Assert the invariant.

    Raises: TraceError that names the field.
    """
    if not 1 <= trace.num_experts <= 1 << 16:
        raise TraceError(f"num_experts must be between 1 and {1 << 16}, got {trace.num_experts}")
    _check_ids("topk_idx", trace.topk_idx, trace.num_experts)
    if trace.predicted_idx is not None:
        _check_ids("predicted_idx", trace.predicted_idx, trace.num_experts)
        if trace.predicted_idx.shape != trace.topk_idx.shape:
            raise TraceError(
                f"predicted_idx must have the shape of topk_idx, {trace.topk_idx.shape}, "
                f"got {trace.predicted_idx.shape}"
            )


def _check_ids(name: str, ids: Ids, num_experts: int) -> None:
    if ids.dtype != np.uint16 or ids.ndim != 4 or not ids.size:
        raise TraceError(
            f"{name} must be uint16 [steps, rows, layers, topk], none of them 0, got {ids.dtype} {ids.shape}"
        )
    in_order = np.sort(ids, axis=-1)
    if in_order[..., -1].max() >= num_experts:
        raise TraceError(f"{name} has id {in_order.max()}, but num_experts is {num_experts}")
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise TraceError(f"{name} chooses an expert twice in one row")


def _from_fields(fields: dict[str, NDArray[Any]]) -> Trace:
    for name, kind in (("version", "i"), ("label", "U"), ("num_experts", "i")):
        if name not in fields:
            raise TraceError(f"{name} is missing")
        if fields[name].shape or fields[name].dtype.kind != kind:
            raise TraceError(f"{name} has type {fields[name].dtype} {fields[name].shape}")
    if fields["version"] != VERSION:
        raise TraceError(f"version must be {VERSION}, got {fields['version']}")
    known = {"version", "label", "num_experts", "topk_idx", "predicted_idx"}
    if "topk_idx" not in fields or not fields.keys() <= known:
        raise TraceError(f"fields must be {sorted(known)} (the last one is optional), got {sorted(fields)}")
    return Trace(
        str(fields["label"]), int(fields["num_experts"]), fields["topk_idx"], fields.get("predicted_idx")
    )


def _row_counts(ids: Ids, num_experts: int) -> NDArray[np.int32]:
    num_steps, num_rows, num_layers, num_topk = ids.shape
    base = np.arange(num_steps)[:, None, None, None] * num_layers + np.arange(num_layers)[:, None]
    flat = base * num_experts + ids
    counts = np.bincount(flat.ravel(), minlength=num_steps * num_layers * num_experts)
    return counts.reshape(num_steps, num_layers, num_experts).astype(np.int32)
