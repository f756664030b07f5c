"""Requests and responses of the HTTP API, in the shape that the official `openai` client sends and expects.

Requests are strict about what they know: a wrong type or range is refused with the name of the field. A
parameter that would change the output and is not served yet is refused unless it has a neutral value; any
other unknown parameter is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from actors.messages import SamplingParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
INT64_MAX = 2**63 - 1

_T = TypeVar("_T")


def _is_none(value: object) -> bool:
    return value is None


# --- requests ---


def _only(*neutral: object) -> AfterValidator:
    """For a parameter that is not served yet: lets null and the neutral values through."""

    def refuse(value: object) -> object:
        # By type too: in Python, True == 1.
        if value is None or any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            return value
        raise PydanticCustomError("unsupported_parameter", "This server does not support it yet")

    return AfterValidator(refuse)


def _text_or_list(value: object) -> str | None:
    """Which arm of "one text or a list" a value belongs to."""
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def _kind_of_prompt(value: object) -> str | None:
    """Which arm of `Prompt` a value belongs to; an empty list counts as one of ids."""
    match value:
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<lists>"
        case _:
            return _text_or_list(value)


def _check_needs(switch: str, value: _T, info: ValidationInfo) -> _T:
    """Refuse a field that means nothing while an earlier one is not true."""
    if value is not None and not info.data.get(switch):
        raise PydanticCustomError("missing_switch", "It needs `{switch}` to be true", {"switch": switch})
    return value


# Names of union arms stand in angle brackets, so that `field_name` can leave them out.
NonEmptyStr = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
StopList = Annotated[list[NonEmptyStr], Field(max_length=MAX_STOP_STRINGS)]
Stop = Annotated[
    Annotated[NonEmptyStr, Tag("<text>")] | Annotated[StopList, Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="stop_type",
        custom_error_message="Input should be a string or a list of strings",
    ),
]
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


class RequestPart(BaseModel):
    """Base of what a client sends."""

    model_config = ConfigDict(
        extra="ignore", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class TextPart(RequestPart):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="content_type",
        custom_error_message="Input should be a string or a list of text parts",
    ),
]


class ChatMessage(RequestPart):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "latest_reminder"]
    content: Content
    reasoning_content: str | None = None
    """Assistant only: the reasoning that came with this answer."""
    prefix: bool | None = None
    """Last assistant message only: the reply continues it."""
    tool_calls: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only()] = None


class StreamOptions(RequestPart):
    """What a stream has besides the text."""

    include_usage: bool | None = None
    """End with a chunk that has the token counts."""


class ThinkingSwitch(RequestPart):
    """The vendor's switch between its two modes."""

    type: Literal["enabled", "disabled", "adaptive"]


class GenerationRequest(RequestPart):
    """What both completion endpoints understand."""

    model: str = Field(max_length=256)
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of new tokens. Unset: see `default_max_tokens`."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """0 and -1 keep every token."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-INT64_MAX - 1, le=INT64_MAX)
    """Unset: drawn at random for each request."""
    stop: Stop | None = None
    """The text ends before the first of these."""
    stop_token_ids: list[TokenId] | None = None
    """The text ends before the first of these, too."""
    ignore_eos: bool | None = None
    """Go on when the model ends its turn."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[Any, _only(1)] = None
    frequency_penalty: Annotated[Any, _only(0, 0.0)] = None
    presence_penalty: Annotated[Any, _only(0, 0.0)] = None
    repetition_penalty: Annotated[Any, _only(1, 1.0)] = None
    logit_bias: Annotated[Any, _only({})] = None
    min_tokens: Annotated[Any, _only(0)] = None
    bad_words: Annotated[Any, _only([])] = None
    allowed_token_ids: Annotated[Any, _only([])] = None
    structured_outputs: Annotated[Any, _only()] = None
    prompt_logprobs: Annotated[Any, _only()] = None
    truncate_prompt_tokens: Annotated[Any, _only()] = None
    use_beam_search: Annotated[Any, _only(False)] = None
    skip_special_tokens: Annotated[Any, _only(True)] = None
    include_stop_str_in_output: Annotated[Any, _only(False)] = None
    echo: Annotated[Any, _only(False)] = None

    @field_validator("stream_options")
    @classmethod
    def _check_is_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        return _check_needs("stream", value, info)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

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


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """OpenAI's newer name of `max_tokens`; it wins where both are given."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    thinking: ThinkingSwitch | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """`none` turns thinking off."""

    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none", "auto")] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    modalities: Annotated[Any, _only(["text"])] = None
    audio: Annotated[Any, _only()] = None
    prediction: Annotated[Any, _only()] = None
    web_search_options: Annotated[Any, _only()] = None
    chat_template_kwargs: Annotated[Any, _only({})] = None
    continue_final_message: Annotated[Any, _only(False)] = None
    add_generation_prompt: Annotated[Any, _only(True)] = None

    @field_validator("top_logprobs")
    @classmethod
    def _check_has_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        return _check_needs("logprobs", value, info)

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report at each position; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_field(self) -> str:
        """Name of the field that has the prompt."""
        return "messages"

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """Largest number of new tokens, with the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().output_limit


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt
    """One text, or one list of token ids; each may stand in a list of its own."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = None
    """Put the begin-of-sentence token in front of a text. Unset: yes."""

    best_of: Annotated[Any, _only(1)] = None
    suffix: Annotated[Any, _only("")] = None

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


# --- responses ---


class ResponsePart(BaseModel):
    """Base of what the server sends."""


class CompletionTokensDetails(ResponsePart):
    """What the reply's tokens were spent on."""

    reasoning_tokens: int


class Usage(ResponsePart):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = Field(default=None, exclude_if=_is_none)


class TopLogprob(ResponsePart):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A chosen token and its strongest rivals."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponsePart):
    """Log-probabilities of the tokens whose text stands beside this."""

    content: list[ChatTokenLogprob] | None = None
    reasoning_content: list[ChatTokenLogprob] | None = Field(default=None, exclude_if=_is_none)
    refusal: None = None


class ChatReplyMessage(ResponsePart):
    """The assistant's whole message."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | None = Field(default=None, exclude_if=_is_none)
    refusal: None = None


class ChatChoice(ResponsePart):
    """The one choice of a whole chat reply."""

    index: int = 0
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(ResponsePart):
    """A whole chat reply."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(ResponsePart):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)
    reasoning_content: str | None = Field(default=None, exclude_if=_is_none)


class ChatChunkChoice(ResponsePart):
    """The one choice of a chat chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(ResponsePart):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


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
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(ResponsePart):
    """A model that is served here."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hotset"
    max_model_len: int


class ModelList(ResponsePart):
    """Body of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(ResponsePart):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponsePart):
    """Body of every response that is not a success."""

    error: ErrorDetail
