"""RoutingModel: traces that have the statistics that were published of the released model's router.

An expert's logit is a sum: how popular it is with any text, how it fits the topic, how it fits the passage that is
being written. A row draws its experts one after the other without replacement. The spreads of these parts are
fitted to the counters of design section 10; `tests/unit/placement/test_trace_generator.py` holds every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placement.trace import Ids, Trace

NUM_LAYERS: Final = 40
NUM_EXPERTS: Final = 384
NUM_TOPK: Final = 6
NUM_TOPICS: Final = 35
DOMAINS: Final = ("coding", "general", "mathematics", "translation")
"""The first topics; the others have no name."""
ROWS_PER_SEQUENCE: Final = 6
"""One DSpark verify: the last token and five drafts (spec section 8)."""

_TABLE_SIZE: Final = 2048
"""Quantiles a passage's distribution is drawn from. The cut moves from passage to passage, so nothing is lost."""
_NONE: Final = np.uint16(0xFFFF)
_NUM_TRIES: Final = (10, 30)
"""Draws of a row, then more of those that still lack experts, before these are found in a slower way."""
_UNIFORM_SHARE: Final = 0.01
"""Of the draws, so that even the narrowest passage has more experts than a row chooses."""
_DOMAIN_COSINES: Final = (
    (1.0, 0.08, 0.57, -0.38),
    (0.08, 1.0, 0.05, 0.4),
    (0.57, 0.05, 1.0, -0.35),
    (-0.38, 0.4, -0.35, 1.0),
)
"""How alike the domains' preferences are. Coding is near mathematics and opposite to translation, since published
hit rates of a set from the wrong domain go from 94 % to 43 %, far below the 69 % of a set that knows nothing."""


@dataclass(frozen=True, slots=True)
class Spreads:
    """Standard deviations of the logit's parts, natural logarithm; layer 0 and the most concentrated layer."""

    common: tuple[float, float] = (0.79, 0.86)
    topic: tuple[float, float] = (1.3, 2.5)
    passage: tuple[float, float] = (0.5, 2.75)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the sequences of a trace are about."""

    label: str
    topics: tuple[int, ...]
    """Every sequence has one of them, each equally often."""
    passages_per_sequence: int = 4
    """Of one topic; then another sequence begins."""


CODING_AND_GENERAL: Final = Traffic("coding and general", (0, 1))
FOUR_DOMAINS: Final = Traffic("four domains", (0, 1, 2, 3))
ALL_TOPICS: Final = Traffic("35 topics", tuple(range(NUM_TOPICS)))
RANDOM_TOKENS: Final = Traffic("random tokens", ALL_TOPICS.topics, passages_per_sequence=1)
"""Uniform token ids are of every topic alike, and nothing keeps them at one."""


def single_topic(topic: int) -> Traffic:
    """Traffic about one topic."""
    return Traffic(DOMAINS[topic] if topic < len(DOMAINS) else f"topic {topic}", (topic,))


class RoutingModel:
    """A router of the released model's size. The same seed gives the same router and the same traces."""

    def __init__(self, seed: int = 0, spreads: Spreads = Spreads()) -> None:
        rng = np.random.default_rng([seed, 0])
        # The exponent puts the mean of the layers' distinct experts where the published mean is.
        ramp = (np.arange(NUM_LAYERS) / (NUM_LAYERS - 1)) ** 0.85
        common, topic, self._passage = (
            (first + (last - first) * ramp)[:, None]
            for first, last in (spreads.common, spreads.topic, spreads.passage)
        )
        shape = (NUM_LAYERS, NUM_EXPERTS)
        self._common = common * _standard(rng, shape)
        fields = _standard(rng, (NUM_TOPICS, *shape))
        num_domains = len(DOMAINS)
        mixing = np.linalg.cholesky(np.array(_DOMAIN_COSINES))
        fields[:num_domains] = np.einsum("dk,kle->dle", mixing, fields[:num_domains])
        self._topics = topic * fields
        self._seed = seed

    def generate(
        self,
        traffic: Traffic,
        num_steps: int,
        *,
        num_sequences: int = 1,
        rows_per_sequence: int = ROWS_PER_SEQUENCE,
        steps_per_passage: int = 16,
        with_predictions: bool = False,
        recall: float = 0.71,
        seed: int = 0,
    ) -> Trace:
        """Route `num_steps` steps of `num_sequences` sequences, which start and end at different times.

        Args:
            traffic: what the sequences are about.
            num_steps: at least 1.
            num_sequences: decoded together, at least 1.
            rows_per_sequence: rows of a sequence in one step, at least 1.
            steps_per_passage: a passage of about 64 tokens at four tokens a step.
            with_predictions: also ask the next layer's router ahead; what is chosen stays the same.
            recall: share of the choices that it foresees; published.
            seed: of the traffic, not of the router.
        """
        rng, ahead = (np.random.default_rng([self._seed, purpose, seed]) for purpose in (1, 2))
        ids = np.empty((num_steps, num_sequences, rows_per_sequence, NUM_LAYERS, NUM_TOPK), np.uint16)
        predicted = np.empty_like(ids) if with_predictions else None
        for sequence in range(num_sequences):
            start = int(rng.integers(steps_per_passage * traffic.passages_per_sequence))
            clock = start + np.arange(num_steps)
            passage = clock // steps_per_passage - start // steps_per_passage
            request = clock // (steps_per_passage * traffic.passages_per_sequence)
            topics = rng.integers(len(traffic.topics), size=int(request[-1]) + 1)
            first_steps = np.flatnonzero(np.diff(passage, prepend=-1))
            passages = _Passages(
                np.concatenate(
                    [self._widths(traffic.topics[topics[request[step]]], rng) for step in first_steps]
                )
            )
            lines = np.broadcast_to(
                passage[:, None, None] * NUM_LAYERS + np.arange(NUM_LAYERS), ids[:, sequence].shape[:-1]
            ).ravel()
            chosen = _draw(passages, lines, rng)
            ids[:, sequence] = chosen.reshape(ids[:, sequence].shape)
            if predicted is not None:
                foreseen = _predict(passages, lines, chosen, recall, ahead)
                predicted[:, sequence] = foreseen.reshape(ids[:, sequence].shape)
        whole = (num_steps, num_sequences * rows_per_sequence, NUM_LAYERS, NUM_TOPK)
        return Trace(
            traffic.label,
            NUM_EXPERTS,
            ids.reshape(whole),
            None if predicted is None else predicted.reshape(whole),
        )

    def _widths(self, topic: int, rng: np.random.Generator) -> NDArray[np.int32]:
        """How many quantiles of a new passage's distribution each expert has, `[num_layers, num_experts]`."""
        passage = self._passage * rng.standard_normal((NUM_LAYERS, NUM_EXPERTS), np.float32)
        logits = self._common + self._topics[topic] + passage
        weights = np.exp((logits - logits.max(axis=1, keepdims=True)).astype(np.float32))
        weights /= weights.sum(axis=1, keepdims=True)
        ends = np.cumsum((1 - _UNIFORM_SHARE) * weights + _UNIFORM_SHARE / NUM_EXPERTS, axis=1) * _TABLE_SIZE
        ends[:, -1] = _TABLE_SIZE
        cuts = np.floor(ends + rng.random((NUM_LAYERS, 1))).astype(np.int32).clip(max=_TABLE_SIZE)
        return np.diff(cuts, axis=1, prepend=np.int32(0))


