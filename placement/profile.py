"""Profile: how often a workload routes its tokens to each expert. Kept as JSON, merged, compared.

    python -m placement.profile show FILE
    python -m placement.profile merge FILE FILE... --out FILE
    python -m placement.profile compare FILE FILE [--resident-share 0.69]

Source: design section 6. A profile from the wrong domain can be worse than none, so a file says what it was
recorded from, and two files can be held against each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

VERSION: Final = 1
MAX_COUNT: Final = 2**63 - 1
"""What the engine counts with."""
RESIDENT_SHARE: Final = 0.69
"""Share of pages that eight 32 GB GPUs keep resident (design section 10)."""

Counts = tuple[tuple[int, ...], ...]
"""Routed slots by layer and global expert id, drafts after the backbone."""


class ProfileError(ValueError):
    """A profile that cannot be used: its file is malformed, or it does not fit another one."""


class PhaseProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One phase of a workload."""

    num_tokens: int
    counts: Counts


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload's routing.

    Invariant: both phases have the same layers and experts, and no number is negative or above MAX_COUNT.
    """

    version: Literal[1]
    model_hash: str
    """The checkpoint's `content_hash`: expert ids mean something for this model alone."""
    labels: dict[str, int]
    """Tokens by workload label."""
    prefill: PhaseProfile
    decode: PhaseProfile

    @property
    def num_tokens(self) -> int:
        """Of both phases."""
        return self.prefill.num_tokens + self.decode.num_tokens

    @property
    def counts(self) -> Counts:
        """Of both phases."""
        return _add(self.prefill.counts, self.decode.counts)


def load(path: Path) -> Profile:
    """Read a profile.

    Raises: ProfileError that names the file and what is wrong in it.
    """
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
        check(profile)
    except (OSError, msgspec.MsgspecError, ProfileError) as error:
        raise ProfileError(f"{path}: {error}") from error
    return profile


def save(profile: Profile, path: Path) -> None:
    """Write a profile.

    Raises: ProfileError if it breaks the invariant.
    """
    check(profile)
    path.write_bytes(msgspec.json.encode(profile) + b"\n")


def check(profile: Profile) -> None:
    """Assert the invariant.

    Raises: ProfileError that names the field.
    """
    shapes = {}
    for name in ("prefill", "decode"):
        phase: PhaseProfile = getattr(profile, name)
        _check_number(f"{name}.num_tokens", phase.num_tokens)
        for layer, counts in enumerate(phase.counts):
            for expert, count in enumerate(counts):
                _check_number(f"{name}.counts[{layer}][{expert}]", count)
        shapes[name] = [len(counts) for counts in phase.counts]
    if shapes["prefill"] != shapes["decode"]:
        raise ProfileError(f"experts by layer differ: prefill {shapes['prefill']}, decode {shapes['decode']}")
    if not shapes["prefill"] or not all(shapes["prefill"]):
        raise ProfileError(f"counts need layers with experts, got {shapes['prefill']} experts by layer")
    for label, num_tokens in profile.labels.items():
        _check_number(f"labels[{label!r}]", num_tokens)


def merge(profiles: Sequence[Profile]) -> Profile:
    """The workloads of several profiles as one.

    Raises: ProfileError if they are of different models or a sum is too large.
    """
    if not profiles:
        raise ProfileError("there is nothing to merge")
    first = profiles[0]
    labels: dict[str, int] = {}
    for profile in profiles:
        _check_same_model(first, profile)
        for label, num_tokens in profile.labels.items():
            labels[label] = labels.get(label, 0) + num_tokens
    merged = Profile(
        version=VERSION,
        model_hash=first.model_hash,
        labels=labels,
        prefill=_merge_phases([profile.prefill for profile in profiles]),
        decode=_merge_phases([profile.decode for profile in profiles]),
    )
    check(merged)
    return merged


def hot_pages(counts: Counts, num_pages: int) -> frozenset[tuple[int, int]]:
    """The pages, `(layer, expert)`, with the most routed slots; ties go to the lower layer, then the lower expert.

    Pages are equally large, so this is the set that saves the most expected bytes.
    """
    pages = [(-count, layer, expert) for layer, row in enumerate(counts) for expert, count in enumerate(row)]
    return frozenset((layer, expert) for _, layer, expert in sorted(pages)[:num_pages])


