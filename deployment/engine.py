"""Engine: the path of every token on one page. Start reading here.

A step has three calls: the scheduler chooses rows, the executor computes them, the scheduler takes the
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from actors.messages import (
    AddRequest,
    EngineStats,
    ExpertTraffic,
    RequestError,
    RequestOutput,
    StepInput,
    StepOutput,
)
from deployment.scheduler import Scheduler


class Executor(Protocol):
    """All shards as one: computes a step everywhere and returns rank 0's reply."""

    def execute(self, step: StepInput) -> StepOutput:
        """Compute one step.

        Raises: ShardsLostError if a shard died, failed or did not reply in time. No further step is possible.
        """

    def check(self) -> None:
        """Look whether the shards still wait for a step. Raises: ShardsLostError if they do not."""

    def shutdown(self) -> None:
        """Stop the shards; safe to call twice and after ShardsLostError."""


class Engine:
    """Turns requests into tokens, a step at a time.

    Args:
        scheduler: chooses what a step computes.
        executor: computes it.
        clock: seconds since any fixed moment; never goes back.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._executor = executor
        self._num_steps = 0
        self._traffic = ExpertTraffic()

    @property
    def has_requests(self) -> bool:
        """Whether a step has anything to compute."""
        return self._scheduler.has_requests

    def add(self, request: AddRequest) -> RequestError | None:
        """Take a request. Returns: None, or why it is refused."""
        return self._scheduler.add(request, self._clock())

    def abort(self, request_id: str) -> None:
        """Drop a request, whatever its state; an id that is not open is ignored."""
        self._scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Compute the next rows of the requests that run.

        Returns: the news of every request that has any.
        Raises: ShardsLostError; the engine is of no more use then.
        """
        start_s = self._clock()
        step_input = self._scheduler.schedule(start_s)
        if step_input is None:
            self._executor.check()
            return []
        step_output = self._executor.execute(step_input)
        self._count(step_output)
        return self._scheduler.update(step_output, self._clock() - start_s)

    def stats(self) -> EngineStats:
        """Where the engine stands after its last step."""
        scheduler = self._scheduler
        return EngineStats(
            step_id=self._num_steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=scheduler.num_free_blocks,
            num_blocks=scheduler.limits.num_blocks,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_preemptions=scheduler.num_preemptions,
            traffic=self._traffic,
        )

    def shutdown(self) -> None:
        """Stop the shards."""
        self._executor.shutdown()

    def _count(self, step_output: StepOutput) -> None:
        self._num_steps = step_output.step_id
        self._traffic += step_output.traffic
