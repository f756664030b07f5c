"""The step channel: steps from the engine core to all shards, replies of rank 0, heartbeats of all."""

from __future__ import annotations

from typing import Final

import msgspec

from actors.heartbeats import BEAT_INTERVAL_S, Heartbeats
from actors.messages import StepChannel, StepMessage, StepOutput
from actors.shm_ring import RingTimeoutError, ShmRing

_REPLY_TIMEOUT_S: Final = 60.0
"""The engine core waits for each reply; if it has taken none for this long, it is stuck."""


class CoreEnd:
    """The engine core's end: it makes the channel, sends steps and receives the replies.

    Protocol: one thread sends and receives; any may read `heartbeats` and `close`.
    """

    def __init__(self, world_size: int) -> None:
        self._step_ring = ShmRing.create("hotset-steps", num_readers=world_size)
        self._reply_ring = ShmRing.create("hotset-replies", num_readers=1)
        self._heartbeats = Heartbeats.create(world_size)
        self._steps = self._step_ring.writer()
        self._replies = self._reply_ring.reader(0)
        self._decoder = msgspec.msgpack.Decoder(StepOutput)
        self.channel = StepChannel(
            steps=self._step_ring.handle, replies=self._reply_ring.handle, heartbeats=self._heartbeats.segment
        )

    def send(self, message: StepMessage, timeout_s: float) -> None:
        """Send to all shards. Raises: RingError."""
        self._steps.send(msgspec.msgpack.encode(message), timeout_s)

    def receive(self, timeout_s: float) -> StepOutput:
        """Wait for rank 0's next reply. Raises: RingError."""
        return self._decoder.decode(self._replies.receive(timeout_s))

    def heartbeats(self) -> list[int]:
        """Beats of every rank so far."""
        return self._heartbeats.counts()

    def close(self) -> None:
        """End the channel for both sides and wake who waits; safe to call twice."""
        self._step_ring.close()
        self._reply_ring.close()
        self._heartbeats.close()


class ShardEnd:
    """A shard's end.

    Args:
        channel: made by the engine core.
        rank: this shard's; only rank 0 replies.
    """

    def __init__(self, channel: StepChannel, rank: int) -> None:
        self._rank = rank
        self._steps = ShmRing.attach(channel.steps).reader(rank)
        self._replies = ShmRing.attach(channel.replies).writer() if rank == 0 else None
        self._heartbeats = Heartbeats.attach(channel.heartbeats)
        self._decoder = msgspec.msgpack.Decoder(StepMessage)

    def receive(self) -> StepMessage:
        """Wait for the next message, however long, and beat meanwhile.

        Raises: RingClosedError or RingPeerLostError when none will come.
        """
        while True:
            self._heartbeats.beat(self._rank)
            try:
                encoded = self._steps.receive(BEAT_INTERVAL_S)
            except RingTimeoutError:
                continue
            self._heartbeats.beat(self._rank)
            message: StepMessage = self._decoder.decode(encoded)
            return message

    def reply(self, output: StepOutput) -> None:
        """Answer a step; nothing is sent unless this is rank 0. Raises: RingError."""
        if self._replies is not None:
            self._replies.send(msgspec.msgpack.encode(output), _REPLY_TIMEOUT_S)
