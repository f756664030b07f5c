"""Endpoints for probes and operators: does this process answer, does its engine, which version is it."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from deployment.endpoint import Endpoint, json_response
from deployment.errors import EngineDeadError
from deployment.generation import EngineHandle
from deployment.openai_base import ResponsePart
from deployment.version import VERSION


class Liveness(ResponsePart):
    """Body of GET /health/live."""

    status: Literal["ok"] = "ok"


class Readiness(ResponsePart):
    """Body of GET /health/ready."""

    status: Literal["ok"] = "ok"
    warnings: list[str]
    """What the operator should know about an engine that serves nevertheless."""


class Version(ResponsePart):
    """Body of GET /version."""

    version: str = VERSION


class HealthApi:
    """Says what runs."""

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine

    def endpoints(self) -> list[Endpoint]:
        """What this answers."""
        ready = [
            Endpoint(
                method="GET",
                path=path,
                handler=self.check_ready,
                summary="Whether the engine takes requests; 503 and Retry-After otherwise",
                response=Readiness,
                is_open=True,
            )
            for path in ("/health/ready", "/health")
        ]
        return [
            *ready,
            Endpoint(
                method="GET",
                path="/health/live",
                handler=self.check_live,
                summary="Whether this HTTP process answers, whatever its engine does",
                response=Liveness,
                is_open=True,
            ),
            Endpoint(
                method="GET",
                path="/version",
                handler=self.read_version,
                summary="The engine's version",
                response=Version,
            ),
        ]

    async def check_ready(self, request: Request) -> Response:
        """GET /health/ready."""
        health = await self._engine.health()
        if not health.is_alive:
            raise EngineDeadError("The engine is not running.")
        return json_response(Readiness(warnings=health.warnings))

    async def check_live(self, request: Request) -> Response:
        """GET /health/live."""
        return json_response(Liveness())

    async def read_version(self, request: Request) -> Response:
        """GET /version."""
        return json_response(Version())
