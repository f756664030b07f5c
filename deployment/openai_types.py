"""Requests and responses of the HTTP API, in the shape that the official `openai` client sends and expects.

Requests are strict about what they know: a wrong type or range is refused with the name of the field. A
parameter that would change the output and is not served yet is refused unless it has a neutral value; any
other unknown parameter is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from actors.messages import Priority, SamplingParams
from deployment.openai_base import RequestPart, ResponsePart, is_none, only
from deployment.tool_types import CallDelta, HistoryCall, NamedTool, ReplyCall, Tool, ToolChoice

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
INT64_MAX = 2**63 - 1

_T = TypeVar("_T")


# --- requests ---


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

    role: Literal["system", "user", "assistant", "tool", "latest_reminder"]
    tool_calls: list[HistoryCall] | None = None
    """Assistant only: the calls that it made."""
    content: Content | None = Field(default=None, validate_default=True)
    """Only an assistant's message that has calls may leave it out."""
    tool_call_id: str | None = Field(default=None, validate_default=True)
    """Tool only: the call that this answers."""
    reasoning_content: str | None = None
    """Assistant only: the reasoning that came with this answer."""
    prefix: bool | None = None
    """Last assistant message only: the reply continues it."""
    function_call: Annotated[Any, only()] = None

    @field_validator("tool_calls")
    @classmethod
    def _check_may_call(
        cls, value: list[HistoryCall] | None, info: ValidationInfo
    ) -> list[HistoryCall] | None:
        if value and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("calls_of_another_role", "Only assistant messages have tool calls")
        return value or None

    @field_validator("content")
    @classmethod
    def _check_has_content(cls, value: Any, info: ValidationInfo) -> Any:
        has_calls = "tool_calls" not in info.data or info.data["tool_calls"]
        if value is None and not has_calls:
            raise PydanticCustomError(
                "missing_content",
                "Input should be a string or a list of text parts; only tool calls replace it",
            )
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _check_names_its_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise PydanticCustomError("missing_call_id", "A tool message names the call that it answers")
        return value


def _text_or_number(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<number>" if isinstance(value, int) else None


ReasoningEffort = Annotated[
    Annotated[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"], Tag("<text>")]
    | Annotated[int, Field(ge=1, le=100), Tag("<number>")],
    Discriminator(
        _text_or_number,
        custom_error_type="effort_type",
        custom_error_message="Input should be 'none', 'low', 'high', 'xhigh', 'max' or a number from 1 to 100",
    ),
]


class StreamOptions(RequestPart):
    """What a stream has besides the text."""

    include_usage: bool | None = None
    """End with a chunk that has the token counts."""


class ThinkingSwitch(RequestPart):
    """The vendor's switch between its two modes."""

    type: Literal["enabled", "disabled", "adaptive"]


class TemplateOptions(RequestPart):
    """`chat_template_kwargs`, in which other servers' clients switch thinking."""

    model_config = ConfigDict(extra="forbid")

    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None


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
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    """`flex` runs when nothing more urgent does; the others are all the same here."""

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
        return _check_needs("stream", value, info)

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


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """OpenAI's newer name of `max_tokens`; it wins where both are given."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    thinking: ThinkingSwitch | None = None
    reasoning_effort: ReasoningEffort | None = None
    """`none` turns thinking off."""
    chat_template_kwargs: TemplateOptions | None = None
    """Counts where `thinking` and `reasoning_effort` are unset."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """Unset: `auto`."""
    parallel_tool_calls: bool | None = None
    """false: the reply ends after its first call."""

    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    continue_final_message: Annotated[Any, only(False)] = None
    add_generation_prompt: Annotated[Any, only(True)] = None

    @field_validator("tool_choice")
    @classmethod
    def _check_has_tool(cls, value: str | NamedTool | None, info: ValidationInfo) -> str | NamedTool | None:
        names = {tool.function.name for tool in info.data.get("tools") or []}
        if value == "required" and not names and "tools" in info.data:
            raise PydanticCustomError("missing_tools", "It needs `tools`")
        if isinstance(value, NamedTool) and value.function.name not in names and "tools" in info.data:
            raise PydanticCustomError("unknown_tool", "No function in `tools` has this name")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _check_has_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        return _check_needs("logprobs", value, info)

    @property
    def max_calls(self) -> int | None:
        """Tool calls that the reply may have; None: any number."""
        if not self.tools or self.tool_choice == "none":
            return 0
        return 1 if self.parallel_tool_calls is False else None

    @property
    def effort(self) -> str | int | None:
        """`reasoning_effort`, wherever it stands."""
        options = self.chat_template_kwargs
        return self.reasoning_effort or (options.reasoning_effort if options else None)

    @property
    def thinking_type(self) -> str | None:
        """The vendor's word for whether to think, if the request says so."""
        if self.thinking:
            return self.thinking.type
        options = self.chat_template_kwargs
        if options is None:
            return None
        is_wanted = options.enable_thinking if options.thinking is None else options.thinking
        return None if is_wanted is None else "enabled" if is_wanted else "disabled"

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


# --- responses ---


class CompletionTokensDetails(ResponsePart):
    """What the reply's tokens were spent on."""

    reasoning_tokens: int


class Usage(ResponsePart):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = Field(default=None, exclude_if=is_none)


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
    reasoning_content: list[ChatTokenLogprob] | None = Field(default=None, exclude_if=is_none)
    refusal: None = None


class ChatReplyMessage(ResponsePart):
    """The assistant's whole message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """null: there are tool calls and nothing else."""
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[ReplyCall] | None = Field(default=None, exclude_if=is_none)
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

    role: Literal["assistant"] | None = Field(default=None, exclude_if=is_none)
    content: str | None = Field(default=None, exclude_if=is_none)
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[CallDelta] | None = Field(default=None, exclude_if=is_none)


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
