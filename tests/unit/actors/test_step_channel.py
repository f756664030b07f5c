from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.messages import (
    ExpertTraffic,
    SampledToken,
    ScheduledSequence,
    SequenceOutput,
    StepInput,
    StepOutput,
    StopShards,
)
from actors.shard_loop import ShardLoop
from actors.shm_ring import RingPeerLostError, RingTimeoutError
from actors.step_channel import CoreEnd, ShardEnd


def create_step(step_id: int, num_tokens: int = 3) -> StepInput:
    sequence = ScheduledSequence(
        state_slot=0, start_position=0, token_ids=list(range(num_tokens)), history=[], block_table=bytes(4)
    )
    return StepInput(step_id=step_id, sequences=[sequence])


class EchoRunner:
    """Samples the last token that it was given; a negative one makes it fail."""

    def run_step(self, step: StepInput) -> list[SequenceOutput]:
        tokens = [sequence.token_ids[-1] for sequence in step.sequences]
        if min(tokens) < 0:
            raise ValueError("negative token")
        return [SequenceOutput(token=SampledToken(token)) for token in tokens]


class FakeTraffic:
    def take_traffic(self) -> ExpertTraffic:
        return ExpertTraffic(num_hot=7)


def create_loop(core: CoreEnd, rank: int) -> ShardLoop:
    return ShardLoop(rank, ShardEnd(core.channel, rank), EchoRunner(), FakeTraffic())


def test_every_rank_runs_every_step_and_rank_0_replies():
    core = CoreEnd(world_size=3)
    loops = [create_loop(core, rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(loop.run) for loop in loops]
        for step_id, num_tokens in enumerate([1, 5, 100_000]):  # the last one is larger than a slot
            core.send(create_step(step_id, num_tokens), timeout_s=20)
            reply = core.receive(timeout_s=20)
            assert reply.step_id == step_id
            assert reply.sequences == [SequenceOutput(token=SampledToken(num_tokens - 1))]
            assert reply.traffic.num_hot == 7
        core.send(StopShards(), timeout_s=20)
        assert [run.result(timeout=20) for run in runs] == [None] * 3
    assert [loop.num_steps for loop in loops] == [3] * 3


def test_a_step_that_raises_ends_the_loop_with_its_step_and_traceback():
    core = CoreEnd(world_size=1)
    loop = create_loop(core, 0)
    bad = StepInput(
        step_id=9,
        sequences=[
            ScheduledSequence(
                state_slot=0, start_position=0, token_ids=[-1], history=[], block_table=bytes(4)
            )
        ],
    )
    core.send(bad, timeout_s=20)
    failure = loop.run()
    assert failure is not None
    assert (failure.rank, failure.step_id) == (0, 9)
    assert "ValueError: negative token" in failure.error
    with pytest.raises(RingTimeoutError):
        core.receive(timeout_s=0)


def test_a_closed_channel_ends_the_loop_quietly():
    core = CoreEnd(world_size=1)
    loop = create_loop(core, 0)
    core.close()
    assert loop.run() is None


def test_a_core_that_is_gone_ends_the_loop_quietly(monkeypatch):
    core = CoreEnd(world_size=1)
    end = ShardEnd(core.channel, 0)

    def lose(timeout_s: float) -> bytes:
        raise RingPeerLostError("gone")

    monkeypatch.setattr(end._steps, "receive", lose)
    assert ShardLoop(0, end, EchoRunner(), FakeTraffic()).run() is None


def test_a_waiting_rank_beats_and_a_step_makes_it_beat():
    core = CoreEnd(world_size=2)
    end = ShardEnd(core.channel, 1)
    core.send(create_step(0), timeout_s=20)
    assert core.heartbeats() == [0, 0]
    end.receive()
    assert core.heartbeats() == [0, 2]


def test_only_rank_0_replies():
    core = CoreEnd(world_size=2)
    ShardEnd(core.channel, 1).reply(StepOutput(0, []))
    with pytest.raises(RingTimeoutError):
        core.receive(timeout_s=0)
