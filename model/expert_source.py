"""ExpertSource: where the MoE layer finds expert pages. The model knows addresses, never tiers.

The actor layer implements it over resident slots, a staging ring and the host pool; tests use plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.formats import PageLayout


class ExpertPageError(RuntimeError):
    """A page that could not be read or whose checksum differs."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Experts whose pages may be read now."""

    experts: Sequence[int]
    """Local expert indices, ascending."""
    failed: Sequence[int]
    """Local expert indices whose pages cannot be read: what they should have computed has no value."""
    addresses: Tensor
    """`[num_local_experts]` int64 on the compute device: byte address of each page; only those in `experts` count."""
    is_member: Tensor | None = None
    """`[num_local_experts]` bool on the compute device: `experts`, and perhaps others that no row chose and whose
    pages may be read, too. None if that is every expert."""


class ExpertSource(Protocol):
    """Serves one rank's pages, layer by layer.

    Protocol: in each MoE layer of a forward, in layer order, `in_place` first; if it gives nothing, `stream`, whose
    iterator is exhausted before the next call. A yielded group's pages hold exactly their experts' bytes until the
    next group is asked for or the iterator ends; copies for later groups run meanwhile. Every needed expert appears
    in exactly one group, as one of its `experts` or as `failed`; groups come in any order, so what is computed must
    not depend on it. `layer` counts draft stages after the backbone.

    A page that fails does not raise: the ranks of a forward have to go on together, with or without it.
    """

    @property
    def layout(self) -> PageLayout:
        """Byte layout of every page."""

    def in_place(self, layer: int, num_rows: int) -> PageGroup | None:
        """All pages of a layer at once, if they can be read where they are and that is right for so many rows.

        Which experts are chosen plays no part, so the host need not know. The group holds until the next call.
        """

    def stream(self, layer: int, experts: Sequence[int]) -> Iterator[PageGroup]:
        """Yield the pages of `experts` (local indices, ascending) in as many groups as the slots need."""

    def wants_prediction(self, layer: int, num_rows: int) -> bool:
        """Whether to call `predict` for a layer while the one before it is computed."""

    def predict(self, layer: int, topk_idx: Tensor) -> None:
        """Say what a layer may choose, after `in_place` for the one before it and before its experts are computed.

        Args:
            layer: the next one.
            topk_idx: `[num_rows, num_topk]` int64, global expert ids. Wrong ones cost time, nothing else.
        """
