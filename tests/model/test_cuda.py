"""The model on a GPU: the same golden numbers, the same bits for any residency."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.config import ShardConfig
from model.dspark import Anchor
from model.numerics import Numerics
from model.sampler import greedy
from placement.plan import spread_evenly
from tests.e2e.builders import create_engine, create_request, load_model, run
from tests.model.builders import create_tiny_model
from tests.model.test_golden import GOLDEN_FILE, LAST, TOKENS, VARIANTS, assert_printed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_numbers_hold_on_a_gpu(variant: str, tiny_checkpoints: dict[str, Path]) -> None:
    golden = GOLDEN_FILE["variants"][variant]["result"]
    model = create_tiny_model(tiny_checkpoints[variant], device="cuda")
    logits = model.prefill(TOKENS, splits=(7, 9, 37)).cpu()
    assert greedy(logits).tolist() == golden["argmax"]
    assert_printed(logits[LAST, :16], golden["first16"][str(LAST)], "logits")
    draft = model.dspark.draft([Anchor(0, LAST, golden["draft"]["y"])], greedy)
    assert draft.token_ids.tolist() == [golden["draft"]["drafts"]]


def test_residency_and_staging_change_no_token_on_a_gpu(tiny_checkpoints: dict[str, Path]) -> None:
    model = load_model(tiny_checkpoints["A"], Numerics(), torch.device("cuda"))
    counts = model.pool.directory.experts_per_layer
    requests = [
        create_request(f"r{i}", TOKENS[i : i + 20 + i], max_tokens=12, num_logprobs=3) for i in range(6)
    ]
    expected = run(create_engine(model, Numerics()), requests)
    for resident in (0, 17, 40):
        for staging in ("staged", "direct"):
            shard = ShardConfig(world_size=1, staging=staging, num_staging_slots=4)
            engine = create_engine(model, Numerics(), shard, spread_evenly(counts, resident))
            assert run(engine, requests) == expected, f"{resident=} {staging=}"
