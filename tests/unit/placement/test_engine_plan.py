import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from placement.engine_plan import EnginePlan, ExpertLayout, PlanError, check_fits, load, save
from tests.unit.placement.builders import create_model, create_small_plan

PLAN = create_small_plan()


def test_a_file_holds_exactly_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(PLAN, path)
    assert load(path) == PLAN


def test_the_ranks_of_a_group_keep_slices_of_the_same_experts() -> None:
    assert PLAN.layout.world_size == 4
    assert PLAN.hot_experts == (((0, 1), (1,), ()), ((2,), (2, 3), ()))
    assert [PLAN.of_rank(rank) for rank in range(4)] == [
        ((0, 1), (1,), ()),
        ((0, 1), (1,), ()),
        ((0,), (0, 1), ()),
        ((0,), (0, 1), ()),
    ]


def edit(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads(msgspec.json.encode(PLAN))
    change(content)
    return json.dumps(content).encode()


def put(value: object, *path: str | int) -> bytes:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return edit(change)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "truncated"),
        (b"[]", "object"),
        (put(2, "version"), r"\$\.version"),
        (put(1, "surprise"), "surprise"),
        (edit(lambda content: content.pop("model_hash")), "model_hash"),
        (put("best", "arm"), r"\$\.arm"),
        (put(-1, "budget_bytes"), r"\$\.budget_bytes"),
        (put(1.5, "hot_experts", 0, 0, 0), r"\$\.hot_experts"),
        (put(float("nan"), "expected", "hit_rate"), "malformed"),
        (put(1.1, "expected", "layers", 0, "hit_rate"), r"\$\.expected\.layers\[0\]\.hit_rate"),
        (put(-0.5, "expected", "cold_bytes"), r"\$\.expected\.cold_bytes"),
        (put(0, "layout", "world_size"), r"\$\.layout\.world_size"),
        (put(3, "layout", "ep_size"), "ep_size = 3 does not divide world_size = 4"),
        (put([4, 4, 3], "layout", "experts_per_layer"), r"does not divide experts_per_layer\[2\] = 3"),
        (put([], "layout", "experts_per_layer"), "experts_per_layer is empty"),
        (put(7, "layout", "page_bytes"), "page_bytes is 7, but such a page has"),
        (put(33, "layout", "hidden_size"), "hidden_size and intermediate_size in multiples"),
        (put([], "hot_experts"), "hot_experts has 0 entries instead of 2"),
        (put([[0], [0]], "hot_experts", 1), r"hot_experts\[1\] has 2 entries instead of 3"),
        (put([1, 0], "hot_experts", 0, 0), r"hot_experts\[0\]\[0\] must ascend within 0 to 1"),
        (put([1, 1], "hot_experts", 0, 0), r"hot_experts\[0\]\[0\] must ascend"),
        (put([0, 2], "hot_experts", 0, 0), r"hot_experts\[0\]\[0\] must ascend within 0 to 1, got \(0, 2\)"),
        (put([-1], "hot_experts", 0, 0), r"hot_experts\[0\]\[0\] must ascend"),
        (put([0], "hot_experts", 0, 0), r"memory\[0\] is RankMemory\(num_hot_pages=3"),
        (put([], "memory"), "memory has 0 entries instead of 4"),
        (put([0.0], "expected", "cold_bytes_by_rank"), "cold_bytes_by_rank has 1 entries instead of 4"),
        (put([], "expected", "layers"), r"expected\.layers has 0 entries instead of 3"),
        (
            put(PLAN.budget_bytes - PLAN.layout.page_bytes, "budget_bytes"),
            "budget_bytes is .* but rank 0 has",
        ),
        (put("adaptive", "arm"), "adaptation belongs to the arm adaptive"),
        (
            put({"settings": {}, "rates": [[0.5] * 4] * 3}, "adaptation"),
            "adaptation belongs to .* the arm is static",
        ),
        (
            put({"settings": {}, "rates": [[0.5] * 3] * 3}, "adaptation"),
            r"adaptation\.rates\[0\] has 3 entries",
        ),
        (
            put({"settings": {"min_gain": -0.1}, "rates": []}, "adaptation"),
            r"\$\.adaptation\.settings\.min_gain",
        ),
        (put({"settings": {"half_life_tokens": 0}, "rates": []}, "adaptation"), r"\.half_life_tokens"),
    ],
)
def test_a_malformed_file_is_refused_by_name_and_field(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=problem) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_files_that_cannot_be_read_or_written_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"missing\.json: .*No such file"):
        load(tmp_path / "missing.json")
    with pytest.raises(PlanError, match=r"nowhere/plan\.json: .*No such file"):
        save(PLAN, tmp_path / "nowhere" / "plan.json")
    with pytest.raises(PlanError, match="hot_experts has 0 entries"):
        save(msgspec.structs.replace(PLAN, hot_experts=()), tmp_path / "plan.json")


