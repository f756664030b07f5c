import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.profile import (
    MAX_COUNT,
    VERSION,
    PhaseProfile,
    Profile,
    ProfileError,
    check,
    compare,
    hit_rate,
    hot_pages,
    load,
    main,
    merge,
    save,
)

SHAPE = (3, 2, 4)


def create_profile(
    prefill: int | list[list[int]] = 1,
    decode: int | list[list[int]] = 1,
    label: str = "code",
    model: str = "m",
) -> Profile:
    def phase(counts: int | list[list[int]]) -> PhaseProfile:
        rows = [[counts] * n for n in SHAPE] if isinstance(counts, int) else counts
        return PhaseProfile(num_tokens=sum(rows[0]), counts=tuple(map(tuple, rows)))

    first, second = phase(prefill), phase(decode)
    return Profile(VERSION, model, {label: first.num_tokens + second.num_tokens}, first, second)


COUNTS = st.tuples(*(st.lists(st.integers(0, 1000), min_size=n, max_size=n) for n in SHAPE)).map(list)
PROFILES = st.builds(create_profile, COUNTS, COUNTS, st.sampled_from(["code", "chat", "law"]))


@given(profile=PROFILES)
def test_a_file_holds_exactly_the_profile(profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    save(profile, path)
    assert load(path) == profile


@given(st.lists(PROFILES, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_merging_adds_up_in_any_order(profiles, rng):
    merged = merge(profiles)
    shuffled = rng.sample(profiles, len(profiles))
    assert merge([merge(shuffled[:1]), *shuffled[1:]]) == merged
    assert merged.num_tokens == sum(p.num_tokens for p in profiles) == sum(merged.labels.values())
    for layer, experts in enumerate(SHAPE):
        for expert in range(experts):
            assert merged.counts[layer][expert] == sum(p.counts[layer][expert] for p in profiles)


@given(PROFILES, st.integers(0, 12))
def test_no_set_of_as_many_pages_has_a_higher_hit_rate(profile, num_pages):
    hot = hot_pages(profile.counts, num_pages)
    assert len(hot) == min(num_pages, sum(SHAPE))
    coldest = min((profile.counts[layer][expert] for layer, expert in hot), default=0)
    others = [
        count
        for layer, row in enumerate(profile.counts)
        for expert, count in enumerate(row)
        if (layer, expert) not in hot
    ]
    assert all(count <= coldest for count in others) or not hot


def test_ties_go_to_the_lower_layer_and_expert():
    assert hot_pages(((1, 1, 1), (2, 1)), 3) == {(1, 0), (0, 0), (0, 1)}


def test_a_comparison_goes_both_ways():
    first = create_profile([[9, 0, 1], [0, 10], [4, 3, 2, 1]], 0)
    second = create_profile([[0, 8, 2], [5, 5], [1, 2, 3, 4]], 0, label="chat")
    comparison = compare(first, second, resident_share=4 / 9)
    # The hot sets are {(0, 0), (1, 1), (2, 0), (2, 1)} and {(0, 1), (1, 0), (1, 1), (2, 3)}.
    assert comparison.num_hot == 4
    assert comparison.overlap == 1 / 7
    assert comparison.own_hit_rates == (26 / 30, 22 / 30)
    assert comparison.crossed_hit_rates == (11 / 30, 8 / 30)


@given(PROFILES, PROFILES, st.floats(0, 1))
def test_nobody_does_better_with_the_others_hot_set(first, second, resident_share):
    comparison = compare(first, second, resident_share)
    assert 0 <= comparison.overlap <= 1
    for own, crossed in zip(comparison.own_hit_rates, comparison.crossed_hit_rates, strict=True):
        assert (own is None) == (crossed is None)
        assert own is None or own >= crossed
    same = compare(first, first, resident_share)
    assert same.overlap == 1
    assert same.own_hit_rates == same.crossed_hit_rates


def test_without_routed_tokens_there_is_no_hit_rate():
    profile = create_profile(0, 0)
    assert hit_rate(profile.counts, hot_pages(profile.counts, 3)) is None
    assert compare(profile, create_profile()).crossed_hit_rates[0] is None


def encode(**changes: object) -> bytes:
    content = json.loads(msgspec.json.encode(create_profile()))
    for name, value in changes.items():
        phase, _, field = name.partition("__")
        if field:
            content[phase][field] = value
        else:
            content[phase] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "truncated"),
        (b"[]", "object"),
        (encode(version=2), r"\$\.version"),
        (encode(surprise=1), "surprise"),
        (encode(decode__num_tokens=-1), r"decode\.num_tokens must be between"),
        (encode(decode__num_tokens=1.5), r"\$\.decode\.num_tokens"),
        (encode(prefill__counts=[[1, 1, -2], [1, 1], [1] * 4]), r"prefill\.counts\[0\]\[2\] must be between"),
        (
            encode(prefill__counts=[[1, 1, 2**63], [1, 1], [1] * 4]),
            r"prefill\.counts\[0\]\[2\] must be between",
        ),
        (encode(prefill__counts=[[1, 1, float("nan")], [1, 1], [1] * 4]), "malformed"),
        (encode(prefill__counts=[[1, 1], [1, 1], [1] * 4]), "experts by layer differ"),
        (encode(prefill__counts=[], decode__counts=[]), "counts need layers"),
        (encode(prefill__counts=[[]], decode__counts=[[]]), "counts need layers"),
        (encode(labels={"code": -1}), r"labels\['code'\]"),
    ],
)
def test_a_malformed_file_is_refused_by_name_and_field(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=problem) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"missing\.json: .*No such file"):
        load(tmp_path / "missing.json")


def test_profiles_that_do_not_belong_together_are_not_merged_or_compared() -> None:
    other_model = create_profile(model="other")
    smaller = create_profile([[1]], [[1]])
    for other, problem in ((other_model, "different models: m and other"), (smaller, "different experts")):
        with pytest.raises(ProfileError, match=problem):
            merge([create_profile(), other])
        with pytest.raises(ProfileError, match=problem):
            compare(create_profile(), other)
    with pytest.raises(ProfileError, match="nothing to merge"):
        merge([])
    with pytest.raises(ProfileError, match="resident_share"):
        compare(create_profile(), create_profile(), 1.5)


def test_a_sum_that_is_too_large_is_refused() -> None:
    large = create_profile([[MAX_COUNT, 0, 0], [0, 0], [0] * 4], 0)
    check(large)
    with pytest.raises(ProfileError, match=r"prefill\.num_tokens must be between"):
        merge([large, large])


def test_the_command_line_shows_merges_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, chat, both = (str(tmp_path / f"{name}.json") for name in ("code", "chat", "both"))
    save(create_profile([[9, 0, 1], [0, 10], [4, 3, 2, 1]], 0), Path(code))
    save(create_profile([[0, 8, 2], [5, 5], [1, 2, 3, 4]], 0, label="chat"), Path(chat))
    main(["merge", code, chat, "--out", both])
    assert load(Path(both)) == merge([load(Path(code)), load(Path(chat))])
    main(["show", both])
    assert "chat: 10 tokens" in capsys.readouterr().out
    main(["compare", code, chat, "--resident-share", "0.4444"])
    assert "overlap (Jaccard) 0.143" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"placement\.profile: .*nowhere\.json"):
        main(["show", str(tmp_path / "nowhere.json")])
