import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.tiny import tiny_config
from placement.adaptation import AdaptationSettings
from placement.engine_plan import ExpertLayout, PlanError, check, load
from placement.plan import (
    PlacementPlan,
    budget_of_offload,
    create_plan,
    host_experts,
    main,
    spread_evenly,
)
from placement.profile import save as save_profile
from tests.unit.placement.builders import (
    SMALL,
    SMALL_COUNTS,
    create_model,
    create_profile,
    create_small_plan,
)

LAYERS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(deadline=None)
@given(LAYERS, st.integers(0, 150))
def test_the_bound_is_used_whole_and_never_exceeded(experts_per_layer, max_resident_pages):
    plan = spread_evenly(experts_per_layer, max_resident_pages)
    assert plan.num_hot == min(max_resident_pages, sum(experts_per_layer))
    for hot, num_experts in zip(plan.hot_experts, experts_per_layer, strict=True):
        assert list(hot) == sorted(set(hot))
        assert set(hot) <= set(range(num_experts))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 150))
def test_equal_layers_differ_by_one_page_at_most(num_experts, num_layers, max_resident_pages):
    counts = [len(hot) for hot in spread_evenly([num_experts] * num_layers, max_resident_pages).hot_experts]
    assert max(counts) - min(counts) <= 1


@settings(deadline=None)
@given(LAYERS)
def test_without_a_bound_every_page_is_hot(experts_per_layer):
    plan = spread_evenly(experts_per_layer, None)
    assert plan.hot_experts == tuple(tuple(range(count)) for count in experts_per_layer)


@settings(deadline=None)
@given(
    LAYERS.flatmap(
        lambda layers: st.tuples(*(st.sets(st.integers(0, n - 1)) for n in layers)).map(
            lambda hot: (layers, hot)
        )
    ),
    st.integers(0, 60),
)
def test_a_bounded_pool_holds_cold_pages_before_hot_ones(layers_and_hot, max_host_pages):
    experts_per_layer, hot = layers_and_hot
    plan = PlacementPlan(tuple(tuple(sorted(experts)) for experts in hot))
    held = host_experts(experts_per_layer, max_host_pages, plan)
    assert sum(map(len, held)) == min(max_host_pages, sum(experts_per_layer))
    num_hot_held = sum(len(hot_experts.intersection(h)) for hot_experts, h in zip(hot, held, strict=True))
    num_cold = sum(experts_per_layer) - plan.num_hot
    assert num_hot_held == max(0, min(max_host_pages, sum(experts_per_layer)) - num_cold)
    for experts, num_experts in zip(held, experts_per_layer, strict=True):
        assert list(experts) == sorted(set(experts))
        assert set(experts) <= set(range(num_experts))
    assert host_experts(experts_per_layer, None, plan) == host_experts(experts_per_layer, None)


def test_without_a_plan_a_bounded_pool_holds_the_last_experts_of_every_layer():
    assert host_experts((4, 4, 2), 5) == ((2, 3), (2, 3), (1,))


COUNTS = st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=3, max_size=3).filter(
    lambda counts: any(map(any, counts))
)
RANKS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])


