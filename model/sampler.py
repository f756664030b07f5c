"""Token choice: temperature, min-p, top-k, top-p, log-probabilities; draws that depend on (seed, position) only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


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


def sample(logits: Tensor, settings: SamplingSettings, position: int) -> Choice | None:
    """Choose the token that follows `position`.

    Args:
        logits: `[vocab]` float.
        settings: of the request.
        position: absolute position of the row that gave the logits; selects the random number.
    Returns: None if the logits are not all finite.
    """
    if not bool(torch.isfinite(logits).all()):
        return None
    if settings.temperature == 0:
        token_id = greedy(logits.unsqueeze(0)).item()
    else:
        probabilities = filter_probabilities(logits, settings)
        token_id = _inverse_cdf(probabilities, _uniform(settings.seed, position))
    logprob, top = _logprobs(logits, int(token_id), settings.num_logprobs)
    return Choice(int(token_id), logprob, top)


def greedy(logits: Tensor) -> Tensor:
    """Lowest token id among the largest logits of each row: `[num_rows, vocab]` to `[num_rows]` int64."""
    is_largest = logits == logits.amax(dim=-1, keepdim=True)
    return is_largest.to(torch.int8).argmax(dim=-1)


def filter_probabilities(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """The distribution a token is drawn from.

    Order: temperature, `min_p` (relative to the largest probability), `top_k`, `top_p` over what is left. Ties at a cut
    keep the lower id.

    Args:
        logits: `[vocab]` float, finite.
        settings: temperature above 0.
    Returns: `[vocab]` float64, sums to 1.
    """
    scaled = logits.to(torch.float64)
    scaled = (scaled - scaled.max()) / settings.temperature
    p, order = torch.sort(torch.softmax(scaled, dim=-1), descending=True, stable=True)
    keep = p >= settings.min_p * p[0]
    if settings.top_k:
        keep[settings.top_k :] = False
    p = torch.where(keep, p, 0.0)
    p = p / p.sum()
    if settings.top_p < 1:
        # A token stays if what comes before it has not reached the mass yet: the first one always does.
        p = torch.where(p.cumsum(0) - p < settings.top_p, p, 0.0)
        p = p / p.sum()
    return torch.empty_like(p).scatter(0, order, p)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from a counter-based generator: independent of batch, order and history."""
    generator = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position))
    return float(generator.random())


def _inverse_cdf(p: Tensor, u: float) -> int:
    cumulative = p.cumsum(0)
    index = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    # Rounding may carry u past the last token of positive probability.
    return min(index, int(p.nonzero()[-1]))


def _logprobs(
    logits: Tensor, token_id: int, num_logprobs: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if num_logprobs is None:
        return None, ()
    logprobs = torch.log_softmax(logits.to(torch.float64), dim=-1)
    values, ids = torch.sort(logprobs, descending=True, stable=True)
    top = tuple(zip(ids[:num_logprobs].tolist(), values[:num_logprobs].tolist(), strict=True))
    return float(logprobs[token_id]), top
