"""Plain completions: the model goes on with a text or with token ids."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from actors.messages import FinishReason, RequestOutput
from deployment.errors import InvalidRequestError
from deployment.generation import CompletionStream, OutputReader, ReplyHeader, make_usage
from deployment.logprobs import AlignedToken, TokenAligner, completion_logprobs
from deployment.openai_completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from deployment.openai_generation import Usage
from deployment.stop_strings import StopStrings
from deployment.tokenizer import Detokenizer, Tokenizer


def encode_prompt(tokenizer: Tokenizer, request: CompletionRequest) -> list[int]:
    """Token ids of the prompt; takes as long as the prompt is, so not on the event loop.

    Raises: InvalidRequestError for a prompt without a token.
    """
    prompt = request.single_prompt
    if isinstance(prompt, str):
        prompt = tokenizer.encode_text(prompt, add_bos=request.add_special_tokens is not False)
    if not prompt:
        raise InvalidRequestError("'prompt' has no tokens.", param="prompt")
    return prompt


@dataclass(frozen=True, slots=True)
class CompletionNews:
    """What one engine output adds to a completion."""

    text: str
    tokens: list[AlignedToken]
    """Where log-probabilities are wanted: the tokens of `text`."""


class CompletionReply(CompletionStream):
    """A completion; see `generation.Reply`."""

    def __init__(
        self, header: ReplyHeader, request: CompletionRequest, num_prompt_tokens: int, tokenizer: Tokenizer
    ) -> None:
        self._header = header
        self._include_usage = request.include_usage
        self._num_prompt_tokens = num_prompt_tokens
        self._tokenizer = tokenizer
        self._reader = OutputReader(Detokenizer(tokenizer))
        self._stop_strings = StopStrings(request.stop_strings)
        self._aligner = TokenAligner() if request.num_logprobs is not None else None
        self._finish_reason: FinishReason | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the reply ended, at a stop string or with the engine's last output."""
        return self._finish_reason is not None

    def push(self, output: RequestOutput) -> CompletionNews | None:
        """Add an engine output."""
        text = ""
        for piece in self._reader.read(output):
            if self._aligner:
                self._aligner.push(piece.text, piece.token)
            text += self._stop_strings.push(piece.text)
            if self._stop_strings.is_found:
                self._finish_reason = "stop"
                break
        if output.finish_reason is not None and not self.is_finished:
            self._finish_reason = output.finish_reason
            text += self._stop_strings.flush()
        tokens = self._take_tokens(text)
        return CompletionNews(text, tokens) if text or tokens else None

    def opening_chunks(self) -> list[BaseModel]:
        """Nothing: a completion begins with its text."""
        return []

    def chunks(self, delta: CompletionNews) -> list[BaseModel]:
        """The text of one engine output."""
        return [self._completion(delta.text, logprobs=self._logprobs([delta]))]

    def closing_chunks(self) -> list[BaseModel]:
        """The finish reason, then the token counts if they are wanted."""
        chunks: list[BaseModel] = [self._completion("", finish_reason=self._finish_reason)]
        if self._include_usage:
            chunks.append(Completion(**self._header, choices=[], usage=self._usage()))
        return chunks

    def response(self, deltas: list[CompletionNews]) -> BaseModel:
        """The whole completion."""
        return self._completion(
            "".join(delta.text for delta in deltas),
            logprobs=self._logprobs(deltas),
            finish_reason=self._finish_reason,
            usage=self._usage(),
        )

    def _take_tokens(self, text: str) -> list[AlignedToken]:
        if self._aligner is None:
            return []
        tokens = self._aligner.take(text)
        if self.is_finished and not self._stop_strings.is_found:
            tokens += self._aligner.take_rest()
        return tokens

    def _completion(
        self,
        text: str,
        *,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
    ) -> Completion:
        choice = CompletionChoice(text=text, logprobs=logprobs, finish_reason=finish_reason)
        return Completion(**self._header, choices=[choice], usage=usage)

    def _logprobs(self, deltas: list[CompletionNews]) -> CompletionLogprobs | None:
        if self._aligner is None:
            return None
        return completion_logprobs(self._tokenizer, [token for delta in deltas for token in delta.tokens])

    def _usage(self) -> Usage:
        return make_usage(self._num_prompt_tokens, self._reader.num_tokens)