def hit_rate(counts: Counts, hot: frozenset[tuple[int, int]]) -> float | None:
    """Share of routed slots that go to hot pages; None without any."""
    total = sum(map(sum, counts))
    return sum(counts[layer][expert] for layer, expert in hot) / total if total else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two workloads, each with the hot set that fits it and with the other's."""

    num_hot: int
    overlap: float
    """Jaccard index of the two hot sets."""
    own_hit_rates: tuple[float | None, float | None]
    """Of the first and the second workload, with the hot set made for it."""
    crossed_hit_rates: tuple[float | None, float | None]
    """Of the first and the second workload, with the hot set made for the other."""


def compare(first: Profile, second: Profile, resident_share: float = RESIDENT_SHARE) -> Comparison:
    """What it costs to serve one workload with a hot set that was made for another.

    Args:
        first: a workload.
        second: another one of the same model.
        resident_share: share of all pages that is resident, 0 to 1.
    Raises: ProfileError.
    """
    _check_same_model(first, second)
    if not 0 <= resident_share <= 1:
        raise ProfileError(f"resident_share must be between 0 and 1, got {resident_share}")
    both = (first.counts, second.counts)
    num_hot = round(resident_share * sum(map(len, both[0])))
    hot = tuple(hot_pages(counts, num_hot) for counts in both)
    union = len(hot[0] | hot[1])
    return Comparison(
        num_hot=num_hot,
        overlap=len(hot[0] & hot[1]) / union if union else 1.0,
        own_hit_rates=(hit_rate(both[0], hot[0]), hit_rate(both[1], hot[1])),
        crossed_hit_rates=(hit_rate(both[0], hot[1]), hit_rate(both[1], hot[0])),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="what a profile was recorded from, and how concentrated it is")
    show.add_argument("file", type=Path)
    merging = commands.add_parser("merge", help="several profiles as one")
    merging.add_argument("files", type=Path, nargs="+")
    merging.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("compare", help="hot sets and hit rates of two profiles, both ways")
    comparing.add_argument("files", type=Path, nargs=2)
    comparing.add_argument("--resident-share", type=float, default=RESIDENT_SHARE)
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "show":
                _write(_describe(load(options.file)))
            case "merge":
                merged = merge([load(file) for file in options.files])
                save(merged, options.out)
                _write(_describe(merged))
            case "compare":
                first, second = (load(file) for file in options.files)
                _write(_describe_comparison(compare(first, second, options.resident_share)))
    except ProfileError as error:
        sys.exit(f"placement.profile: {error}")


def _describe(profile: Profile) -> Iterable[str]:
    counts = profile.counts
    num_pages = sum(map(len, counts))
    yield f"model {profile.model_hash}, {len(counts)} layers, {num_pages} experts"
    yield f"{profile.prefill.num_tokens} prefill tokens, {profile.decode.num_tokens} decode tokens"
    for label, num_tokens in sorted(profile.labels.items()):
        yield f"  {label}: {num_tokens} tokens"
    for share in (0.1, 0.25, 0.5, RESIDENT_SHARE):
        rate = hit_rate(counts, hot_pages(counts, round(share * num_pages)))
        yield f"hottest {share:.0%} of the experts take {_percent(rate)} of the routed slots"


def _describe_comparison(comparison: Comparison) -> Iterable[str]:
    yield f"{comparison.num_hot} hot experts each, overlap (Jaccard) {comparison.overlap:.3f}"
    for name, own, crossed in zip(
        ("first", "second"), comparison.own_hit_rates, comparison.crossed_hit_rates, strict=True
    ):
        yield f"{name} workload: hit rate {_percent(own)} with its own hot set, {_percent(crossed)} with the other's"


def _percent(share: float | None) -> str:
    return "no" if share is None else f"{share:.1%}"


def _write(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _merge_phases(phases: Sequence[PhaseProfile]) -> PhaseProfile:
    counts = phases[0].counts
    for phase in phases[1:]:
        counts = _add(counts, phase.counts)
    return PhaseProfile(num_tokens=sum(phase.num_tokens for phase in phases), counts=counts)


def _add(first: Counts, second: Counts) -> Counts:
    return tuple(
        tuple(a + b for a, b in zip(row, other, strict=True))
        for row, other in zip(first, second, strict=True)
    )


def _check_number(name: str, value: int) -> None:
    if not 0 <= value <= MAX_COUNT:
        raise ProfileError(f"{name} must be between 0 and {MAX_COUNT}, got {value}")


def _check_same_model(first: Profile, other: Profile) -> None:
    if other.model_hash != first.model_hash:
        raise ProfileError(f"profiles of different models: {first.model_hash} and {other.model_hash}")
    shapes = [[len(row) for row in profile.prefill.counts] for profile in (first, other)]
    if shapes[0] != shapes[1]:
        raise ProfileError(f"profiles with different experts by layer: {shapes[0]} and {shapes[1]}")


if __name__ == "__main__":
    main()
