import json
from pathlib import Path

import pytest

from placement import simulate
from placement.simulate import main
from placement.trace import save
from placement.trace_generator import FOUR_DOMAINS, RoutingModel
from tests.unit.placement.test_trace import create_trace
from tests.unit.placement.traffic import shared_study


@pytest.fixture(autouse=True)
def _share_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "Study", shared_study)


def records(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    main([*arguments, "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_asked_combination_is_simulated(capsys):
    rows = records(
        [
            "--workload",
            "C1",
            "C128",
            "--arm",
            "static",
            "layer_offload",
            "--ep-size",
            "1",
            "--offload-gib",
            "12",
        ],
        capsys,
    )
    assert [(row["workload"], row["arm"]) for row in rows] == [
        ("C1", "static"),
        ("C1", "layer_offload"),
        ("C128", "static"),
        ("C128", "layer_offload"),
    ]
    static, baseline = rows[:2]
    assert static["hit_rate"] > 0.9 > baseline["hit_rate"]
    assert static["step_ms"] < baseline["step_ms"]
    assert static["tokens_per_s"] > baseline["tokens_per_s"]
    assert baseline["busiest_rank_mb"] * 8 == pytest.approx(baseline["link_mb"], rel=1e-3)


def test_a_recorded_trace_is_replayed(capsys, tmp_path: Path):
    save(RoutingModel().generate(FOUR_DOMAINS, 20), tmp_path / "trace.npz")
    (row,) = records(
        [
            "--trace",
            str(tmp_path / "trace.npz"),
            "--arm",
            "adaptive",
            "--ep-size",
            "1",
            "--offload-gib",
            "9.75",
        ],
        capsys,
    )
    assert row["workload"] == "four domains"
    assert row["step_ms"] > row["link_ms"] > 0
    assert "tokens_per_s" not in row


def test_a_table_has_one_heading_for_rows_of_a_kind(capsys, tmp_path: Path):
    save(RoutingModel().generate(FOUR_DOMAINS, 8), tmp_path / "trace.npz")
    main(["--trace", str(tmp_path / "trace.npz"), "--arm", "static", "--offload-gib", "9.75"])
    heading, *rows = capsys.readouterr().out.rstrip().splitlines()
    assert heading.split()[:3] == ["workload", "arm", "ep_size"]
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--offload-gib", "40"], "offload must be between"),
        (["--trace", "missing.npz"], r"missing\.npz"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(arguments, problem):
    with pytest.raises(SystemExit, match=f"^placement.simulate: .*{problem}"):
        main(arguments)


def test_a_trace_of_another_model_or_without_predictions_is_refused(tmp_path: Path):
    path = tmp_path / "trace.npz"
    save(create_trace(), path)
    with pytest.raises(SystemExit, match="knows 40 layers of 384 experts, the trace has 4 of 8"):
        main(["--trace", str(path)])
    save(RoutingModel().generate(FOUR_DOMAINS, 2), path)
    with pytest.raises(SystemExit, match="no predictions"):
        main(["--trace", str(path), "--prefetch", "on"])


@pytest.mark.slow
def test_predictions_stand_beside_the_published_figures_and_the_aims(capsys):
    rows = {row["configuration"]: row for row in records(["--predict"], capsys) if "configuration" in row}
    assert rows["published: placed"]["C1"] == 97.23
    best = rows["best"]
    for name, row in rows.items():
        if name.startswith("best, "):
            # Adaptation costs a little where the profile fits; no other lever loses anything.
            assert all(
                row[workload] <= best[workload] * 1.05 for workload in ("C1", "C8", "random", "C256", "C128")
            )


@pytest.mark.slow
def test_validation_fails_exactly_if_a_held_out_row_is_off(capsys):
    is_off = False
    try:
        main(["--validate", "--json"])
    except SystemExit as error:
        is_off = error.code == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    first = [row for row in rows if row.get("approach") == rows[0]["approach"]]
    assert is_off == any(row["verdict"] for row in first)
