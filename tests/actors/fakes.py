"""What runs in the actors of these tests in place of the model and of the engine core."""

from __future__ import annotations

import os
from pathlib import Path

import ray
import torch
from ray.util.placement_group import PlacementGroup

from actors.checksums import page_checksum
from actors.config import ExpertCacheConfig, ShardConfig
from actors.expert_cache import start_expert_cache
from actors.messages import SampledToken, ScheduledSequence, SequenceOutput, StepInput, StepOutput
from actors.names import CONTROL_GROUP, shard_name
from actors.shard import ShardContext
from deployment.executor import RayExecutor, ShardSetup, start_executor
from kernels.reference.experts import view_memory
from placement.engine_plan import EnginePlan


class SummingRunner:
    """Replies with the sum, over all pages of all ranks, of the pages' checksums, as its expert source
    reads them.

    A sequence `[rank, number]` makes that rank send itself the signal `number` first; 0 makes it raise.
    """

    def __init__(self, context: ShardContext) -> None:
        self._context = context

    def run_step(self, step: StepInput) -> list[SequenceOutput]:
        for sequence in step.sequences:
            self._obey(*sequence.token_ids)
        local = torch.tensor(self._sum_of_checksums(), dtype=torch.int64)
        return [SequenceOutput(token=SampledToken(int(self._context.collectives.all_reduce(local))))]

    def _obey(self, rank: int, number: int) -> None:
        if rank != self._context.layout.rank:
            return
        if number == 0:
            raise ValueError("told to fail")
        os.kill(os.getpid(), number)

    def _sum_of_checksums(self) -> int:
        context, total = self._context, 0
        config = context.checkpoint.config.text_config
        for layer in range(config.num_layers_with_drafts):
            local = context.layout.local_experts(config.num_experts_of(layer))
            for group in context.experts.stream(layer, range(len(local))):
                total += sum(self._checksum(int(group.addresses[expert])) for expert in group.experts)
        return total

    def _checksum(self, address: int) -> int:
        page = view_memory(address, self._context.experts.layout.num_bytes, torch.device("cpu"))
        return page_checksum(page) % 2**32  # their sum has to fit in 64 bits


def create_step(step_id: int, *commands: tuple[int, int]) -> StepInput:
    """A step for SummingRunner."""
    sequences = [
        ScheduledSequence(state_slot=0, start_position=0, token_ids=list(c), history=[], block_table=b"")
        for c in commands
    ]
    return StepInput(step_id=step_id, sequences=sequences)


class FakeCore:
    """Owns a cache and an executor, as the engine's processes do. An actor, or an object in the test's own
    process."""

    def __init__(
        self,
        placement_group: PlacementGroup,
        namespace: str,
        checkpoint: Path,
        config: ShardConfig,
        plan: EnginePlan | None = None,
        max_host_pages: int | None = None,
    ) -> None:
        self._placement_group = placement_group
        self._namespace = namespace
        self._checkpoint = checkpoint
        self._config = config
        self._plan = plan
        self._cache = start_expert_cache(
            placement_group,
            namespace=namespace,
            checkpoint=checkpoint,
            shard=config,
            config=ExpertCacheConfig(max_host_pages=max_host_pages),
            plan=plan,
        )
        self._executor = self.start()

    def start(self) -> RayExecutor:
        """Start the shards, or start them again after a loss."""
        self._executor = start_executor(
            placement_group=self._placement_group,
            namespace=self._namespace,
            checkpoint=self._checkpoint,
            config=self._config,
            device="cpu",
            cache=self._cache,
            verify_checksums=True,
            set_up=lambda places: ShardSetup(self._config, SummingRunner),
            plan=self._plan,
        )
        return self._executor

    def execute(self, step: StepInput) -> StepOutput:
        return self._executor.execute(step)

    def shutdown(self) -> None:
        self._executor.shutdown()
        ray.kill(self._cache)

    def shard_pids(self) -> list[int]:
        shards = [ray.get_actor(shard_name(rank), self._namespace) for rank in range(self._config.world_size)]
        places = ray.get([shard.place.options(concurrency_group=CONTROL_GROUP).remote() for shard in shards])
        return [place.pid for place in places]

    def all_pids(self) -> list[int]:
        """This process, the cache and the shards."""
        return [os.getpid(), ray.get(self._cache.load.remote([]))[0].segment.pid, *self.shard_pids()]
