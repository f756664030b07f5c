"""Endpoints of the tokenizer: what a prompt is to the model, and what token ids say."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from deployment.endpoint import Endpoint, json_response
from deployment.prompt_encoder import PromptEncoder
from deployment.request_reader import ModelFacts, RequestReader
from deployment.token_types import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizeText,
)
from deployment.tokenizer import Tokenizer


class TokenApi:
    """Tokenizes as the completion endpoints do."""

    def __init__(
        self, reader: RequestReader, encoder: PromptEncoder, tokenizer: Tokenizer, facts: ModelFacts
    ) -> None:
        self._reader = reader
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._facts = facts

    def endpoints(self) -> list[Endpoint]:
        """What this answers."""
        return [
            Endpoint(
                method="POST",
                path="/tokenize",
                handler=self.tokenize,
                summary="Token ids of a prompt or of a conversation",
                request=TokenizeRequest,
                response=TokenizeResponse,
            ),
            Endpoint(
                method="POST",
                path="/detokenize",
                handler=self.detokenize,
                summary="Text of token ids",
                request=DetokenizeRequest,
                response=DetokenizeResponse,
            ),
        ]

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = (await self._reader.read(request, TokenizeRequest)).root
        self._reader.check_model(body.model)
        if isinstance(body, TokenizeText):
            tokens = await self._encoder.encode_text(body.prompt, add_bos=body.add_special_tokens)
        else:
            tokens = (await self._encoder.encode_chat(body)).token_ids
        strings = list(map(self._tokenizer.token_string, tokens)) if body.return_token_strs else None
        return json_response(
            TokenizeResponse(
                count=len(tokens),
                max_model_len=self._facts.max_model_len,
                tokens=tokens,
                token_strs=strings,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await self._reader.read(request, DetokenizeRequest)
        self._reader.check_model(body.model)
        self._reader.check_token_ids("tokens", body.tokens)
        return json_response(DetokenizeResponse(prompt=await self._encoder.spell(body.tokens)))
