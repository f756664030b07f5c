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
            for index in range(int(passage[-1]) + 1):
                steps = np.flatnonzero(passage == index)
                table = self._table(traffic.topics[topics[request[steps[0]]]], rng)
                shape = (len(steps), rows_per_sequence, NUM_LAYERS)
                chosen = _draw(table, shape, rng)
                ids[steps, sequence] = chosen
                if predicted is not None:
                    predicted[steps, sequence] = _predict(table, chosen, recall, ahead)
        whole = (num_steps, num_sequences * rows_per_sequence, NUM_LAYERS, NUM_TOPK)
        return Trace(
            traffic.label,
            NUM_EXPERTS,
            ids.reshape(whole),
            None if predicted is None else predicted.reshape(whole),
        )

    def _table(self, topic: int, rng: np.random.Generator) -> Ids:
        """Quantiles of a new passage's distribution, `[num_layers, _TABLE_SIZE]` expert ids."""
        passage = self._passage * rng.standard_normal((NUM_LAYERS, NUM_EXPERTS))
        logits = self._common + self._topics[topic] + passage
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        ends = np.cumsum((1 - _UNIFORM_SHARE) * weights + _UNIFORM_SHARE / NUM_EXPERTS, axis=1) * _TABLE_SIZE
        ends[:, -1] = _TABLE_SIZE
        cuts = np.floor(ends + rng.random((NUM_LAYERS, 1))).astype(np.int64).clip(max=_TABLE_SIZE)
        widths = np.diff(cuts, axis=1, prepend=0)
        experts = np.broadcast_to(np.arange(NUM_EXPERTS, dtype=np.uint16), widths.shape)
        return np.repeat(experts.ravel(), widths.ravel()).reshape(NUM_LAYERS, _TABLE_SIZE)


def _standard(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Normal deviates whose mean and deviation over the experts of a layer are exactly 0 and 1."""
    values = rng.standard_normal(shape)
    values -= values.mean(axis=-1, keepdims=True)
    normalized: NDArray[np.float64] = values / values.std(axis=-1, keepdims=True)
    return normalized


def _draw(table: Ids, shape: tuple[int, int, int], rng: np.random.Generator) -> Ids:
    """Draw `NUM_TOPK` experts without replacement for every step, row and layer of `shape`."""
    layers = np.broadcast_to(np.arange(NUM_LAYERS), shape).ravel()
    ids = np.empty((layers.size, NUM_TOPK), np.uint16)
    for slot in range(NUM_TOPK):
        _draw_slot(table, layers, ids, slot, np.arange(layers.size), ids[:, :slot], rng)
    return ids.reshape(*shape, NUM_TOPK)


def _draw_slot(
    table: Ids,
    layers: NDArray[np.int64],
    ids: Ids,
    slot: int,
    pending: NDArray[np.int64],
    taken: Ids,
    rng: np.random.Generator,
) -> None:
    """Fill `ids[pending, slot]` with draws that are not in the same row of `taken`."""
    while pending.size:
        drawn = table[layers[pending], rng.integers(_TABLE_SIZE, size=pending.size)]
        ids[pending, slot] = drawn
        pending = pending[(taken[pending] == drawn[:, None]).any(axis=1)]


def _predict(table: Ids, chosen: Ids, recall: float, rng: np.random.Generator) -> Ids:
    """What a router that foresees a share `recall` of `chosen` says; its errors are plausible experts."""
    layers = np.broadcast_to(np.arange(NUM_LAYERS), chosen.shape[:-1]).ravel()
    truth = chosen.reshape(-1, NUM_TOPK)
    predicted = truth.copy()
    is_wrong = rng.random(truth.shape) >= recall
    for slot in range(NUM_TOPK):
        others = np.delete(predicted, slot, axis=1)
        taken = np.concatenate([truth, others], axis=1)
        _draw_slot(table, layers, predicted, slot, np.flatnonzero(is_wrong[:, slot]), taken, rng)
    return predicted.reshape(chosen.shape)