def refusal(plan: EnginePlan = PLAN, layout: ExpertLayout = PLAN.layout, **changes: Any) -> str:
    engine = {"model_hash": "m", "num_staging_slots": 1} | changes
    with pytest.raises(PlanError) as error:
        check_fits(plan, layout=layout, **engine)
    return str(error.value)


def test_a_plan_for_another_engine_is_refused_and_says_what_differs() -> None:
    check_fits(PLAN, model_hash="m", layout=PLAN.layout, num_staging_slots=1)
    check_fits(PLAN, model_hash="m", layout=PLAN.layout, num_staging_slots=0)
    assert refusal(model_hash="other").endswith("model_hash is m in it and other here")
    assert refusal(num_staging_slots=2) == (
        "the plan has room for 1 staging slots, but num_staging_slots is 2"
    )
    for model, ranks, difference in (
        (create_model(), (2, 2), "world_size is 4 in it and 2 here"),
        (create_model(), (4, 4), "ep_size is 2 in it and 4 here"),
        (create_model(n_routed_experts=8), (4, 2), "experts_per_layer is (4, 4, 4) in it and (8, 8, 4) here"),
        (create_model(hidden_size=512), (4, 2), "hidden_size is 256 in it and 512 here"),
        (create_model(moe_intermediate_size=256), (4, 2), "intermediate_size is 64 in it and 128 here"),
    ):
        assert refusal(layout=ExpertLayout.of(model, *ranks)).endswith(difference)


@pytest.mark.parametrize(
    ("world_size", "ep_size", "problem"),
    [
        (8, 8, r"ep_size = 8 does not divide experts_per_layer\[0\] = 4"),
        (8, 1, "hidden_size and intermediate_size in multiples of 32"),
        (6, 2, "moe_intermediate_size = 128 cannot be cut"),
        (1, 2, "ep_size = 2 does not divide world_size = 1"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(world_size: int, ep_size: int, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        ExpertLayout.of(create_model(), world_size, ep_size)


def test_a_layout_is_the_models_own() -> None:
    """`model.parallel` and `model.expert_pages` say what the shards do."""
    from model.expert_pages import local_experts_per_layer, page_layout
    from model.parallel import ParallelLayout

    model = create_model()
    for world_size, ep_size in ((1, 1), (2, 1), (2, 2), (4, 2), (4, 4)):
        layout = ExpertLayout.of(model, world_size, ep_size)
        for rank in range(world_size):
            parallel = ParallelLayout(rank, world_size, ep_size)
            assert rank // layout.num_slices == parallel.ep_rank
            local = layout.local_experts(parallel.ep_rank)
            assert local == [parallel.local_experts(n) for n in layout.experts_per_layer]
            assert layout.num_rank_pages == sum(local_experts_per_layer(model, parallel))
            assert layout.page_bytes == page_layout(model, parallel).num_bytes
