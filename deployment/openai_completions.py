"""Requests and responses of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from deployment.openai_base import ResponsePart, only, text_or_list
from deployment.openai_generation import MAX_LOGPROBS, GenerationRequest, TokenId, Usage


def _kind_of_prompt(value: object) -> str | None:
    """Which arm of `Prompt` a value belongs to; an empty list counts as one of ids."""
    match value:
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<lists>"
        case _:
            return text_or_list(value)


TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TokenIds, Tag("<list>")]
    | Annotated[list[str], Field(max_length=1), Tag("<texts>")]
    | Annotated[list[TokenIds], Field(max_length=1), Tag("<lists>")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string or a list of token ids",
    ),
]


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt
    """One text, or one list of token ids; each may stand in a list of its own."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = None
    """Put the begin-of-sentence token in front of a text. Unset: yes."""

    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, only("")] = None

    @property
    def default_max_tokens(self) -> int | None:
        """As at OpenAI: completions without a limit are short."""
        return 16

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report at each position; None: no log-probabilities at all."""
        return self.logprobs

    @property
    def prompt_field(self) -> str:
        """Name of the field that has the prompt."""
        return "prompt"

    @property
    def single_prompt(self) -> str | list[int]:
        """The prompt without a list around it."""
        if isinstance(self.prompt, str):
            return self.prompt
        first = self.prompt[0]
        return cast("list[int]", self.prompt) if isinstance(first, int) else first


class CompletionLogprobs(ResponsePart):
    """Parallel arrays, one entry for each token of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where the token's text begins in the whole reply, in characters."""


class CompletionChoice(ResponsePart):
    """The one choice of a completion or of its chunks."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(ResponsePart):
    """A whole completion, or one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
