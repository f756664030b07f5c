"""Endpoints that generate: a request becomes the engine's, the engine's outputs become a reply."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from actors.messages import AddRequest
from deployment.chat import ChatReply
from deployment.completions import CompletionReply
from deployment.config import ApiConfig
from deployment.endpoint import Endpoint
from deployment.errors import ContextLengthError, InvalidRequestError
from deployment.generation import EngineHandle, Generation, ReplyHeader
from deployment.openai_chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from deployment.openai_completions import Completion, CompletionRequest
from deployment.openai_generation import GenerationRequest
from deployment.openai_response_parts import ResponseBody, StreamEvent
from deployment.openai_responses import ResponsesRequest
from deployment.prompt_encoder import PromptEncoder
from deployment.request_reader import ModelFacts, RequestReader
from deployment.response_input import as_chat, named_as_in_response
from deployment.responses import ResponsesReply
from deployment.tokenizer import Tokenizer


class CompletionApi:
    """Chat, plain completions and responses. They refuse what the engine would, before it is asked.

    Args:
        engine: runs the requests.
        reader: reads them.
        encoder: encodes their prompts.
        tokenizer: makes text of replies.
        config: has the model's name.
        facts: what is fixed by checkpoint and engine.
        now: Unix time in seconds.
        draw_seed: a random number in [0, 2**63), for a request that comes without a seed.
    """

    def __init__(
        self,
        engine: EngineHandle,
        reader: RequestReader,
        encoder: PromptEncoder,
        tokenizer: Tokenizer,
        config: ApiConfig,
        facts: ModelFacts,
        now: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._config = config
        self._facts = facts
        self._now = now
        self._draw_seed = draw_seed

    def endpoints(self) -> list[Endpoint]:
        """What this answers."""
        return [
            Endpoint(
                method="POST",
                path="/v1/chat/completions",
                handler=self.create_chat_completion,
                summary="The model's next message in a conversation",
                request=ChatCompletionRequest,
                response=ChatCompletion,
                event=ChatCompletionChunk,
            ),
            Endpoint(
                method="POST",
                path="/v1/completions",
                handler=self.create_completion,
                summary="How the model goes on with a text",
                request=CompletionRequest,
                response=Completion,
                event=Completion,
            ),
            Endpoint(
                method="POST",
                path="/v1/responses",
                handler=self.create_response,
                summary="The model's next turn, as output items; nothing is stored",
                request=ResponsesRequest,
                response=ResponseBody,
                event=StreamEvent,
            ),
        ]

    async def create_chat_completion(self, request: Request) -> Generation[Any]:
        """POST /v1/chat/completions."""
        body = await self._reader.read(request, ChatCompletionRequest)
        self._check(body)
        prompt = await self._encoder.encode_chat(body, body.stop_strings)
        engine_request = self._engine_request("chatcmpl-", body, prompt.token_ids)
        reply = ChatReply(self._header(engine_request), body, prompt, self._tokenizer)
        return Generation(self._engine, engine_request, reply, stream=bool(body.stream))

    async def create_completion(self, request: Request) -> Generation[Any]:
        """POST /v1/completions."""
        body = await self._reader.read(request, CompletionRequest)
        self._check(body)
        prompt = await self._encoder.encode_completion(body)
        self._reader.check_token_ids("prompt", prompt)
        engine_request = self._engine_request("cmpl-", body, prompt)
        reply = CompletionReply(self._header(engine_request), body, len(prompt), self._tokenizer)
        return Generation(self._engine, engine_request, reply, stream=bool(body.stream))

    async def create_response(self, request: Request) -> Generation[Any]:
        """POST /v1/responses."""
        body = await self._reader.read(request, ResponsesRequest)
        self._reader.check_model(body.model)
        chat = as_chat(body)
        try:
            prompt = await self._encoder.encode_chat(chat)
        except InvalidRequestError as error:
            raise named_as_in_response(error) from error
        engine_request = self._engine_request("resp_", chat, prompt.token_ids)
        header = self._header(engine_request)
        reply = ResponsesReply(header, body, prompt, chat.max_calls, self._tokenizer)
        return Generation(self._engine, engine_request, reply, stream=bool(body.stream))

    def _check(self, body: GenerationRequest) -> None:
        self._reader.check_model(body.model)
        self._reader.check_token_ids("stop_token_ids", body.stop_token_ids or [])

    def _engine_request(
        self, prefix: str, body: GenerationRequest, prompt_token_ids: list[int]
    ) -> AddRequest:
        return AddRequest(
            request_id=f"{prefix}{uuid.uuid4().hex}",
            prompt_token_ids=prompt_token_ids,
            sampling=body.sampling_params(self._draw_seed()),
            max_tokens=self._max_tokens(body, len(prompt_token_ids)),
            stop_token_ids=body.stop_token_ids or [],
            ignore_eos=bool(body.ignore_eos),
            priority=body.priority,
        )

    def _header(self, request: AddRequest) -> ReplyHeader:
        return ReplyHeader(
            id=request.request_id,
            created=int(self._now()),
            model=self._config.model_name,
            system_fingerprint=self._facts.system_fingerprint,
        )

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
