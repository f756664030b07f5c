from pathlib import Path

import pytest
from pydantic import ValidationError

from actors.config import ShardConfig
from deployment.errors import SettingsError
from deployment.plan_file import load_plan
from placement.engine_plan import save
from tests.unit.placement.builders import create_model, create_small_plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A plan for four ranks in two groups, with room for two staging slots."""
    save(create_small_plan(budget_bytes=2**20, num_staging_slots=2), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def create_config(path: Path, **changes: object) -> ShardConfig:
    settings = {"world_size": 4, "ep_size": 2, "num_staging_slots": 2, "placement_plan": path} | changes
    return ShardConfig.model_validate(settings)


def test_an_engine_runs_with_the_plan_that_was_made_for_it(path: Path) -> None:
    plan = create_small_plan(budget_bytes=2**20, num_staging_slots=2)
    assert load_plan(create_config(path), "m", create_model()) == plan
    # Pages that are read in place need no staging slots.
    direct = create_config(path, num_staging_slots=8, staging="direct")
    assert load_plan(direct, "m", create_model()) == plan
    assert load_plan(ShardConfig(), "m", create_model()) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"world_size": 2}, "world_size is 4 in it and 2 here"),
        ({"ep_size": 4}, "ep_size is 2 in it and 4 here"),
        ({"ep_size": None}, "ep_size is 2 in it and 4 here"),
        ({"num_staging_slots": 3}, "room for 2 staging slots, but num_staging_slots is 3"),
    ],
)
def test_a_plan_for_other_settings_is_refused_in_one_line_with_the_file(
    changes: dict[str, object], problem: str, path: Path
) -> None:
    with pytest.raises(SettingsError, match=problem) as error:
        load_plan(create_config(path, **changes), "m", create_model())
    assert str(error.value).startswith(f"shard.placement_plan: {path}: ")
    assert "\n" not in str(error.value)


def test_a_plan_for_another_model_is_refused(path: Path) -> None:
    with pytest.raises(SettingsError, match="model_hash is m in it and other here"):
        load_plan(create_config(path), "other", create_model())
    with pytest.raises(SettingsError, match="hidden_size is 256 in it and 512 here"):
        load_plan(create_config(path), "m", create_model(hidden_size=512))


def test_a_file_that_is_no_plan_is_refused(path: Path) -> None:
    path.write_text("{}")
    with pytest.raises(SettingsError, match=rf"^shard\.placement_plan: {path}: .*version"):
        load_plan(create_config(path), "m", create_model())


def test_a_plan_and_a_number_of_pages_are_not_both_given(path: Path) -> None:
    with pytest.raises(ValidationError, match=r"placement_plan = .* and max_resident_pages = 3 both say"):
        create_config(path, max_resident_pages=3)
