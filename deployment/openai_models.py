"""Responses of GET /v1/models."""

from __future__ import annotations

from typing import Literal

from deployment.openai_base import ResponsePart


class Model(ResponsePart):
    """A model that is served here."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hotset"
    max_model_len: int


class ModelList(ResponsePart):
    """Body of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
