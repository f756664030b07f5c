"""Endpoint: one method of one path, with what OpenAPI says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from deployment.guard import Guard

Body: TypeAlias = type[BaseModel] | type[msgspec.Struct]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: Literal["GET", "POST"]
    path: str
    """As Starlette writes it, with `{name}` or `{name:path}` for what a handler gets."""
    handler: Callable[[Request], Awaitable[ASGIApp]]
    """Answers a request; ends in an ApiError otherwise."""
    summary: str
    """For the reader of /openapi.json."""
    request: type[BaseModel] | None = None
    """What the body is; None: there is none."""
    response: Body | None
    """What a success has as its body; None: any JSON object."""
    event: type[BaseModel] | None = None
    """What each event has if the request asks for a stream."""
    query: tuple[str, ...] = ()
    """Parameters of the query; none of them is required."""
    is_open: bool = False
    """Whether it is answered without an API key, too."""

    def route(self, guard: Guard) -> Route:
        """What Starlette serves: the handler, behind the guard."""

        async def answer(request: Request) -> ASGIApp:
            if not self.is_open:
                guard.admit(request.headers.get("authorization"))
            return await self.handler(request)

        return Route(self.path, answer, methods=[self.method])


def json_response(body: Any) -> Response:
    """A success with a model or a struct as its body."""
    encoded = body.model_dump_json() if isinstance(body, BaseModel) else msgspec.json.encode(body)
    return Response(encoded, media_type="application/json")
