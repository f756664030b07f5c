"""Endpoints of the hot set: what is used, what is hot, and whether that follows the traffic."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from actors.messages import EnginePlacement
from deployment.endpoint import Endpoint, json_response
from deployment.generation import EngineHandle
from placement.profile import Profile


class PlacementApi:
    """Passes questions about expert pages on to the engine."""

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine

    def endpoints(self) -> list[Endpoint]:
        """What this answers."""
        return [
            Endpoint(
                method="GET",
                path="/v1/placement/profile",
                handler=self.read_profile,
                summary="How often the router chose each expert; what `placement.profile` reads",
                response=Profile,
                query=("label",),
            ),
            Endpoint(
                method="GET",
                path="/v1/placement",
                handler=self.read_placement,
                summary="Which pages are hot on each rank, and what adaptation does",
                response=EnginePlacement,
            ),
            Endpoint(
                method="POST",
                path="/v1/placement/pause",
                handler=self.pause_adaptation,
                summary="Let hot sets stay as they are",
                response=EnginePlacement,
            ),
            Endpoint(
                method="POST",
                path="/v1/placement/resume",
                handler=self.resume_adaptation,
                summary="Let hot sets follow the traffic again",
                response=EnginePlacement,
            ),
        ]

    async def read_profile(self, request: Request) -> Response:
        """GET /v1/placement/profile?label=NAME."""
        return json_response(await self._engine.profile(request.query_params.get("label", "unlabelled")))

    async def read_placement(self, request: Request) -> Response:
        """GET /v1/placement."""
        return json_response(await self._engine.placement())

    async def pause_adaptation(self, request: Request) -> Response:
        """POST /v1/placement/pause. Returns: as GET /v1/placement."""
        await self._engine.pause_adaptation(True)
        return await self.read_placement(request)

    async def resume_adaptation(self, request: Request) -> Response:
        """POST /v1/placement/resume. Returns: as GET /v1/placement."""
        await self._engine.pause_adaptation(False)
        return await self.read_placement(request)
