"""GPUShard: the actor of one rank, with a GPU or on the CPU. A shell around Shard."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import ray

from actors.config import ShardConfig
from actors.cuda_driver import CudaDriver
from actors.messages import PoolRegion, RankPlacement, ShardFailure, ShardPlace, ShardStart, ShardStats
from actors.numa import numa_node_of
from placement.profile import Profile

if TYPE_CHECKING:
    from actors.shard import RunnerFactory


class GPUShard:
    """One rank of an engine.

    Protocol: `place`; `open_store` on rank 0; `initialize` on all ranks, then `run` on all. Steps reach
    `run` through shared memory, not as calls. The other methods at any time after
    `initialize`, in the group CONTROL_GROUP. A shard never restarts: when one is lost, all are killed.
    """

    def __init__(self, rank: int) -> None:
        # Imported here, since the engine core starts this actor and has no use for torch.
        from actors.shard import Shard

        logging.basicConfig(level=logging.INFO)
        self._rank = rank
        self._shard = Shard(rank)

    def __repr__(self) -> str:
        return f"GPUShard(rank={self._rank})"  # Ray's prefix of every line that this process logs

    def place(self) -> ShardPlace:
        """Where this shard is."""
        context = ray.get_runtime_context()
        gpu_ids = context.get_accelerator_ids()["GPU"]
        return ShardPlace(
            rank=self._rank,
            node_id=context.get_node_id(),
            pid=os.getpid(),
            gpu_ids=gpu_ids,
            numa_node=numa_node_of(CudaDriver().pci_address()) if gpu_ids else None,
            free_device_bytes=self._shard.free_device_bytes() if gpu_ids else None,
        )

    def open_store(self, timeout_s: float) -> int:
        """Rank 0: open the store in which all ranks meet. Returns: its port."""
        return self._shard.open_store(timeout_s)

    def initialize(self, start: ShardStart, config: ShardConfig, create_runner: RunnerFactory) -> None:
        """Join the other ranks and load this rank's part of the model."""
        self._shard.initialize(start, config, create_runner)

    def run(self) -> ShardFailure | None:
        """Serve steps until told to stop. Returns: why this rank cannot go on, or None."""
        return self._shard.run()

    def region(self) -> PoolRegion:
        """This rank's region of the host pool, for a new owner."""
        return self._shard.region()

    def profile(self, label: str) -> Profile:
        """How often each expert was chosen since start."""
        return self._shard.profile(label)

    def placement(self) -> RankPlacement:
        """Where this rank's pages are now."""
        return self._shard.placement()

    def pause_adaptation(self, is_paused: bool) -> None:
        """Let the hot set stay as it is, or follow the traffic again."""
        self._shard.pause_adaptation(is_paused)

    def stats(self) -> ShardStats:
        """What this rank holds and has done."""
        return self._shard.stats()

    def check_health(self) -> None:
        """Return, to show that this process answers."""
