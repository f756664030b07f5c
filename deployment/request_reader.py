"""RequestReader: what every endpoint checks of a request before it is worked on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from deployment.config import ApiConfig
from deployment.errors import InvalidRequestError, ModelNotFoundError
from deployment.http_body import read_json

_R = TypeVar("_R", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the API needs to know of the model that the engine serves."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    """Token ids are below this."""
    system_fingerprint: str
    """Names what decides a reply besides the request; see `deployment/fingerprint.py`."""


class RequestReader:
    """Reads requests for the model that is served."""

    def __init__(self, config: ApiConfig, facts: ModelFacts) -> None:
        self._config = config
        self._facts = facts

    async def read(self, request: Request, body_type: type[_R]) -> _R:
        """The body, validated; see `read_json`."""
        config = self._config
        return await read_json(request, body_type, config.max_body_bytes, config.unknown_parameters)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError if `name` is another model than the one that is served."""
        if name not in (None, self._config.model_name):
            raise ModelNotFoundError(
                f"The model '{name}' is not served here; '{self._config.model_name}' is.", param="model"
            )

    def check_token_ids(self, field: str, token_ids: list[int]) -> None:
        """Raise InvalidRequestError naming the largest of a field's ids if the model has no such token."""
        vocab_size = self._facts.vocab_size
        if (largest := max(token_ids, default=0)) >= vocab_size:
            name = f"{field}[{token_ids.index(largest)}]"
            raise InvalidRequestError(f"'{name}': {largest} is not below {vocab_size}.", param=name)
