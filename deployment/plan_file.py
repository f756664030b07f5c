"""The placement plan that an engine starts with, checked against everything it was made for."""

from __future__ import annotations

from actors.config import ShardConfig
from deployment.errors import SettingsError
from model.config import ModelConfig
from placement.engine_plan import EnginePlan, ExpertLayout, PlanError, check_fits, load
from placement.plan import default_num_staging_slots


def load_plan(shard: ShardConfig, model_hash: str, model: ModelConfig) -> EnginePlan | None:
    """Read the plan that `shard.placement_plan` names.

    Args:
        shard: settings of the shards.
        model_hash: the checkpoint's `content_hash`.
        model: its dimensions.
    Returns: None if the setting is unset.
    Raises: SettingsError if the file is malformed or for another model, other ranks or less staging.
    """
    path = shard.placement_plan
    if path is None:
        return None
    try:
        plan = load(path)
    except PlanError as error:
        raise SettingsError(f"shard.placement_plan: {error}") from error
    try:
        layout = ExpertLayout.of(model, shard.world_size, shard.ep_size or shard.world_size)
        num_slots = shard.num_staging_slots or default_num_staging_slots(
            layout.page_bytes, layout.largest_layer
        )
        check_fits(
            plan,
            model_hash=model_hash,
            layout=layout,
            num_staging_slots=0 if shard.staging == "direct" else num_slots,
        )
    except PlanError as error:
        raise SettingsError(f"shard.placement_plan: {path}: {error}") from error
    return plan