@settings(deadline=None)
@given(
    COUNTS,
    RANKS,
    st.sampled_from(["layer_offload", "static", "adaptive"]),
    st.integers(0, 14),
    st.integers(0, 2),
)
def test_every_page_has_one_place_on_its_ranks_and_none_exceeds_the_budget(
    counts, ranks, arm, num_pages, num_slots
):
    layout = ExpertLayout.of(create_model(), *ranks)
    budget_bytes = (num_pages + num_slots) * layout.page_bytes + 17
    plan = create_plan(
        create_profile(*counts),
        create_model(),
        layout,
        arm=arm,
        budget_bytes=budget_bytes,
        num_staging_slots=num_slots,
    )
    check(plan)
    for rank, memory in enumerate(plan.memory):
        hot = plan.of_rank(rank)
        cold = [set(range(4 // layout.ep_size)) - set(experts) for experts in hot]
        assert sum(map(len, hot)) + sum(map(len, cold)) == layout.num_rank_pages == memory.num_pool_pages
        assert memory.hot_bytes + memory.staging_bytes <= budget_bytes
        if arm == "layer_offload":
            assert all(len(experts) in (0, 4 // layout.ep_size) for experts in hot)
        else:
            assert memory.num_hot_pages == min(num_pages, layout.num_rank_pages)
    assert 0 <= plan.expected.hit_rate <= 1
    assert plan.expected.cold_bytes == pytest.approx(sum(plan.expected.cold_bytes_by_rank))
    assert plan.expected.cold_bytes == pytest.approx(sum(layer.cold_bytes for layer in plan.expected.layers))


@settings(deadline=None)
@given(COUNTS, RANKS, st.integers(0, 12))
def test_no_arm_reads_more_than_whole_layers_would_make_it(counts, ranks, num_pages):
    layout = ExpertLayout.of(create_model(), *ranks)
    static, adaptive, layers = (
        create_plan(
            create_profile(*counts),
            create_model(),
            layout,
            arm=arm,
            budget_bytes=num_pages * layout.page_bytes,
            num_staging_slots=0,
        )
        for arm in ("static", "adaptive", "layer_offload")
    )
    assert static.hot_experts == adaptive.hot_experts
    assert static.expected.cold_bytes <= layers.expected.cold_bytes + 1e-6


def test_the_expected_numbers_are_those_of_the_profile_and_say_what_they_assume():
    plan = create_small_plan(num_rows=1)
    page_bytes = plan.layout.page_bytes
    # Cold: 0.1 of expert 3; 0.1 of expert 0; 0.25 of each draft expert. Two ranks hold slices of each.
    first, second = 0.1 + 2 * 0.25, 0.1 + 2 * 0.25
    assert plan.expected.cold_bytes == pytest.approx(2 * (first + second) * page_bytes)
    assert plan.expected.cold_bytes_by_rank == pytest.approx(
        [first * page_bytes] * 2 + [second * page_bytes] * 2
    )
    assert [layer.cold_bytes / page_bytes for layer in plan.expected.layers] == pytest.approx([0.2, 0.2, 2])
    assert [layer.hit_rate for layer in plan.expected.layers] == [19 / 20, 19 / 20, 0]
    assert plan.expected.hit_rate == 38 / 44
    assert (plan.assumptions.labels, plan.assumptions.num_tokens) == ({"code": 10}, 10)
    assert plan.assumptions.num_rows == 1
    assert create_small_plan().assumptions.num_rows == 6  # a token and five drafts


def test_whole_layers_are_offloaded_from_the_first_on():
    plan = create_small_plan(arm="layer_offload", budget_bytes=5 * create_small_plan().layout.page_bytes)
    assert plan.hot_experts == (((), (0, 1), (0, 1)), ((), (2, 3), (2, 3)))


def test_a_layer_that_was_not_profiled_has_no_hit_rate_and_is_cold_first():
    layout = ExpertLayout.of(create_model(), 1, 1)
    plan = create_plan(
        create_profile([1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]),
        create_model(),
        layout,
        arm="static",
        budget_bytes=6 * layout.page_bytes,
        num_staging_slots=0,
    )
    assert plan.hot_experts == (((0, 1, 2, 3), (1, 2), ()),)
    assert plan.expected.layers[2].hit_rate is None
    assert plan.expected.cold_bytes == 0


def test_the_arm_adaptive_says_how_it_adapts():
    adaptive = create_small_plan(arm="adaptive")
    assert adaptive.adaptation.settings == AdaptationSettings()
    assert adaptive.adaptation.rates[1] == (0.1, 0.8, 0.6, 0.5)
    assert adaptive.rates_of_rank(3)[1] == (0.6, 0.5)
    slow = AdaptationSettings(half_life_tokens=9)
    assert create_small_plan(arm="adaptive", adaptation=slow).adaptation.settings == slow
    with pytest.raises(PlanError, match="adaptation belongs to the arm adaptive"):
        create_small_plan(adaptation=slow)


def test_an_offload_leaves_at_least_as_much_cold():
    layout = ExpertLayout.of(create_model(), 4, 2)
    for offload_bytes, num_cold in ((0, 0), (1, 1), (layout.page_bytes, 1), (layout.page_bytes + 1, 2)):
        assert budget_of_offload(layout, offload_bytes, 3) == (6 - num_cold + 3) * layout.page_bytes
    with pytest.raises(PlanError, match=r"1\.00 GiB of each rank's pages cannot be cold: it has 0\.15 MiB"):
        budget_of_offload(layout, 2**30, 3)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        (([0] * 4, [0] * 4, [0] * 4), "no routed token"),
        (([1] * 4, [1] * 4), r"the profile has \(4, 4\) experts by layer, the model \(4, 4, 4\)"),
        (([1] * 8, [1] * 4, [1] * 4), r"the profile has \(8, 4, 4\) experts by layer"),
    ],
)
def test_a_profile_that_says_nothing_or_is_of_another_model_is_refused(counts, problem: str) -> None:
    layout = ExpertLayout.of(create_model(), 1, 1)
    with pytest.raises(PlanError, match=problem):
        create_plan(create_profile(*counts), create_model(), layout, arm="static", budget_bytes=2**30)


def test_a_budget_without_room_for_the_staging_ring_is_refused():
    with pytest.raises(PlanError, match="have no room for 1 staging slots of 26112 bytes"):
        create_small_plan(budget_bytes=create_small_plan().layout.page_bytes - 1)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Options that every command line needs."""
    config = tiny_config()
    config["text_config"] = config["text_config"] | SMALL
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_profile(create_profile(*SMALL_COUNTS), tmp_path / "profile.json")
    return f"--profile {tmp_path / 'profile.json'} --config {tmp_path} --world-size 4".split()


def test_the_command_line_writes_and_shows_a_plan(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    page_gib = create_small_plan().layout.page_bytes / 2**30
    options = f"--ep-size 2 --staging-slots 1 --out {out}".split()
    main([*command, *options, "--arm", "static", "--gpu-budget-gib", str(4 * page_gib)])
    assert capsys.readouterr().out == ""
    assert load(out) == create_small_plan()
    config = ["--config", str(tmp_path / "config.json")]
    main([*command, *options, *config, "--arm", "static", "--offload-gib", str(3 * page_gib), "--show"])
    assert load(out) == create_small_plan()
    shown = capsys.readouterr().out
    assert "each rank: 3 hot pages of 6, 26112 bytes each: 0.07 MiB" in shown
    assert "assumed: 10 profiled tokens (code: 10), 6 independent rows a step" in shown
    assert "expected: hit rate 86.4%" in shown
    assert "layer 1: 3 of 4 hot, hit rate 95.0%" in shown
    settings = ["--half-life-tokens", "7", "--min-gain", "0.5", "--swap-gib-per-s", "1"]
    main([*command, *options, "--arm", "adaptive", "--offload-gib", "0", *settings])
    settings = load(out).adaptation.settings
    assert settings == AdaptationSettings(7, 0.5, max_bytes_per_s=2**30, max_burst_bytes=2**30)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--gpu-budget-gib nan", "--gpu-budget-gib must be a number from 0 on, got nan"),
        ("--gpu-budget-gib -1", "--gpu-budget-gib must be a number from 0 on, got -1.0"),
        ("--offload-gib inf", "--offload-gib must be a number from 0 on, got inf"),
        ("--offload-gib 1", "cannot be cold"),
        ("--gpu-budget-gib 0", "no room for [0-9]+ staging slots"),
        ("--offload-gib 0 --ep-size 0", "--ep-size must be at least 1, got 0"),
        ("--offload-gib 0 --ep-size 3", "ep_size = 3 does not divide world_size = 4"),
        ("--offload-gib 0 --world-size -8", "--world-size must be at least 1, got -8"),
        ("--offload-gib 0 --staging-slots -1", "--staging-slots must be at least 0, got -1"),
        ("--offload-gib 0 --rows-per-step 0", "--rows-per-step must be at least 1, got 0"),
        ("--offload-gib 0 --min-gain 1", "adaptation belongs to the arm adaptive"),
        ("--offload-gib 0 --arm adaptive --min-gain -1", r"adaptation: .*\$\.min_gain"),
        ("--offload-gib 0 --arm adaptive --min-gain nan", r"adaptation: .*\$\.min_gain"),
        ("--offload-gib 0 --profile nowhere.json", r"nowhere\.json: .*No such file"),
        ("--offload-gib 0 --config nowhere.json", r"nowhere\.json: cannot be read"),
        ("--offload-gib 0 --out nowhere/plan.json", r"nowhere/plan\.json: .*No such file"),
    ],
)
def test_the_command_line_says_in_one_line_what_is_wrong(
    command: list[str], options: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=rf"^placement\.plan: .*{problem}") as error:
        main([*command, "--arm", "static", "--out", str(tmp_path / "plan.json"), *options.split()])
    assert "\n" not in str(error.value)


def test_the_command_line_wants_a_size_and_something_to_do(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for options, problem in (
        ("--arm static --out plan.json", "--gpu-budget-gib --offload-gib is required"),
        ("--arm static --offload-gib 0 --gpu-budget-gib 1 --show", "not allowed with"),
        ("--arm static --offload-gib 0", "nothing to do"),
        ("--arm best --offload-gib 0 --show", "invalid choice: 'best'"),
    ):
        with pytest.raises(SystemExit):
            main([*command, *options.split()])
        assert problem in capsys.readouterr().err


def test_the_released_model_is_planned_with_the_same_result_every_time():
    """40 layers of 384 experts and three drafts of 128, with many ties."""
    released = {
        "num_hidden_layers": 40,
        "num_nextn_predict_layers": 3,
        "compress_ratios": [1] * 40 + [0] * 3,
        "dspark_target_layer_ids": [37, 38, 39],
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "dspark_n_routed_experts": 128,
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
    }
    model = create_model(**released)
    counts = [
        [(31 * layer + 17 * expert) % 97 for expert in range(384 if layer < 40 else 128)]
        for layer in range(43)
    ]
    first, second = (
        create_plan(
            create_profile(*counts),
            model,
            ExpertLayout.of(model, 8, ep_size),
            arm="static",
            budget_bytes=22 * 2**30,
        )
        for ep_size in (8, 8)
    )
    assert first == second
    assert first.layout.page_bytes == 18_800_640
    assert first.memory[0].pool_bytes == 18_800_640 * (40 * 384 + 3 * 128) // 8
    assert first.memory[0].num_hot_pages == 22 * 2**30 // 18_800_640 - 14  # slots that 256 MiB hold
