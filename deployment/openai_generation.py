"""What all endpoints that generate understand, and the token counts that both completion endpoints report."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from actors.messages import Priority, SamplingParams
from deployment.openai_base import (
    Ignored,
    RequestPart,
    ResponsePart,
    check_needs,
    is_none,
    only,
    text_or_list,
)

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
INT64_MAX = 2**63 - 1

NonEmptyStr = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
StopList = Annotated[list[NonEmptyStr], Field(max_length=MAX_STOP_STRINGS)]
Stop = Annotated[
    Annotated[NonEmptyStr, Tag("<text>")] | Annotated[StopList, Tag("<list>")],
    Discriminator(
        text_or_list,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of strings",
    ),
]


class StreamOptions(RequestPart):
    """What a stream has besides the text."""

    include_usage: bool | None = None
    """End with a chunk that has the token counts."""


class SampledRequest(RequestPart):
    """What all endpoints that generate understand."""

    model: str = Field(max_length=256)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """0 and -1 keep every token."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-INT64_MAX - 1, le=INT64_MAX)
    """Equal seeds give equal replies while `system_fingerprint` stays the same. Unset: drawn at random for each
    request."""
    stream: bool | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    """`flex` runs when nothing more urgent does; the others are all the same here."""

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


class GenerationRequest(SampledRequest):
    """What both completion endpoints understand."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of new tokens. Unset: see `default_max_tokens`."""
    stop: Stop | None = None
    """The text ends before the first of these."""
    stop_token_ids: list[TokenId] | None = None
    """The text ends before the first of these, too."""
    ignore_eos: bool | None = None
    """Go on when the model ends its turn."""
    stream_options: StreamOptions | None = None

    n: Annotated[Any, only(1)] = None
    frequency_penalty: Annotated[Any, only(0, 0.0)] = None
    presence_penalty: Annotated[Any, only(0, 0.0)] = None
    repetition_penalty: Annotated[Any, only(1, 1.0)] = None
    logit_bias: Annotated[Any, only({})] = None
    min_tokens: Annotated[Any, only(0)] = None
    bad_words: Annotated[Any, only([])] = None
    allowed_token_ids: Annotated[Any, only([])] = None
    structured_outputs: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only()] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    use_beam_search: Annotated[Any, only(False)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    echo: Annotated[Any, only(False)] = None

    @field_validator("stream_options")
    @classmethod
    def _check_is_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        return check_needs("stream", value, info)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def priority(self) -> Priority:
        """Whether somebody waits for the answer."""
        return "batch" if self.service_tier == "flex" else "interactive"

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report at each position; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def prompt_field(self) -> str:
        """Name of the field that has the prompt."""
        raise NotImplementedError

    @property
    def default_max_tokens(self) -> int | None:
        """Largest number of new tokens if the request does not say; None: the rest of the context."""
        return None

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """Largest number of new tokens, with the name of the field that says so."""
        return "max_tokens", self.max_tokens

    def sampling_params(self, random_seed: int) -> SamplingParams:
        """How the engine chooses tokens.

        Args:
            random_seed: for a request without a seed, in [0, 2**63).
        """
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=random_seed if self.seed is None else self.seed & INT64_MAX,
            num_logprobs=self.num_logprobs,
        )


class CompletionTokensDetails(ResponsePart):
    """What the reply's tokens were spent on."""

    reasoning_tokens: int


class Usage(ResponsePart):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = Field(default=None, exclude_if=is_none)
