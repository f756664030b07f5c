"""The OpenAPI document of all endpoints, made from the models that they read and write.

Source: OpenAPI Specification 3.1.0, whose schemas are JSON Schema 2020-12, which pydantic and msgspec write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployment.endpoint import Body, Endpoint
from deployment.openai_errors import ErrorBody
from deployment.version import VERSION

_Mode = Literal["validation", "serialization"]
_Schema = dict[str, Any]

_KEY_SCHEME = "api_key"
REFERENCE = "#/components/schemas/"


class _Schemas:
    """Schemas of everything that the endpoints read and write."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        models: list[tuple[type[BaseModel], _Mode]] = [(ErrorBody, "serialization")]
        structs: list[type[msgspec.Struct]] = []
        for endpoint in endpoints:
            if endpoint.request is not None:
                models.append((endpoint.request, "validation"))
            for written in (endpoint.response, endpoint.event):
                if written is None:
                    continue
                if issubclass(written, BaseModel):
                    models.append((written, "serialization"))
                else:
                    structs.append(written)
        self._of_model, definitions = models_json_schema(models, ref_template=REFERENCE + "{model}")
        of_struct, components = msgspec.json.schema_components(structs, ref_template=REFERENCE + "{name}")
        self._of_struct = dict(zip(structs, of_struct, strict=True))
        self.components: _Schema = {**definitions.get("$defs", {}), **components}

    def read(self, body: type[BaseModel]) -> _Schema:
        """Schema of what a client sends."""
        return self._of_model[body, "validation"]

    def written(self, body: Body | None) -> _Schema:
        """Schema of what the server sends."""
        if body is None:
            return {"type": "object"}
        if issubclass(body, BaseModel):
            return self._of_model[body, "serialization"]
        return self._of_struct[body]


def openapi_document(endpoints: Sequence[Endpoint], *, needs_key: bool) -> dict[str, Any]:
    """The document that describes `endpoints`.

    Args:
        endpoints: all of them.
        needs_key: whether those that are not open need an API key.
    """
    schemas = _Schemas(endpoints)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        operation = _operation(endpoint, path, schemas)
        if needs_key and not endpoint.is_open:
            operation["security"] = [{_KEY_SCHEME: []}]
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    components: dict[str, Any] = {"schemas": schemas.components}
    if needs_key:
        components["securitySchemes"] = {_KEY_SCHEME: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hotset", "version": VERSION},
        "paths": paths,
        "components": components,
    }


def _operation(endpoint: Endpoint, path: str, schemas: _Schemas) -> dict[str, Any]:
    success = {"application/json": {"schema": schemas.written(endpoint.response)}}
    if endpoint.event is not None:
        success["text/event-stream"] = {"schema": schemas.written(endpoint.event)}
    failure = {"application/json": {"schema": schemas.written(ErrorBody)}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{path}").strip("_"),
        "parameters": [
            *(_parameter(name, "path", is_required=True) for name in re.findall(r"{(\w+)}", path)),
            *(_parameter(name, "query", is_required=False) for name in endpoint.query),
        ],
        "responses": {
            "200": {"description": "Success", "content": success},
            "default": {"description": "Error", "content": failure},
        },
    }
    if endpoint.request is not None:
        content = {"application/json": {"schema": schemas.read(endpoint.request)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameter(name: str, place: Literal["path", "query"], *, is_required: bool) -> dict[str, Any]:
    return {"name": name, "in": place, "required": is_required, "schema": {"type": "string"}}
