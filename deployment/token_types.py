"""Requests and responses of POST /tokenize and POST /detokenize, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, RootModel, Tag

from deployment.openai_base import RequestPart, ResponsePart, only
from deployment.openai_conversation import ChatPromptRequest
from deployment.openai_generation import TokenId


class TokenizeText(RequestPart):
    """Tokens of a prompt as POST /v1/completions takes it."""

    model: str | None = Field(default=None, max_length=256)
    prompt: str
    add_special_tokens: bool = True
    """Put the begin-of-sentence token in front."""
    return_token_strs: bool | None = None
    """Say how the vocabulary spells each token, too."""


class TokenizeChat(ChatPromptRequest):
    """Tokens of the prompt that POST /v1/chat/completions renders."""

    model: str | None = Field(default=None, max_length=256)
    return_token_strs: bool | None = None
    """Say how the vocabulary spells each token, too."""

    add_special_tokens: Annotated[Any, only(False)] = None  # the template has them


def _kind_of_prompt(value: object) -> str | None:
    if isinstance(value, TokenizeText | TokenizeChat):
        return "<text>" if isinstance(value, TokenizeText) else "<chat>"
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        return None
    return "<text>" if "prompt" in value else "<chat>"


class TokenizeRequest(
    RootModel[
        Annotated[
            Annotated[TokenizeText, Tag("<text>")] | Annotated[TokenizeChat, Tag("<chat>")],
            Discriminator(
                _kind_of_prompt,
                custom_error_type="tokenize_type",
                custom_error_message="Input should be an object that has either `prompt` or `messages`",
            ),
        ]
    ]
):
    """Body of POST /tokenize."""


class TokenizeResponse(ResponsePart):
    """Body of its response."""

    count: int
    """Number of tokens; it may exceed the context."""
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """In byte-level symbols, so that a part of a character has a spelling, too."""


class DetokenizeRequest(RequestPart):
    """Body of POST /detokenize."""

    model: str | None = Field(default=None, max_length=256)
    tokens: list[TokenId]


class DetokenizeResponse(ResponsePart):
    """Body of its response."""

    prompt: str
    """Control tokens are spelt out; bytes that are no text are U+FFFD."""
