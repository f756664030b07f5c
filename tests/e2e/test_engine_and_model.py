"""The engine with the real model: the same tokens in any company, the same bits for any residency."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors import page_swaps
from actors.config import ShardConfig
from actors.messages import ScheduledSequence, StepInput
from deployment.config import SchedulerConfig
from deployment.limits import SchedulerLimits
from kernels.formats import UE8M0_NAN
from model.batch import SequenceRows
from model.checkpoint import Checkpoint
from model.numerics import Numerics
from model.shard_file import CheckpointError
from placement.adaptation import AdaptationSettings
from placement.engine_plan import Arm, EnginePlan, ExpertLayout
from placement.plan import PlacementPlan, create_plan, spread_evenly
from placement.profile import Profile
from tests.e2e.builders import (
    LoadedModel,
    create_engine,
    create_pool,
    create_request,
    create_runner,
    record_profile,
    run,
)

SERVING = Numerics()


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 498) for _ in range(length)]


def random_plan(rng: random.Random, experts_per_layer: tuple[int, ...]) -> PlacementPlan:
    return PlacementPlan(
        tuple(tuple(e for e in range(count) if rng.random() < 0.5) for count in experts_per_layer)
    )


def plan_for(model: LoadedModel, profile: Profile, arm: Arm, num_hot: int) -> EnginePlan:
    """One rank's plan for steps of one row."""
    config = model.checkpoint.config.text_config
    layout = ExpertLayout.of(config, 1, 1)
    budget_bytes = num_hot * layout.page_bytes
    return create_plan(
        profile, config, layout, arm=arm, budget_bytes=budget_bytes, num_staging_slots=0, num_rows=1
    )


def planned(model: LoadedModel, profile: Profile, arm: Arm, num_hot: int) -> PlacementPlan:
    """The only rank's part of a plan for `profile`."""
    return PlacementPlan(plan_for(model, profile, arm, num_hot).of_rank(0))


@pytest.mark.parametrize("seed", range(3))
def test_requests_give_the_tokens_they_give_alone(seed: int, model: LoadedModel) -> None:
    """Random lengths, arrivals, priorities, aborts, chunks and memory that forces preemption; greedy and sampled."""
    rng = random.Random(seed)
    requests = [
        create_request(
            f"r{i}",
            random_prompt(rng, rng.choice([1, 2, 7, 16, 33, 60])),
            max_tokens=rng.randint(1, 10),
            temperature=rng.choice([0.0, 0.0, 0.9]),
            seed=i,
            priority=rng.choice(["interactive", "batch"]),
        )
        for i in range(10)
    ]
    alone = {}
    for request in requests:
        alone |= run(create_engine(model, SERVING), [request])
    aborts = {f"r{i}": rng.randint(1, 12) for i in rng.sample(range(10), 2)}
    together = run(
        create_engine(
            model,
            SERVING,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            min_chunk_tokens=4,
            max_model_len=96,
            num_blocks=22,
        ),
        requests,
        arrivals=[rng.randint(0, 10) for _ in requests],
        aborts=aborts,
    )
    for request_id, tokens in together.items():
        if request_id in aborts:
            assert tokens == alone[request_id][: len(tokens)], request_id
        else:
            assert tokens == alone[request_id], request_id


def logits_of(model: LoadedModel, shard: ShardConfig, plan: PlacementPlan | None) -> Tensor:
    """All logits of a chunked prefill and two decodes of two sequences at once."""
    rng = random.Random(7)
    config = model.checkpoint.config.text_config
    limits = SchedulerLimits.resolve(SchedulerConfig(block_size=8, max_num_seqs=2, max_model_len=128), config)
    runner, experts = create_runner(model, limits, shard, SERVING, plan)
    prompts = [random_prompt(rng, 40), random_prompt(rng, 29)]
    blocks = [array("i", range(1, 9)).tobytes(), array("i", range(9, 17)).tobytes()]
    logits = []
    bounds = [(0, 17), (17, 27), (27, 28), (28, 29)]
    for start, end in bounds:
        rows = [
            SequenceRows(slot, start, prompt[start:end], prompt[max(0, start - 3) : start], table)
            for slot, (prompt, table) in enumerate(zip(prompts, blocks, strict=True))
        ]
        hidden = runner.forward(rows)[1]
        logits.append(runner.transformer.logits(hidden.normed))
    assert experts.take_failures() == []
    experts.close()
    return torch.cat(logits)


