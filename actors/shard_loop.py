"""ShardLoop: a shard's `run()`, from the first step to the last."""

from __future__ import annotations

import logging
import traceback
from typing import Protocol

from actors.messages import ExpertTraffic, SequenceOutput, ShardFailure, StepInput, StepOutput
from actors.shm_ring import RingClosedError, RingPeerLostError
from actors.step_channel import ShardEnd

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What computes a rank's steps: `actors.shard_runner.ShardRunner`, or a fake one in tests."""

    def run_step(self, step: StepInput) -> list[SequenceOutput]:
        """Compute a step. Returns: one output per scheduled sequence, the same on all ranks."""


class TrafficSource(Protocol):
    """What counts a rank's uses of expert pages."""

    def take_traffic(self) -> ExpertTraffic:
        """Uses since the last call."""


class BetweenSteps(Protocol):
    """What has to be done while no step is computed."""

    def between_steps(self) -> None:
        """Called after each step, when its reply is on its way."""


class ShardLoop:
    """Receives steps, runs them, replies.

    Args:
        rank: this shard's.
        channel: its end.
        runner: computes.
        traffic: sent along with each reply.
        swapper: changes the hot set; None if it stays.
    """

    def __init__(
        self,
        rank: int,
        channel: ShardEnd,
        runner: StepRunner,
        traffic: TrafficSource,
        swapper: BetweenSteps | None = None,
    ) -> None:
        self._rank = rank
        self._channel = channel
        self._runner = runner
        self._traffic = traffic
        self._swapper = swapper
        self.num_steps = 0

    def run(self) -> ShardFailure | None:
        """Serve steps until the engine core stops the shards or is gone; called once.

        Returns: None then; or what keeps this rank from going on.
        """
        step_id = None
        try:
            while isinstance(step := self._channel.receive(), StepInput):
                step_id = step.step_id
                outputs = self._runner.run_step(step)
                self._channel.reply(StepOutput(step_id, outputs, self._traffic.take_traffic()))
                self.num_steps += 1
                if self._swapper is not None:
                    self._swapper.between_steps()
        except (RingClosedError, RingPeerLostError) as error:
            logger.info("rank %d stops: %s", self._rank, error)
        except Exception:
            logger.exception("rank %d cannot go on", self._rank)
            return ShardFailure(rank=self._rank, step_id=step_id, error=traceback.format_exc())
        return None
