"""ShardRunner: one rank's model, caches and step, without Ray. The actor around it is `actors/gpu_shard.py`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from actors.expert_tiers import TieredExpertSource
from actors.messages import (
    SampledToken,
    ScheduledSequence,
    SequenceOutput,
    StepInput,
    TokenLogprob,
)
from actors.routing_counter import RoutingCounter
from model.batch import ForwardBatch, SequenceRows
from model.engram_map import load_token_map
from model.kv_cache import CacheGeometry, KvCaches
from model.numerics import Numerics
from model.sampler import Choice, sample
from model.transformer import Hidden, Transformer
from model.weights import load_weights

if TYPE_CHECKING:
    from actors.shard import ShardContext

logger = logging.getLogger(__name__)


class ShardRunner:
    """Runs steps on one rank.

    Every rank calls `run_step` with the same inputs in the same order; collectives inside keep them in step. All ranks
    compute the same result; rank 0's is used.

    Args:
        transformer: this rank's model.
        experts: what the model reads pages from.
        routing: counts what the router chooses, as the model's probe.
        geometry: of its caches.
        device: where it computes.
    """

    def __init__(
        self,
        transformer: Transformer,
        experts: TieredExpertSource,
        routing: RoutingCounter,
        geometry: CacheGeometry,
        device: torch.device,
    ) -> None:
        self.transformer = transformer
        self._experts = experts
        self.routing = routing
        self._geometry = geometry
        self._device = device

    @torch.inference_mode()
    def run_step(self, step: StepInput) -> list[SequenceOutput]:
        """Compute a step's rows and sample where it asks for it.

        Returns: one output per scheduled sequence, in order.
        """
        is_decode = all(len(s.token_ids) == 1 and s.sampling is not None for s in step.sequences)
        with self._experts.step(len(step.sequences) if is_decode else None, self.routing.take_chosen):
            batch, hidden = self.forward([_to_rows(s) for s in step.sequences])
            return self._sample(step, batch, hidden)

    def _sample(self, step: StepInput, batch: ForwardBatch, hidden: Hidden) -> list[SequenceOutput]:
        """Sample the sequences of a step that ask for it; waits for the device if there are any."""
        failures = self._experts.take_failures()
        for failure in failures:
            logger.error("step %d: %s", step.step_id, failure)
        asking = [i for i, s in enumerate(step.sequences) if s.sampling is not None]
        outputs = [SequenceOutput() for _ in step.sequences]
        if not asking:
            return outputs
        logits = self.transformer.logits(hidden.normed[batch.last_rows[asking]])
        asked = [step.sequences[i] for i in asking]
        positions = [s.start_position + len(s.token_ids) - 1 for s in asked]
        choices = sample(logits, [s.sampling for s in asked if s.sampling is not None], positions)
        for index, choice, position in zip(asking, choices, positions, strict=True):
            outputs[index] = _to_output(choice, position, failures)
        return outputs

    def forward(self, sequences: Sequence[SequenceRows]) -> tuple[ForwardBatch, Hidden]:
        """Run the rows of all sequences of a step through the model."""
        batch = ForwardBatch.build(sequences, self.transformer.config, self._geometry, self._device)
        self.routing.begin_step(batch, [len(sequence.token_ids) for sequence in sequences])
        return batch, self.transformer.forward(batch)


def create_shard_runner(context: ShardContext, geometry: CacheGeometry) -> ShardRunner:
    """Load one rank's weights and build its model; a `RunnerFactory` once `geometry` is bound.

    Args:
        context: what the shard has set up before.
        geometry: of the caches, equal on all ranks.
    Raises: CheckpointError if a tensor is corrupt; ValueError if the model cannot be cut over the ranks.
    """
    config = context.checkpoint.config.text_config
    numerics = Numerics.serving(context.config.precision, context.config.expert_activations)
    weights = load_weights(context.checkpoint, config, context.layout, context.device, numerics.accumulate)
    caches = KvCaches(config, geometry, numerics.accumulate, context.device)
    logger.info("rank %d: %.1f MiB of KV caches", context.layout.rank, caches.num_bytes / 2**20)
    transformer = Transformer(
        config,
        weights,
        context.layout,
        context.collectives,
        context.experts,
        caches,
        load_token_map(context.checkpoint.path, config),
        numerics,
        context.routing,
    )
    return ShardRunner(transformer, context.experts, context.routing, geometry, context.device)


def _to_rows(sequence: ScheduledSequence) -> SequenceRows:
    return SequenceRows(
        state_slot=sequence.state_slot,
        start_position=sequence.start_position,
        token_ids=sequence.token_ids,
        history=sequence.history,
        block_table=sequence.block_table,
        decoder_start=sequence.decoder_start,
    )


def _to_output(choice: Choice | None, position: int, failures: Sequence[str]) -> SequenceOutput:
    """`failures` are what may explain that there is no choice."""
    if choice is None:
        problem = f"The model gave non-finite logits at position {position}."
        return SequenceOutput(error=" ".join((problem, *failures)))
    top = [TokenLogprob(token_id, logprob) for token_id, logprob in choice.top_logprobs]
    return SequenceOutput(token=SampledToken(choice.token_id, choice.logprob, top))