def test_residency_and_staging_change_no_bit(model: LoadedModel) -> None:
    counts = model.pool.directory.experts_per_layer
    rng = random.Random(3)
    expected = logits_of(model, ShardConfig(world_size=1), spread_evenly(counts, None))
    profile = record_profile(model, SERVING, [create_request("r", random_prompt(rng, 20))])
    plans = [
        spread_evenly(counts, 0),
        planned(model, profile, "layer_offload", 60),
        planned(model, profile, "static", 60),
        random_plan(rng, counts),
    ]
    for plan in plans:
        for shard in (
            ShardConfig(world_size=1, staging="direct"),
            ShardConfig(world_size=1, staging="staged", num_staging_slots=2),
            ShardConfig(world_size=1, staging="staged", num_staging_slots=7),
        ):
            assert torch.equal(logits_of(model, shard, plan), expected), f"{plan=} {shard.staging=}"
    for max_host_pages in (0, 50):
        tiered = dataclasses.replace(model, pool=create_pool(model.checkpoint, max_host_pages))
        shard = ShardConfig(world_size=1, num_staging_slots=4)
        assert torch.equal(logits_of(tiered, shard, spread_evenly(counts, 20)), expected), (
            f"{max_host_pages=}"
        )


def test_requests_give_the_same_tokens_with_every_plan(model: LoadedModel) -> None:
    rng = random.Random(5)
    counts = model.pool.directory.experts_per_layer
    requests = [
        create_request(f"r{i}", random_prompt(rng, 9), max_tokens=5, temperature=0.8 * (i % 2), seed=i)
        for i in range(4)
    ]
    profile = record_profile(model, SERVING, requests)
    expected = run(create_engine(model, SERVING), requests)
    for plan in (
        planned(model, profile, "layer_offload", 50),
        planned(model, profile, "static", 50),
        random_plan(rng, counts),
    ):
        assert 0 < plan.num_hot < sum(counts)
        assert run(create_engine(model, SERVING, plan=plan), requests) == expected, f"{plan=}"


EAGER = AdaptationSettings(
    half_life_tokens=20, min_gain=0, min_sigmas=0, max_bytes_per_s=1e12, max_burst_bytes=1e12
)
"""Swaps whatever was used a little more, at once."""


@pytest.mark.parametrize("staging", ["staged", "direct"])
def test_swaps_between_steps_change_no_token(model: LoadedModel, monkeypatch, staging: str) -> None:
    monkeypatch.setattr(page_swaps, "STEPS_PER_LOOK", 1)
    rng = random.Random(11)
    counts = model.pool.directory.experts_per_layer
    requests = [
        create_request(f"r{i}", random_prompt(rng, 9), max_tokens=8, temperature=0.8 * (i % 2), seed=i)
        for i in range(4)
    ]
    expected = run(create_engine(model, SERVING), requests)
    shard = ShardConfig(world_size=1, staging=staging, num_staging_slots=5)
    engine = create_engine(model, SERVING, shard, random_plan(rng, counts), adaptation=EAGER)
    assert run(engine, requests, arrivals=[0, 0, 3, 5]) == expected
    swapper = engine._executor._swapper
    assert swapper.news().num_swaps > 20
    swapper.close()


