"""RayExecutor over shards that are threads: what it does when they reply, fail, hang and fall silent."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import pytest

from actors.messages import ExpertTraffic, SampledToken, SequenceOutput, ShardFailure, StepInput
from actors.shard_loop import ShardLoop
from actors.step_channel import CoreEnd, ShardEnd
from deployment.errors import ShardsLostError
from deployment.executor import RayExecutor


class FakeRunner:
    def __init__(self, on_step: Callable[[int], None]) -> None:
        self._on_step = on_step

    def run_step(self, step: StepInput) -> list[SequenceOutput]:
        self._on_step(step.step_id)
        return [SequenceOutput(token=SampledToken(step.step_id))]

    def take_traffic(self) -> ExpertTraffic:
        return ExpertTraffic()


class FakeGang:
    """Shards in threads; `kill` lets go of those that hang."""

    def __init__(self, core: CoreEnd, runners: list[FakeRunner], hung: threading.Event) -> None:
        self._threads = ThreadPoolExecutor(len(runners))
        self._hung = hung
        self.is_killed = False
        self._runs: list[Future[ShardFailure | None]] = [
            self._threads.submit(ShardLoop(rank, ShardEnd(core.channel, rank), runner, runner).run)
            for rank, runner in enumerate(runners)
        ]

    def wait_for_end(self, timeout_s: float) -> str | None:
        done = wait(self._runs, timeout_s, FIRST_COMPLETED).done
        return "; ".join(f"rank failed: {run.result()}" for run in done) or None

    def wait_for_all(self, timeout_s: float) -> None:
        wait(self._runs, timeout_s)

    def kill(self) -> None:
        self.is_killed = True
        self._hung.set()


class Gate:
    """A step that hangs until the gang is killed."""

    def __init__(self) -> None:
        self.hung = threading.Event()

    def hang(self, step_id: int) -> None:
        self.hung.wait(60)


def fail(step_id: int) -> None:
    raise ValueError("out of cheese")


def work(step_id: int) -> None:
    pass


@contextmanager
def create_executor(
    *on_steps: Callable[[int], None],
    gate: Gate | None = None,
    step_timeout_s: float = 60,
    heartbeat_timeout_s: float = 60,
) -> Iterator[tuple[RayExecutor, FakeGang]]:
    core = CoreEnd(len(on_steps))
    gang = FakeGang(core, [FakeRunner(f) for f in on_steps], (gate or Gate()).hung)
    executor = RayExecutor(gang, core, step_timeout_s, heartbeat_timeout_s)
    yield executor, gang
    executor.shutdown()
    gang.wait_for_all(20)


def create_step(step_id: int) -> StepInput:
    return StepInput(step_id=step_id, sequences=[])


def test_steps_are_answered_in_order_until_shutdown():
    with create_executor(work, work) as (executor, gang):
        for step_id in range(20):
            assert executor.execute(create_step(step_id)).step_id == step_id
        assert not gang.is_killed
        executor.shutdown()
        executor.shutdown()
        assert gang.is_killed
        with pytest.raises(ShardsLostError, match="shut down"):
            executor.execute(create_step(20))


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_fails_ends_all_at_once_and_says_why(failing_rank):
    gate = Gate()
    on_steps = [gate.hang, gate.hang]  # as a collective does that waits for the rank that failed
    on_steps[failing_rank] = fail
    with create_executor(*on_steps, gate=gate) as (executor, gang):
        start = time.monotonic()
        with pytest.raises(ShardsLostError, match=r"(?s)step_id=5.*out of cheese"):
            executor.execute(create_step(5))
        assert gang.is_killed
        assert time.monotonic() - start < 5
        with pytest.raises(ShardsLostError, match="out of cheese"):
            executor.execute(create_step(6))


def test_a_step_without_a_reply_ends_all_when_its_time_is_over():
    gate = Gate()
    with create_executor(gate.hang, gate=gate, step_timeout_s=0.2) as (executor, gang):
        with pytest.raises(ShardsLostError, match="step 1: .* in time"):
            executor.execute(create_step(1))
        assert gang.is_killed


def test_a_rank_that_falls_silent_between_steps_is_noticed_without_a_step():
    gate = Gate()
    with create_executor(work, gate.hang, gate=gate, heartbeat_timeout_s=2.5) as (executor, gang):
        executor.execute(create_step(0))  # rank 0 replies, rank 1 never comes back
        assert gate.hung.wait(20)
        with pytest.raises(ShardsLostError, match=r"ranks \[1\] gave no sign of life"):
            executor.execute(create_step(1))
        assert gang.is_killed
