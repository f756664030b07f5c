"""Token choice: temperature, min-p, top-k, top-p, log-probabilities; draws that depend on (seed, position) only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

TILE_ROWS: Final = 8
"""Rows that are filtered at once: each takes some eight float64 values a token meanwhile."""


class SamplingSettings(Protocol):
    """What the sampler reads of a request: `actors.messages.SamplingParams`."""

    @property
    def temperature(self) -> float:
        """See `actors.messages.SamplingParams.temperature`."""

    @property
    def top_p(self) -> float:
        """See `actors.messages.SamplingParams.top_p`."""

    @property
    def top_k(self) -> int:
        """See `actors.messages.SamplingParams.top_k`."""

    @property
    def min_p(self) -> float:
        """See `actors.messages.SamplingParams.min_p`."""

    @property
    def seed(self) -> int:
        """See `actors.messages.SamplingParams.seed`."""

    @property
    def num_logprobs(self) -> int | None:
        """See `actors.messages.SamplingParams.num_logprobs`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled token."""

    token_id: int
    logprob: float | None
    """Natural log-probability at temperature 1 without filters; None if not asked for."""
    top_logprobs: tuple[tuple[int, float], ...]
    """The most probable tokens, largest first, ties by id."""


def sample(
    logits: Tensor, settings: Sequence[SamplingSettings], positions: Sequence[int]
) -> list[Choice | None]:
    """Choose the token that follows each row; waits for the device a few times, however many rows there are.

    Args:
        logits: `[num_rows, vocab]` float.
        settings: of each row's request.
        positions: absolute position of each row; selects the random number.
    Returns: one choice per row, None where the logits are not all finite.
    """
    ids = greedy(logits)
    is_finite = torch.isfinite(logits).all(dim=-1)
    for rows in _tiles([i for i, s in enumerate(settings) if s.temperature > 0]):
        uniforms = torch.tensor(
            [_uniform(settings[i].seed, positions[i]) for i in rows],
            dtype=torch.float64,
            device=logits.device,
        )
        chosen = torch.where(is_finite[rows].unsqueeze(-1), logits[rows], 0)
        ids[rows] = _inverse_cdf(filter_probabilities(chosen, [settings[i] for i in rows]), uniforms)
    choices = [
        Choice(token_id, None, ()) if finite else None
        for token_id, finite in torch.stack((ids, is_finite.to(ids.dtype)), dim=1).tolist()
    ]
    asking = [i for i, s in enumerate(settings) if s.num_logprobs is not None and choices[i] is not None]
    for rows in _tiles(asking):
        most = max(settings[i].num_logprobs or 0 for i in rows)
        for i, logprob, top in zip(rows, *_logprobs(logits[rows], ids[rows], most), strict=True):
            choice = choices[i]
            assert choice is not None, f"{i=}"
            choices[i] = Choice(choice.token_id, logprob, top[: settings[i].num_logprobs])
    return choices


def _tiles(rows: list[int]) -> Iterator[list[int]]:
    for begin in range(0, len(rows), TILE_ROWS):
        yield rows[begin : begin + TILE_ROWS]


def greedy(logits: Tensor) -> Tensor:
    """Lowest token id among the largest logits of each row: `[num_rows, vocab]` to `[num_rows]` int64."""
    is_largest = logits == logits.amax(dim=-1, keepdim=True)
    return is_largest.to(torch.int8).argmax(dim=-1)


def filter_probabilities(logits: Tensor, settings: Sequence[SamplingSettings]) -> Tensor:
    """The distributions that tokens are drawn from.

    Order: temperature, `min_p` (relative to the largest probability), `top_k`, `top_p` over what is left. Ties at a cut
    keep the lower id.

    Args:
        logits: `[num_rows, vocab]` float, finite.
        settings: of each row, temperature above 0.
    Returns: `[num_rows, vocab]` float64, each row sums to 1.
    """
    temperature, min_p, top_k, top_p = (
        torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(-1)
        for values in zip(
            *((s.temperature, s.min_p, s.top_k or torch.inf, s.top_p) for s in settings), strict=True
        )
    )
    scaled = logits.to(torch.float64)
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / temperature
    p, order = torch.sort(torch.softmax(scaled, dim=-1), dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    p = torch.where((p >= min_p * p[:, :1]) & (rank < top_k), p, 0.0)
    p = p / p.sum(dim=-1, keepdim=True)
    # A token stays if what comes before it has not reached the mass yet: the first one always does.
    nucleus = torch.where(p.cumsum(dim=-1) - p < top_p, p, 0.0)
    p = torch.where(top_p < 1, nucleus / nucleus.sum(dim=-1, keepdim=True), p)
    return torch.empty_like(p).scatter(1, order, p)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator: independent of batch, order and history."""
    generator = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position))
    return float(generator.random())


def _inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """The token that each `u` falls on: `[num_rows, vocab]`, `[num_rows]` to `[num_rows]` int64."""
    cumulative = p.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, u.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    # Rounding may carry u past the last token of positive probability.
    last = torch.where(p > 0, torch.arange(p.shape[-1], device=p.device), 0).amax(dim=-1)
    return index.minimum(last)


def _logprobs(
    logits: Tensor, ids: Tensor, num_top: int
) -> tuple[list[float], list[tuple[tuple[int, float], ...]]]:
    """Log-probability of each row's token, and the most probable tokens of each row."""
    logprobs = torch.log_softmax(logits.to(torch.float64), dim=-1)
    values, best = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    top = [
        tuple(zip(row_ids, row_values, strict=True))
        for row_ids, row_values in zip(best[:, :num_top].tolist(), values[:, :num_top].tolist(), strict=True)
    ]
    return logprobs.gather(1, ids.unsqueeze(-1)).squeeze(-1).tolist(), top