def test_a_plan_hits_what_it_expects_of_the_traffic_it_was_made_for(model: LoadedModel) -> None:
    """The same request again, a row at a time: rows are those of the profile, so what is expected is exact."""
    requests = [create_request("r", [7], max_tokens=12)]
    profile = record_profile(model, SERVING, requests)
    hit_rates = {}
    for arm in ("static", "layer_offload"):
        plan = plan_for(model, profile, arm, 50)
        engine = create_engine(model, SERVING, plan=PlacementPlan(plan.of_rank(0)))
        run(engine, requests)
        traffic = engine.stats().traffic
        hit_rates[arm] = traffic.num_hot / (traffic.num_hot + traffic.num_cold)
        assert hit_rates[arm] == pytest.approx(plan.expected.hit_rate)
        cold_bytes = traffic.num_cold * plan.layout.page_bytes
        assert cold_bytes / profile.num_tokens == pytest.approx(plan.expected.cold_bytes)
    assert hit_rates["static"] > hit_rates["layer_offload"]


@contextmanager
def damaged_page(model: LoadedModel) -> Iterator[None]:
    page = model.pool.page(model.pool.directory.index(3, 1))
    page[5] ^= 1
    try:
        yield
    finally:
        page[5] ^= 1


def test_a_corrupt_page_changes_no_token_while_the_checkpoint_has_it(model: LoadedModel) -> None:
    rng = random.Random(11)
    requests = [create_request(f"r{i}", random_prompt(rng, 2), max_tokens=2) for i in range(8)]
    healthy = run(create_engine(model, SERVING), requests)
    engine = create_engine(model, SERVING, ShardConfig(world_size=1, max_resident_pages=0))
    with damaged_page(model):
        assert run(engine, requests) == healthy


def test_a_lost_page_fails_the_requests_that_need_it_and_no_others(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(11)
    requests = [create_request(f"r{i}", random_prompt(rng, 2), max_tokens=2) for i in range(8)]
    healthy = run(create_engine(model, SERVING), requests)
    engine = create_engine(model, SERVING, ShardConfig(world_size=1, max_resident_pages=0))

    def fail(self: Checkpoint, out: Tensor, name: str, **part: slice) -> None:
        raise CheckpointError(Path("shard"), "cannot be read", name)

    monkeypatch.setattr(Checkpoint, "read_into", fail)
    with damaged_page(model):
        for request in requests:
            assert engine.add(request) is None
        outputs = []
        while engine.has_requests:
            outputs += engine.step()
    failed = {o.request_id: o.error for o in outputs if o.error is not None}
    assert 0 < len(failed) < len(requests)
    assert all("layer 3, expert 1" in error.message for error in failed.values()), failed
    for request_id in healthy.keys() - failed.keys():
        tokens = [t.token_id for o in outputs if o.request_id == request_id for t in o.tokens]
        assert tokens == healthy[request_id]


def test_non_finite_logits_fail_only_their_request(model: LoadedModel) -> None:
    """A cache row that is not finite reaches the sequence that reads it and no other."""
    config = model.checkpoint.config.text_config
    limits = SchedulerLimits.resolve(SchedulerConfig(block_size=8, max_num_seqs=2, max_model_len=64), config)
    runner, _ = create_runner(model, limits, ShardConfig(world_size=1), SERVING)
    sampling = create_request("r", [5]).sampling

    def step(number: int, start: int, tokens: list[int]) -> StepInput:
        tables = [array("i", [1, 3]).tobytes(), array("i", [2, 4]).tobytes()]
        sequences = [
            ScheduledSequence(slot, start, tokens, [5, 6, 7][:start], table, sampling=sampling)
            for slot, table in enumerate(tables)
        ]
        return StepInput(number, sequences)

    runner.run_step(step(1, 0, [5, 6, 7]))
    runner.transformer.caches.windows[0].scales[0] = UE8M0_NAN
    poisoned, healthy = runner.run_step(step(2, 3, [8]))
    assert poisoned.token is None
    assert poisoned.error is not None
    assert "non-finite" in poisoned.error
    assert healthy.error is None
    assert healthy.token is not None
