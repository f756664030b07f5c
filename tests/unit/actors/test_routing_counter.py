"""Routed slots are counted by phase, layer and expert."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.routing_counter import RoutingCounter
from placement.profile import check

EXPERTS_PER_LAYER = (5, 5, 3)


@dataclass
class Queries:
    sequence: Tensor


@dataclass
class Rows:
    queries: Queries


@dataclass
class Batch:
    """What the counter looks at of a ForwardBatch."""

    encoder: Rows
    decoder_rows: Tensor


def create_batch(num_rows: list[int], decoder_rows: list[int]) -> Batch:
    sequence = torch.repeat_interleave(torch.arange(len(num_rows)), torch.tensor(num_rows))
    return Batch(Rows(Queries(sequence)), torch.tensor(decoder_rows))


def test_counts_are_those_of_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    counter = RoutingCounter("hash", EXPERTS_PER_LAYER, torch.device("cpu"))
    expected: Counter[tuple[str, int, int]] = Counter()
    num_tokens = {"prefill": 0, "decode": 0}
    for num_rows, decoder_rows in (([3, 1, 1], [2, 3, 4]), ([1, 1], [0, 1]), ([4], [1, 2, 3])):
        counter.begin_step(create_batch(num_rows, decoder_rows), num_rows)  # type: ignore[arg-type]
        phases = ["decode" if n == 1 else "prefill" for n in num_rows for _ in range(n)]
        for phase in phases:
            num_tokens[phase] += 1
        for layer, num_experts in enumerate(EXPERTS_PER_LAYER):
            rows = decoder_rows if layer == 2 else range(len(phases))
            topk_idx = torch.randint(num_experts, (len(rows), 2), generator=generator)
            counter(layer, "topk_weights", torch.zeros(len(rows), 2))
            counter(layer, "topk_idx", topk_idx)
            for row, choices in zip(rows, topk_idx.tolist(), strict=True):
                expected.update((phases[row], layer, expert) for expert in choices)
    profile = counter.profile("code")
    check(profile)
    assert (profile.model_hash, profile.labels) == ("hash", {"code": sum(num_tokens.values())})
    for name, phase in (("prefill", profile.prefill), ("decode", profile.decode)):
        assert phase.num_tokens == num_tokens[name]
        assert [len(row) for row in phase.counts] == list(EXPERTS_PER_LAYER)
        for layer, row in enumerate(phase.counts):
            assert list(row) == [expected[name, layer, expert] for expert in range(len(row))]
