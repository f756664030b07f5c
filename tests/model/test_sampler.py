"""Token choice: greedy ties, filters in their order, draws that follow the distribution, log-probabilities."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from actors.messages import SamplingParams
from model.sampler import TILE_ROWS, Choice, filter_probabilities, greedy, sample

NUM_DRAWS = 4_000


def create_logits(vocab: int, seed: int = 0) -> Tensor:
    """Random logits in steps of a half, so that many tie."""
    values = torch.randn(vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 4).round() / 2


def sample_one(logits: Tensor, settings: SamplingParams, position: int = 0) -> Choice | None:
    (choice,) = sample(logits.unsqueeze(0), [settings], [position])
    return choice


def filter_one(logits: Tensor, settings: SamplingParams) -> Tensor:
    return filter_probabilities(logits.unsqueeze(0), [settings]).squeeze(0)


def draw(logits: Tensor, settings: SamplingParams, position: int = 0) -> int:
    choice = sample_one(logits, settings, position)
    assert choice is not None
    return choice.token_id


def naive_filter(logits: Sequence[float], settings: SamplingParams) -> list[float]:
    """Temperature, min_p, top_k, top_p, in this order, on Python lists."""
    weights = [math.exp((x - max(logits)) / settings.temperature) for x in logits]
    kept = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept = [token for token in kept if weights[token] >= settings.min_p * weights[kept[0]]]
    if settings.top_k:
        kept = kept[: settings.top_k]
    if settings.top_p < 1:
        mass = sum(weights[token] for token in kept)
        before, nucleus = 0.0, []
        for token in kept:
            if before < settings.top_p * mass:
                nucleus.append(token)
            before += weights[token]
        kept = nucleus
    mass = sum(weights[token] for token in kept)
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(logits))]


def assert_follows(draws: Iterable[int], probabilities: Sequence[float]) -> None:
    """Chi-square test: fails a right sampler once in 10,000 sets of draws, and these draws are always the same."""
    counts = Counter(draws)
    total = counts.total()
    support = [token for token, p in enumerate(probabilities) if p > 0]
    assert set(counts) <= set(support), f"drawn though filtered out: {set(counts) - set(support)}"
    assert min(probabilities[token] for token in support) * total >= 5, "too few draws for the rarest token"
    statistic = sum(
        (counts[token] - probabilities[token] * total) ** 2 / (probabilities[token] * total)
        for token in support
    )
    freedom = len(support) - 1
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3  # Wilson and Hilferty
    assert statistic < limit, f"{statistic=:.1f} {limit=:.1f} {counts=}"


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, min_p=0.05),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.613),
    SamplingParams(temperature=1.7, min_p=0.02, top_k=9, top_p=0.87),
]


def test_greedy_takes_the_lowest_id_among_the_largest_logits() -> None:
    logits = torch.tensor(
        [[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-5.0, -4.0, -9.0, -4.0], [-0.0, 0.0, -1.0, 0.0]]
    )
    assert greedy(logits).tolist() == [1, 0, 1, 0]
    assert greedy(logits.double()).tolist() == [1, 0, 1, 0]
    assert greedy(logits.T.contiguous().T).tolist() == [1, 0, 1, 0]
    assert greedy(logits[:0]).tolist() == []


def test_temperature_zero_is_greedy_whatever_the_filters() -> None:
    for seed in range(20):
        logits = create_logits(50, seed)
        settings = SamplingParams(temperature=0, top_k=3, top_p=0.2, min_p=0.9, seed=seed)
        assert draw(logits, settings, position=seed) == logits.tolist().index(max(logits.tolist()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_choose_nothing(temperature: float, bad: float) -> None:
    logits = create_logits(10)
    logits[7] = bad
    assert sample_one(logits, SamplingParams(temperature=temperature)) is None


@pytest.mark.parametrize("settings", FILTERS)
def test_filters_follow_their_definition(settings: SamplingParams) -> None:
    for seed in range(20):
        logits = create_logits(40, seed)
        actual = filter_one(logits, settings)
        assert actual.dtype == torch.float64
        assert actual.tolist() == pytest.approx(
            naive_filter(logits.tolist(), settings), rel=1e-12, abs=1e-300
        )
        assert actual.sum().item() == pytest.approx(1, rel=1e-12)


def test_ties_at_a_cut_keep_the_lower_ids() -> None:
    def kept(**filters: float) -> list[int]:
        equal = torch.tensor([1.0, 2.0, 2.0, 2.0, 2.0, 1.0])
        return filter_one(equal, SamplingParams(**filters)).nonzero().flatten().tolist()  # type: ignore[arg-type]

    assert kept(top_k=2) == [1, 2]
    assert kept(top_k=5) == [0, 1, 2, 3, 4]
    assert kept(top_p=1e-9) == [1]
    assert kept(min_p=1.0) == [1, 2, 3, 4]
    # Of four equal halves of a half, two reach one half exactly: the third is not needed.
    assert kept(min_p=1.0, top_p=0.5) == [1, 2]
    assert kept(min_p=1.0, top_p=0.51) == [1, 2, 3]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # After top_k = 2 the first token holds 4 / 7 of the mass.
    settings = SamplingParams(top_k=2, top_p=0.55)
    assert filter_one(logits, settings).tolist() == [1, 0, 0, 0]
    settings = SamplingParams(top_p=0.55)
    assert filter_one(logits, settings).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])


@pytest.mark.parametrize("settings", FILTERS)
def test_draws_over_the_positions_of_a_sequence_follow_the_distribution(settings: SamplingParams) -> None:
    logits = create_logits(12, seed=3) / 3
    expected = naive_filter(logits.tolist(), settings)
    assert_follows((draw(logits, settings, position) for position in range(NUM_DRAWS)), expected)


def test_draws_over_seeds_follow_the_distribution() -> None:
    logits = create_logits(12, seed=4) / 3
    draws = (draw(logits, SamplingParams(seed=seed), position=17) for seed in range(NUM_DRAWS))
    assert_follows(draws, naive_filter(logits.tolist(), SamplingParams()))


def test_neighbouring_positions_and_seeds_are_drawn_independently() -> None:
    logits = torch.zeros(4)
    for step_seed, step_position in ((0, 1), (1, 0)):
        pairs = (
            4 * draw(logits, SamplingParams(seed=n * step_seed), n * step_position)
            + draw(logits, SamplingParams(seed=(n + 1) * step_seed), (n + 1) * step_position)
            for n in range(0, NUM_DRAWS, 2)
        )
        assert_follows(pairs, [1 / 16] * 16)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    cases = [(seed, position) for seed in (0, 1, 2**63, 2**64 - 1, -5) for position in (0, 1, 70, 10**6)]
    logits = {
        case: torch.randn(200, generator=torch.Generator().manual_seed(n)) for n, case in enumerate(cases)
    }
    alone = {case: draw(logits[case], SamplingParams(seed=case[0]), case[1]) for case in cases}
    torch.manual_seed(1)
    random.Random(0).shuffle(cases)
    for case in cases:
        torch.rand(3)  # the global generator has no part in it
        assert draw(logits[case], SamplingParams(seed=case[0]), case[1]) == alone[case]
        assert draw(logits[case].double(), SamplingParams(seed=case[0]), case[1]) == alone[case]


def test_other_seeds_and_positions_give_other_draws() -> None:
    logits = torch.zeros(1000)
    base = [draw(logits, SamplingParams(seed=5), position) for position in range(100)]
    other_seed = [draw(logits, SamplingParams(seed=6), position) for position in range(100)]
    shifted = [draw(logits, SamplingParams(seed=5), position + 1) for position in range(100)]
    for other in (other_seed, shifted):
        assert sum(a == b for a, b in zip(base, other, strict=True)) <= 3


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
def test_log_probabilities_ignore_temperature_and_filters(temperature: float) -> None:
    logits = create_logits(30, seed=8)
    settings = SamplingParams(temperature=temperature, top_k=20, top_p=0.9, min_p=0.01, num_logprobs=4)
    choice = sample_one(logits, settings, 3)
    assert choice is not None
    norm = math.log(sum(math.exp(x) for x in logits.tolist()))
    assert choice.logprob == pytest.approx(logits[choice.token_id].item() - norm, rel=1e-12)
    best = sorted(range(30), key=lambda token: (-logits[token].item(), token))[:4]
    assert [token for token, _ in choice.top_logprobs] == best
    assert [p for _, p in choice.top_logprobs] == pytest.approx(
        [logits[token].item() - norm for token in best], rel=1e-12
    )


def test_equal_log_probabilities_are_listed_by_id() -> None:
    choice = sample_one(
        torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0]), SamplingParams(temperature=0, num_logprobs=4)
    )
    assert choice is not None
    assert [token for token, _ in choice.top_logprobs] == [1, 2, 4, 0]


def test_log_probabilities_are_given_only_if_asked_for() -> None:
    logits = create_logits(10)
    none, zero = (sample_one(logits, SamplingParams(num_logprobs=n)) for n in (None, 0))
    assert none is not None
    assert zero is not None
    assert (none.logprob, none.top_logprobs) == (None, ())
    assert zero.logprob is not None
    assert zero.logprob < 0
    assert zero.top_logprobs == ()


def test_rows_are_sampled_as_if_they_were_alone() -> None:
    """Whatever is beside them, failed rows included, and over the tiles that they are filtered in."""
    draws = random.Random(3)
    settings = [
        msgspec.structs.replace(draws.choice(FILTERS), seed=i, num_logprobs=draws.choice([None, 0, 2, 5]))
        if i % 4
        else SamplingParams(temperature=0, num_logprobs=draws.choice([None, 3]))
        for i in range(3 * TILE_ROWS + 1)
    ]
    logits = torch.stack([create_logits(60, seed) for seed in range(len(settings))])
    logits[5, 3], logits[8, 1] = math.nan, math.inf
    positions = [7 * i for i in range(len(settings))]
    together = sample(logits, settings, positions)
    assert together == [sample_one(*row) for row in zip(logits, settings, positions, strict=True)]
    assert [i for i, choice in enumerate(together) if choice is None] == [5, 8]
    assert sample(logits[:0], [], []) == []
