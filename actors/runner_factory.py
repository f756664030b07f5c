"""ModelRunnerFactory: what makes a shard's runner, small enough to send to it and to import without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.shard import ShardContext
    from actors.shard_loop import StepRunner


@dataclass(frozen=True, slots=True)
class ModelRunnerFactory:
    """A RunnerFactory for the real model with caches of a given size."""

    num_slots: int
    """Sequences that run at once."""
    num_blocks: int
    block_size: int
    """Tokens per KV block."""

    def __call__(self, context: ShardContext) -> StepRunner:
        """Build the runner, in the shard's process."""
        from actors.shard_runner import create_shard_runner
        from model.kv_cache import CacheGeometry

        return create_shard_runner(context, CacheGeometry(self.num_slots, self.num_blocks, self.block_size))
