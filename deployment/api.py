"""The HTTP API: a Starlette app with OpenAI's routes, in front of any `EngineHandle`."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from actors.messages import AddRequest
from deployment.chat import ChatRenderer, ChatReply
from deployment.completions import CompletionReply, encode_prompt
from deployment.config import ApiConfig
from deployment.errors import ContextLengthError, EngineDeadError, InvalidRequestError, ModelNotFoundError
from deployment.generation import EngineHandle, Generation, ReplyHeader
from deployment.http_body import read_json
from deployment.http_errors import EXCEPTION_HANDLERS
from deployment.openai_chat import ChatCompletionRequest
from deployment.openai_completions import CompletionRequest
from deployment.openai_generation import GenerationRequest
from deployment.openai_models import Model, ModelList
from deployment.tokenizer import Tokenizer

_R = TypeVar("_R", bound=GenerationRequest)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the API needs to know of the model that the engine serves."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    """Token ids are below this."""


def _draw_seed() -> int:
    return secrets.randbits(63)


def build_api(
    engine: EngineHandle,
    tokenizer: Tokenizer,
    config: ApiConfig,
    facts: ModelFacts,
    *,
    now: Callable[[], float] = time.time,
    draw_seed: Callable[[], int] = _draw_seed,
) -> Starlette:
    """The ASGI app.

    Args:
        engine: runs the requests.
        tokenizer: the checkpoint's.
        config: name, limits and defaults.
        facts: what is fixed by checkpoint and engine.
        now: Unix time in seconds.
        draw_seed: a random number in [0, 2**63), for a request that comes without a seed.
    """
    api = _Api(engine, tokenizer, config, facts, now, draw_seed)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.create_chat_completion, methods=["POST"]),
            Route("/v1/completions", api.create_completion, methods=["POST"]),
            Route("/v1/models", api.list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", api.retrieve_model, methods=["GET"]),
            Route("/v1/placement/profile", api.read_profile, methods=["GET"]),
            Route("/v1/placement", api.read_placement, methods=["GET"]),
            Route("/v1/placement/pause", api.pause_adaptation, methods=["POST"]),
            Route("/v1/placement/resume", api.resume_adaptation, methods=["POST"]),
            Route("/health", api.check_health, methods=["GET"]),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False
    return app


class _Api:
    """The endpoints. They refuse what the engine would, before it is asked."""

    def __init__(
        self,
        engine: EngineHandle,
        tokenizer: Tokenizer,
        config: ApiConfig,
        facts: ModelFacts,
        now: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, thinks_by_default=config.thinks_by_default)
        self._config = config
        self._facts = facts
        self._now = now
        self._draw_seed = draw_seed
        self._encode_limiter = anyio.CapacityLimiter(config.num_tokenizer_threads)
        self._model = Model(id=config.model_name, created=int(now()), max_model_len=facts.max_model_len)

    async def create_chat_completion(self, request: Request) -> Generation[Any]:
        """POST /v1/chat/completions."""
        body = await self._read(request, ChatCompletionRequest)
        prompt = await self._in_thread(partial(self._renderer.render, body))
        engine_request = self._engine_request("chatcmpl", body, prompt.token_ids)
        reply = ChatReply(self._header(engine_request), body, prompt, self._tokenizer)
        return Generation(self._engine, engine_request, reply, stream=bool(body.stream))

    async def create_completion(self, request: Request) -> Generation[Any]:
        """POST /v1/completions."""
        body = await self._read(request, CompletionRequest)
        prompt = await self._in_thread(partial(encode_prompt, self._tokenizer, body))
        self._check_token_ids("prompt", prompt)
        engine_request = self._engine_request("cmpl", body, prompt)
        reply = CompletionReply(self._header(engine_request), body, len(prompt), self._tokenizer)
        return Generation(self._engine, engine_request, reply, stream=bool(body.stream))

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList(data=[self._model]))

    async def retrieve_model(self, request: Request) -> Response:
        """GET /v1/models/{model}."""
        self._check_model(request.path_params["model"])
        return _json(self._model)

    async def read_profile(self, request: Request) -> Response:
        """GET /v1/placement/profile?label=NAME: what `placement.profile` reads."""
        label = request.query_params.get("label", "unlabelled")
        profile = await self._engine.profile(label)
        return Response(msgspec.json.encode(profile), media_type="application/json")

    async def read_placement(self, request: Request) -> Response:
        """GET /v1/placement: which pages are hot on each rank, and what adaptation does."""
        placement = await self._engine.placement()
        return Response(msgspec.json.encode(placement), media_type="application/json")

    async def pause_adaptation(self, request: Request) -> Response:
        """POST /v1/placement/pause: hot sets stay as they are. Returns: as GET /v1/placement."""
        await self._engine.pause_adaptation(True)
        return await self.read_placement(request)

    async def resume_adaptation(self, request: Request) -> Response:
        """POST /v1/placement/resume: hot sets follow the traffic again. Returns: as GET /v1/placement."""
        await self._engine.pause_adaptation(False)
        return await self.read_placement(request)

    async def check_health(self, request: Request) -> Response:
        """GET /health."""
        health = await self._engine.health()
        if not health.is_alive:
            raise EngineDeadError("The engine is not running.")
        return JSONResponse({"status": "ok", "warnings": health.warnings})

    async def _read(self, request: Request, body_type: type[_R]) -> _R:
        body = await read_json(request, body_type, self._config.max_body_bytes)
        self._check_model(body.model)
        self._check_token_ids("stop_token_ids", body.stop_token_ids or [])
        return body

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(work, limiter=self._encode_limiter)

    def _engine_request(
        self, prefix: str, body: GenerationRequest, prompt_token_ids: list[int]
    ) -> AddRequest:
        return AddRequest(
            request_id=f"{prefix}-{uuid.uuid4().hex}",
            prompt_token_ids=prompt_token_ids,
            sampling=body.sampling_params(self._draw_seed()),
            max_tokens=self._max_tokens(body, len(prompt_token_ids)),
            stop_token_ids=body.stop_token_ids or [],
            ignore_eos=bool(body.ignore_eos),
            priority=body.priority,
        )

    def _header(self, request: AddRequest) -> ReplyHeader:
        return ReplyHeader(id=request.request_id, created=int(self._now()), model=self._config.model_name)

    def _max_tokens(self, body: GenerationRequest, num_prompt_tokens: int) -> int:
        """How many tokens to generate: what was asked for, or the endpoint's default, within the context."""
        limit = self._facts.max_model_len
        if num_prompt_tokens >= limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, and the prompt alone has "
                f"{num_prompt_tokens}. Shorten it: at least one token must be left for the reply.",
                param=body.prompt_field,
            )
        name, max_tokens = body.output_limit
        if max_tokens is None:
            rest = limit - num_prompt_tokens
            return min(rest, body.default_max_tokens or rest)
        if num_prompt_tokens + max_tokens > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, and the request asks for "
                f"{num_prompt_tokens + max_tokens}: {num_prompt_tokens} are the prompt's and {max_tokens} "
                f"the reply's. Lower '{name}' or shorten the prompt.",
                param=name,
            )
        return max_tokens

    def _check_model(self, name: str) -> None:
        if name != self._config.model_name:
            raise ModelNotFoundError(
                f"The model '{name}' is not served here; '{self._config.model_name}' is.", param="model"
            )

    def _check_token_ids(self, field: str, token_ids: list[int]) -> None:
        vocab_size = self._facts.vocab_size
        if (largest := max(token_ids, default=0)) >= vocab_size:
            name = f"{field}[{token_ids.index(largest)}]"
            raise InvalidRequestError(f"'{name}': {largest} is not below {vocab_size}.", param=name)


def _json(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")