class _Passages:
    """Distributions of experts, one for every passage and layer: `[num_lines, ...]`."""

    def __init__(self, widths: NDArray[np.int32]) -> None:
        self.widths = widths
        """Quantiles of each expert, `_TABLE_SIZE` in all."""
        experts = np.broadcast_to(np.arange(NUM_EXPERTS, dtype=np.uint16), widths.shape)
        self.quantiles = np.repeat(experts.ravel(), widths.ravel())
        """Expert ids, `[num_lines * _TABLE_SIZE]`."""


def _standard(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Normal deviates whose mean and deviation over the experts of a layer are exactly 0 and 1."""
    values = rng.standard_normal(shape)
    values -= values.mean(axis=-1, keepdims=True)
    normalized: NDArray[np.float64] = values / values.std(axis=-1, keepdims=True)
    return normalized


def _draw(passages: _Passages, lines: NDArray[np.int64], rng: np.random.Generator) -> Ids:
    """Draw `NUM_TOPK` experts without replacement for each of `lines`, `[lines.size, NUM_TOPK]`."""
    nothing = np.empty((lines.size, 0), np.uint16)
    return _draw_others(passages, lines, nothing, np.full(lines.size, NUM_TOPK), rng)


def _predict(
    passages: _Passages, lines: NDArray[np.int64], chosen: Ids, recall: float, rng: np.random.Generator
) -> Ids:
    """What a router that foresees a share `recall` of `chosen` says; its errors are plausible experts."""
    is_wrong = rng.random(chosen.shape) >= recall
    others = _draw_others(passages, lines, chosen, is_wrong.sum(axis=1), rng)
    predicted = chosen.copy()
    predicted[is_wrong] = others[others != _NONE]
    return predicted


def _draw_others(
    passages: _Passages,
    lines: NDArray[np.int64],
    taken: Ids,
    num_wanted: NDArray[np.int64],
    rng: np.random.Generator,
) -> Ids:
    """Draw experts that differ from each other and from `taken`.

    Args:
        passages: what to draw from.
        lines: of `passages`, `[num_rows]`.
        taken: not drawn again, `[num_rows, num_taken]`.
        num_wanted: experts to draw, `[num_rows]`, at most `NUM_TOPK`.
        rng: is used up.
    Returns: `[num_rows, NUM_TOPK]`, each row in the order of its draws, `_NONE` where no more are wanted.
    """
    found = np.full((NUM_TOPK, lines.size), _NONE, np.uint16)
    num_found = np.zeros(lines.size, np.int64)
    # The first draws of a row that differ are draws without replacement.
    for num_tries in _NUM_TRIES:
        late = np.flatnonzero(num_found < num_wanted)
        out = [*taken[late].T, *found[:, late]]
        quantiles = rng.integers(_TABLE_SIZE, size=(num_tries, late.size)) + lines[late] * _TABLE_SIZE
        drawn = passages.quantiles.take(quantiles)
        for place in range(num_tries):
            is_new = num_found[late] < num_wanted[late]
            for earlier in (*out, *drawn[:place]):
                is_new &= drawn[place] != earlier
            rows = late[is_new]
            found[num_found[rows], rows] = drawn[place, is_new]
            num_found[rows] += 1
    # Where few experts have nearly all the weight, the others are drawn from what is left.
    for slot in range(NUM_TOPK):
        rows = np.flatnonzero((num_found <= slot) & (slot < num_wanted))
        widths = passages.widths[lines[rows]]
        gone = np.concatenate([taken[rows].T, found[:slot, rows]]).astype(np.int64)
        widths[np.arange(rows.size), gone] = 0
        ends = widths.cumsum(axis=1, dtype=np.int32)
        found[slot, rows] = (ends <= rng.integers(ends[:, -1:])).sum(axis=1)
    return found.T
