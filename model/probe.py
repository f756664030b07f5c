"""Probe: a look at intermediate values of a forward pass, for tests and for counting routed tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Probe = Callable[[int, str, Tensor], None]
"""Called with (layer, name, value) where the model computes something worth seeing; must not change the value."""


def no_probe(layer: int, name: str, value: Tensor) -> None:
    """The probe that looks at nothing."""
