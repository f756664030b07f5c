"""Builders of a whole engine in one process: scheduler, runner and model, one rank, no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.config import ShardConfig
from actors.cuda_driver import CudaDriver
from actors.expert_tiers import TieredExpertSource, create_expert_source
from actors.host_pool import HostPool, MappedPool, pool_contents
from actors.messages import AddRequest, Priority, SamplingParams, StepInput, StepOutput
from actors.page_reader import PageReader, fill_from
from actors.page_swaps import PageSwapper, RoutedCounts
from actors.pinned_memory import PinnedMemory
from actors.routing_counter import RoutingCounter
from actors.shard_runner import ShardRunner
from actors.staging import create_copier
from deployment.config import SchedulerConfig
from deployment.engine import Engine
from deployment.limits import SchedulerLimits
from deployment.scheduler import Scheduler
from model.checkpoint import Checkpoint
from model.collectives import Collectives
from model.engram_map import load_token_map
from model.kv_cache import CacheGeometry, KvCaches
from model.numerics import Numerics
from model.parallel import ParallelLayout
from model.transformer import Transformer
from model.weights import ModelWeights, load_weights
from placement.adaptation import AdaptationPolicy, AdaptationSettings
from placement.plan import PlacementPlan, spread_evenly
from placement.profile import Profile

CPU = torch.device("cpu")
ONE_RANK = ParallelLayout()
_PINNED: list[PinnedMemory] = []
"""Pools of runners on a GPU, registered until the process ends."""


@dataclass(frozen=True)
class LoadedModel:
    """What several engines over one checkpoint can share."""

    directory: Path
    checkpoint: Checkpoint
    weights: ModelWeights
    pool: HostPool
    token_map: Tensor


def create_pool(checkpoint: Checkpoint, max_host_pages: int | None = None) -> HostPool:
    """A filled host pool of one rank."""
    config = checkpoint.config.text_config
    pool = HostPool(pool_contents(checkpoint.content_hash, config, ONE_RANK, max_host_pages))
    fill = fill_from(checkpoint, ONE_RANK, pool.directory)
    for page in filter(pool.holds, range(pool.directory.num_pages)):
        fill(pool.page(page), page)
        pool.seal(page)
    pool.complete()
    return pool


def load_model(directory: Path, numerics: Numerics, device: torch.device = CPU) -> LoadedModel:
    """Weights and a filled host pool of one rank."""
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config.text_config
    pool = create_pool(checkpoint)
    weights = load_weights(checkpoint, config, ONE_RANK, device, numerics.accumulate)
    return LoadedModel(directory, checkpoint, weights, pool, load_token_map(directory, config))


class InProcessExecutor:
    """The executor of one rank in this process."""

    def __init__(
        self, runner: ShardRunner, experts: TieredExpertSource, swapper: PageSwapper | None = None
    ) -> None:
        self._runner = runner
        self._experts = experts
        self._swapper = swapper

    def execute(self, step: StepInput) -> StepOutput:
        output = StepOutput(step.step_id, self._runner.run_step(step), self._experts.take_traffic())
        if self._swapper is not None:
            self._swapper.between_steps()
        return output

    def check(self) -> None:
        """There is no one to lose."""

    def shutdown(self) -> None:
        self._experts.close()


def create_runner(
    model: LoadedModel,
    limits: SchedulerLimits,
    shard: ShardConfig,
    numerics: Numerics,
    plan: PlacementPlan | None = None,
) -> tuple[ShardRunner, TieredExpertSource]:
    """A rank over `model` with its own caches and device slots."""
    config = model.checkpoint.config.text_config
    device = model.weights.norm.device
    mapped = MappedPool(model.pool.region, model.pool.region.contents, writable=device.type == "cuda")
    pinned = PinnedMemory(mapped.pages, CudaDriver()) if device.type == "cuda" else None
    if pinned is not None:
        _PINNED.append(pinned)
    plan = plan or spread_evenly(mapped.directory.experts_per_layer, shard.max_resident_pages)
    pages = PageReader(mapped, fill_from(model.checkpoint, ONE_RANK, mapped.directory))
    experts = create_expert_source(pages, plan, shard, device, pinned=pinned)
    geometry = CacheGeometry(limits.max_num_seqs, limits.num_blocks, limits.block_size)
    num_experts = [config.num_experts_of(layer) for layer in range(config.num_layers_with_drafts)]
    routing = RoutingCounter(model.checkpoint.content_hash, num_experts, device)
    transformer = Transformer(
        config,
        model.weights,
        ONE_RANK,
        Collectives(ONE_RANK),
        experts,
        KvCaches(config, geometry, numerics.accumulate, device),
        model.token_map,
        numerics,
        routing,
    )
    return ShardRunner(transformer, experts, routing, geometry, device), experts


def create_swapper(
    runner: ShardRunner, experts: TieredExpertSource, settings: AdaptationSettings
) -> PageSwapper:
    """What lets the hot set of `experts` follow the traffic."""
    counts = experts.experts_per_layer
    hot = experts.hot_experts()
    policy = AdaptationPolicy(hot, counts, experts.layout.num_bytes, settings)
    firsts = [0] * len(counts)
    routing = runner.routing
    routed = RoutedCounts(lambda: routing.rows_by_page(firsts, counts), lambda: routing.num_tokens)
    return PageSwapper(experts, policy, routed, create_copier(runner.transformer.weights.norm.device))


def create_engine(
    model: LoadedModel,
    numerics: Numerics,
    shard: ShardConfig | None = None,
    plan: PlacementPlan | None = None,
    adaptation: AdaptationSettings | None = None,
    **scheduler: int,
) -> Engine:
    """An engine over `model`; keyword arguments are fields of SchedulerConfig."""
    return _create_engine(model, numerics, shard, plan, adaptation, **scheduler)[0]


def record_profile(model: LoadedModel, numerics: Numerics, requests: list[AddRequest]) -> Profile:
    """What an engine counts while it serves `requests`."""
    engine, runner = _create_engine(model, numerics)
    run(engine, requests)
    return runner.routing.profile("test")


def _create_engine(
    model: LoadedModel,
    numerics: Numerics,
    shard: ShardConfig | None = None,
    plan: PlacementPlan | None = None,
    adaptation: AdaptationSettings | None = None,
    **scheduler: int,
) -> tuple[Engine, ShardRunner]:
    config = model.checkpoint.config
    limits = SchedulerLimits.resolve(SchedulerConfig(**{"block_size": 8, **scheduler}), config.text_config)
    runner, experts = create_runner(model, limits, shard or ShardConfig(world_size=1), numerics, plan)
    swapper = None if adaptation is None else create_swapper(runner, experts, adaptation)
    executor = InProcessExecutor(runner, experts, swapper)
    return Engine(Scheduler(limits, eos_token_id=config.eos_token_id), executor), runner


def create_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    priority: Priority = "interactive",
    **sampling: float,
) -> AddRequest:
    """A greedy request unless `sampling` says otherwise; runs to `max_tokens`."""
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    return AddRequest(request_id, prompt, params, max_tokens=max_tokens, ignore_eos=True, priority=priority)


def run(
    engine: Engine,
    requests: list[AddRequest],
    arrivals: list[int] | None = None,
    aborts: dict[str, int] | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, list[int]]:
    """Tokens of each request; request `i` is added before step `arrivals[i]`, aborted ones before step `aborts[id]`."""
    arrivals = arrivals or [0] * len(requests)
    aborts = dict(aborts or {})
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    pending = sorted(zip(arrivals, requests, strict=True), key=lambda pair: pair[0])
    step = 0
    while pending or engine.has_requests:
        while pending and pending[0][0] <= step:
            assert engine.add(pending.pop(0)[1]) is None
        for request_id in [r for r, when in aborts.items() if when <= step]:
            del aborts[request_id]
            engine.abort(request_id)
        on_step(step)
        for output in engine.step():
            assert output.error is None, output
            tokens[output.request_id] += [token.token_id for token in output.tokens]
        step += 1
    return tokens
