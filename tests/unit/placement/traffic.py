"""Generated traffic that several tests look at, made once."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from placement.study import Study
from placement.trace_generator import RoutingModel, Traffic

MODEL = RoutingModel()


@cache
def profile(traffic: Traffic, seed: int = 900) -> NDArray[np.int64]:
    """Routed slots by layer and expert; enough sequences that every topic has its share."""
    num_sequences = max(32, 2 * len(traffic.topics))
    return MODEL.generate(traffic, 128, num_sequences=num_sequences, seed=seed).routed_slots()


@cache
def shared_study(seed: int = 0) -> Study:
    """Its traces and curves are kept, so that no test makes them again; results do not depend on who asked first."""
    return Study(seed)
