from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.trace import Trace, TraceError, check, load, save


def create_trace(
    num_steps=3, num_rows=2, num_layers=4, num_topk=2, num_experts=8, seed=0, ahead=True
) -> Trace:
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_rows, num_layers, num_experts)
    ids, predicted = (
        np.argsort(rng.random(shape), axis=-1)[..., :num_topk].astype(np.uint16) for _ in range(2)
    )
    return Trace("code", num_experts, ids, predicted if ahead else None)


@given(
    trace=st.builds(
        create_trace,
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 3),
        ahead=st.booleans(),
    )
)
def test_a_file_holds_exactly_the_trace(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    save(trace, path)
    read = load(path)
    assert (read.label, read.num_experts) == (trace.label, trace.num_experts)
    assert np.array_equal(read.topk_idx, trace.topk_idx)
    assert np.array_equal(read.predicted_idx, trace.predicted_idx)


def test_rows_and_slots_are_counted_by_layer_and_expert():
    ids = np.array([[[[0, 1], [2, 0]], [[1, 2], [2, 1]]]], np.uint16)
    trace = Trace("t", 3, ids, ids)
    expected = [[1, 2, 1], [1, 1, 2]]
    assert trace.row_counts().tolist() == [expected]
    assert trace.predicted_counts().tolist() == [expected]
    assert trace.routed_slots().tolist() == expected
    assert trace.routed_slots(slice(1, None)).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_trace_without_predictions_says_so():
    with pytest.raises(TraceError, match="no predictions"):
        create_trace(ahead=False).predicted_counts()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts": 1}, "num_experts is 1"),
        ({"num_experts": 0}, "between 1 and"),
        ({"topk_idx": np.zeros((1, 1, 1, 2), np.uint16)}, "twice in one row"),
        ({"topk_idx": np.zeros((1, 1, 1, 1), np.int64)}, "must be uint16"),
        ({"topk_idx": np.zeros((0, 1, 1, 1), np.uint16)}, "none of them 0"),
        ({"predicted_idx": np.zeros((1, 1, 1, 1), np.uint16)}, "must have the shape of topk_idx"),
    ],
)
def test_a_trace_that_breaks_the_invariant_is_refused(changes, problem):
    with pytest.raises(TraceError, match=problem):
        check(replace(create_trace(), **changes))


def fields(**changes: object) -> dict[str, object]:
    whole = {
        "version": np.int64(1),
        "label": np.str_("t"),
        "num_experts": np.int64(8),
        "topk_idx": create_trace().topk_idx,
    }
    return {name: value for name, value in (whole | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (fields(version=np.int64(2)), "version must be 1, got 2"),
        (fields(version=None), "version is missing"),
        (fields(num_experts=np.float64("nan")), "num_experts has type float64"),
        (fields(label=np.array(["a", "b"])), "label has type"),
        (fields(topk_idx=None), "fields must be"),
        (fields(surprise=np.int64(1)), "surprise"),
        (fields(topk_idx=np.array([[[[{}]]]], dtype=object)), "allow_pickle"),
    ],
)
def test_a_malformed_archive_is_refused_by_name_and_field(content, problem, tmp_path: Path):
    path = tmp_path / "trace.npz"
    with path.open("wb") as file:
        np.savez_compressed(file, **content)
    with pytest.raises(TraceError, match=problem) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_what_is_no_archive_is_refused(tmp_path: Path):
    for content in (b"", b"nonsense", b"PK\x03\x04broken"):
        (tmp_path / "trace.npz").write_bytes(content)
        with pytest.raises(TraceError, match=r"trace\.npz"):
            load(tmp_path / "trace.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(TraceError, match="not an archive"):
        load(tmp_path / "array.npy")
    with pytest.raises(TraceError, match=r"missing\.npz"):
        load(tmp_path / "missing.npz")
    save(create_trace(), tmp_path / "trace.npz")
    whole = (tmp_path / "trace.npz").read_bytes()
    (tmp_path / "trace.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError):
        load(tmp_path / "trace.npz")
