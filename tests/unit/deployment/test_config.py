"""The configuration is documented field by field, refuses what it does not know, and is frozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from deployment.config import EngineConfig

ROOT = Path(__file__).parents[3]


def all_models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from all_models(field.annotation)


MODELS = list(all_models(EngineConfig))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_setting_says_what_it_does(model: type[BaseModel]) -> None:
    undocumented = [name for name, field in model.model_fields.items() if not field.description]
    assert undocumented == []


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_unknown_settings_are_refused_and_known_ones_frozen(model: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="extra_forbidden"):
        model.model_validate({"no_such_setting": 1})
    name = next(iter(model.model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(model(), name, None)


def test_the_shipped_configuration_is_valid_and_has_cold_experts() -> None:
    (application,) = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"]
    config = EngineConfig.model_validate(application["args"])
    assert config.shard.world_size == 2
    assert config.shard.max_resident_pages is not None
    pages_per_rank = (
        12 * 8 // 2 + 3 * 4 // 2
    )  # the embedded model's layers and draft stages, experts cut in two
    assert config.shard.max_resident_pages < pages_per_rank
