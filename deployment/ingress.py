"""Ingress: the Serve deployment that speaks HTTP. It holds no model, only the tokenizer and a handle to the engine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from actors.messages import AddRequest, EngineHealth, EnginePlacement, RequestOutput
from deployment.api import build_api
from deployment.api_keys import load_api_keys
from deployment.containment import contain_replica
from deployment.core_actor import EngineSpec
from deployment.errors import EngineDeadError
from deployment.fingerprint import installed_software, system_fingerprint
from deployment.request_reader import ModelFacts
from deployment.tokenizer import Tokenizer
from placement.profile import Profile

logger = logging.getLogger(__name__)

_ACCEPT_TIMEOUT_S = 5.0
"""For the engine replica to accept a request, which it does at once; without a replica Serve would wait for one."""
_HEALTH_TIMEOUT_S = 2.0
"""For the engine replica to answer; it does nothing that takes long on its event loop, and probes are impatient."""


class Ingress:
    """One HTTP replica.

    Args:
        engine: handle to the EngineReplica deployment.
        spec: the engine behind it.
    """

    def __init__(self, engine: DeploymentHandle, spec: EngineSpec) -> None:
        contain_replica()
        self._engine = ServeEngineHandle(engine)
        self._spec = spec

    def __serve_build_asgi_app__(self) -> Starlette:
        """Serve calls this once, after the constructor."""
        spec = self._spec
        tokenizer_file = spec.checkpoint / "tokenizer.json"
        tokenizer = Tokenizer.load(tokenizer_file)
        facts = ModelFacts(
            max_model_len=spec.limits.max_model_len,
            vocab_size=spec.vocab_size,
            system_fingerprint=system_fingerprint(
                model_hash=spec.content_hash + hashlib.sha256(tokenizer_file.read_bytes()).hexdigest(),
                shard=spec.config.shard,
                device=spec.device,
                thinks_by_default=spec.config.api.thinks_by_default,
                software=installed_software(),
            ),
        )
        api = spec.config.api
        return build_api(self._engine, tokenizer, api, facts, keys=load_api_keys(api))


class ServeEngineHandle:
    """The EngineHandle over Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True)

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """See EngineHandle."""
        response = self._stream.generate.remote(request)
        has_ended = False
        try:
            async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                await anext(response)
            async for output in response:
                has_ended = output.finish_reason is not None
                yield output
        except TimeoutError as error:
            raise EngineDeadError("The engine is not running.") from error
        except (RayError, RayServeException) as error:
            has_ended = True
            logger.exception("the engine replica failed with request %s open", request.request_id)
            raise EngineDeadError("The engine stopped while this request was running.") from error
        finally:
            if not has_ended:
                response.cancel()

    async def profile(self, label: str) -> Profile:
        """See EngineHandle."""
        profile: Profile = await self._ask(self._handle.profile.remote(label))
        return profile

    async def placement(self) -> EnginePlacement:
        """See EngineHandle."""
        placement: EnginePlacement = await self._ask(self._handle.placement.remote())
        return placement

    async def pause_adaptation(self, is_paused: bool) -> None:
        """See EngineHandle."""
        await self._ask(self._handle.pause_adaptation.remote(is_paused))

    async def _ask(self, response: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                return await response
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineDeadError("The engine is not running.") from error

    async def health(self) -> EngineHealth:
        """See EngineHandle."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                health: EngineHealth = await self._handle.health.remote()
        except (RayError, RayServeException, TimeoutError):
            return EngineHealth(is_alive=False)
        return health
