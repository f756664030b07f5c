"""Operators: what a layer computes with, routed experts apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kernels.reference import (
    activation,
    attention,
    compressor,
    engram,
    hyper_connections,
    indexer,
    linear,
    projections,
    router,
)
from kernels.tensors import Advanced, QuantizedRows
from model.numerics import Numerics


@dataclass(frozen=True, slots=True)
class Operators:
    """The functions, documented where they are defined."""

    linear: Callable[..., Tensor]
    advance: Callable[..., Advanced]
    expand: Callable[..., Tensor]
    collapse_norm: Callable[..., Tensor]
    mean_copies: Callable[..., Tensor]
    gather_rows: Callable[..., Tensor]
    inject_engram: Callable[..., Tensor]
    split_low_rank: Callable[..., tuple[Tensor, QuantizedRows]]
    window_attention: Callable[..., Tensor]
    block_attention: Callable[..., Tensor]
    keep_keys: Callable[..., None]
    write_entries: Callable[..., None]
    keep_halves: Callable[..., None]
    index_queries: Callable[..., Tensor]
    select_entries: Callable[..., tuple[Tensor, Tensor | None]]
    choose_experts: Callable[..., tuple[Tensor, Tensor]]
    swiglu_q8: Callable[..., Tensor]


def create_operators(numerics: Numerics) -> Operators:
    """The reference in the arithmetic of `numerics`, on any device."""
    accumulate = numerics.accumulate
    return Operators(
        linear=partial(linear.linear, accumulate=accumulate),
        advance=partial(hyper_connections.advance, accumulate=accumulate),
        expand=hyper_connections.expand,
        collapse_norm=partial(hyper_connections.collapse_norm, accumulate=accumulate),
        mean_copies=partial(hyper_connections.mean_copies, accumulate=accumulate),
        gather_rows=engram.gather_rows,
        inject_engram=partial(engram.inject_engram, accumulate=accumulate),
        split_low_rank=partial(projections.split_low_rank, accumulate=accumulate),
        window_attention=partial(attention.window_attention, accumulate=accumulate),
        block_attention=partial(attention.block_attention, accumulate=accumulate),
        keep_keys=attention.keep_keys,
        write_entries=partial(compressor.write_entries, accumulate=accumulate),
        keep_halves=compressor.keep_halves,
        index_queries=indexer.index_queries,
        select_entries=partial(
            indexer.select_entries,
            accumulate=accumulate,
            round_bf16=numerics.round_index_scores,
        ),
        choose_experts=router.choose_experts,
        swiglu_q8=partial(activation.swiglu_q8, accumulate=accumulate),
    )
