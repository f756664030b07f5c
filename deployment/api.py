"""The HTTP API: a Starlette app with OpenAI's routes and a few more, in front of any `EngineHandle`. Wiring only."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployment.api_keys import ApiKeys
from deployment.completion_api import CompletionApi
from deployment.config import ApiConfig
from deployment.cors import cors_middleware
from deployment.endpoint import Endpoint
from deployment.generation import EngineHandle
from deployment.guard import Guard
from deployment.health_api import HealthApi
from deployment.http_errors import EXCEPTION_HANDLERS
from deployment.model_api import ModelApi
from deployment.openapi import openapi_document
from deployment.placement_api import PlacementApi
from deployment.prompt_encoder import PromptEncoder
from deployment.request_reader import ModelFacts, RequestReader
from deployment.token_api import TokenApi
from deployment.tokenizer import Tokenizer


def _draw_seed() -> int:
    return secrets.randbits(63)


def build_api(
    engine: EngineHandle,
    tokenizer: Tokenizer,
    config: ApiConfig,
    facts: ModelFacts,
    *,
    keys: ApiKeys | None = None,
    now: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    draw_seed: Callable[[], int] = _draw_seed,
) -> Starlette:
    """The ASGI app.

    Args:
        engine: runs the requests.
        tokenizer: the checkpoint's.
        config: name, limits and defaults.
        facts: what is fixed by checkpoint and engine.
        keys: those that clients may use, as `load_api_keys` read them.
        now: Unix time in seconds.
        monotonic: seconds of a clock that only goes forward.
        draw_seed: a random number in [0, 2**63), for a request that comes without a seed.
    """
    guard = Guard(keys, config.max_requests_per_minute, monotonic)
    reader = RequestReader(config, facts)
    encoder = PromptEncoder(tokenizer, config)
    completions = CompletionApi(engine, reader, encoder, tokenizer, config, facts, now, draw_seed)
    endpoints = _with_description(
        [
            *completions.endpoints(),
            *ModelApi(reader, config, facts, created=int(now())).endpoints(),
            *TokenApi(reader, encoder, tokenizer, facts).endpoints(),
            *PlacementApi(engine).endpoints(),
            *HealthApi(engine).endpoints(),
        ],
        needs_key=guard.needs_key,
    )
    app = Starlette(
        routes=[endpoint.route(guard) for endpoint in endpoints],
        middleware=cors_middleware(config.cors_origins),
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False
    return app


def _with_description(endpoints: list[Endpoint], *, needs_key: bool) -> list[Endpoint]:
    """The endpoints, and one that describes them all, itself included."""

    @cache
    def document() -> dict[str, Any]:
        return openapi_document(described, needs_key=needs_key)

    async def describe(request: Request) -> Response:
        return JSONResponse(document())

    description = Endpoint(
        method="GET",
        path="/openapi.json",
        handler=describe,
        summary="This document",
        response=None,
    )
    described = [*endpoints, description]
    return described
