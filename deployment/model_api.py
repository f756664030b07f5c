"""Endpoints of the models: there is one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from deployment.config import ApiConfig
from deployment.endpoint import Endpoint, json_response
from deployment.openai_models import Model, ModelList
from deployment.request_reader import ModelFacts, RequestReader


class ModelApi:
    """Lists the model that is served.

    Args:
        reader: knows its name.
        config: has its name.
        facts: what clients may want to know of it.
        created: since when it is served, Unix time in seconds.
    """

    def __init__(self, reader: RequestReader, config: ApiConfig, facts: ModelFacts, created: int) -> None:
        self._reader = reader
        self._model = Model(id=config.model_name, created=created, max_model_len=facts.max_model_len)

    def endpoints(self) -> list[Endpoint]:
        """What this answers."""
        return [
            Endpoint(
                method="GET",
                path="/v1/models",
                handler=self.list_models,
                summary="The models that are served",
                response=ModelList,
            ),
            Endpoint(
                method="GET",
                path="/v1/models/{model:path}",
                handler=self.retrieve_model,
                summary="A model that is served",
                response=Model,
            ),
        ]

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        return json_response(ModelList(data=[self._model]))

    async def retrieve_model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        self._reader.check_model(request.path_params["model"])
        return json_response(self._model)
