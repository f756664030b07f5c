"""ResponsesReply: a chat reply in the shape of POST /v1/responses."""

from __future__ import annotations

import itertools
from typing import Any, Literal

from pydantic import BaseModel

from actors.messages import RequestOutput
from deployment.chat import ChatPrompt
from deployment.chat_reader import ChatReader
from deployment.errors import ApiError
from deployment.generation import ReplyHeader
from deployment.openai_response_parts import (
    IncompleteDetails,
    OutputTokensDetails,
    ReasoningEcho,
    ResponseBody,
    ResponseEvent,
    ResponseFailure,
    ResponseUsage,
)
from deployment.openai_responses import ResponsesRequest
from deployment.reply_parser import Parsed
from deployment.response_items import OutputItems
from deployment.tokenizer import Tokenizer


class ResponsesReply:
    """A response; see `generation.Reply`. A delta is what one engine output gave.

    Args:
        header: what all replies have.
        request: is repeated in the response.
        prompt: what the reply is to.
        max_calls: tool calls that the reply may have; None: any number.
        tokenizer: the checkpoint's.
    """

    end_marker: str | None = None

    def __init__(
        self,
        header: ReplyHeader,
        request: ResponsesRequest,
        prompt: ChatPrompt,
        max_calls: int | None,
        tokenizer: Tokenizer,
    ) -> None:
        self._header = header
        self._request = request
        self._num_prompt_tokens = len(prompt.token_ids)
        self._reader = ChatReader(prompt.conversation, tokenizer, max_calls=max_calls, wants_logprobs=False)
        self._sequence = itertools.count()
        self._items = OutputItems(header["id"].removeprefix("resp_"), self._sequence)

    @property
    def is_finished(self) -> bool:
        """Whether the reply ended, at the last call that it may have or with the engine's last output."""
        return self._reader.finish_reason is not None

    def push(self, output: RequestOutput) -> list[Parsed] | None:
        """Add an engine output."""
        return self._reader.push(output) or None

    def opening_chunks(self) -> list[BaseModel]:
        """The response, of which there is nothing yet."""
        return [
            self._event("response.created", self._body("in_progress")),
            self._event("response.in_progress", self._body("in_progress")),
        ]

    def chunks(self, delta: list[Parsed]) -> list[BaseModel]:
        """How the items grow."""
        return [event for part in delta for event in self._items.add(part)]

    def closing_chunks(self) -> list[BaseModel]:
        """The end of the last item, and the whole response."""
        events = self._items.finish(self._finish_reason)
        body = self._finished_body()
        event_type: Any = f"response.{body.status}"
        return [*events, self._event(event_type, body)]

    def failure_chunks(self, error: ApiError) -> list[BaseModel]:
        """The response as far as it came, and why it came no further."""
        is_clients = error.status < 500
        code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
        if is_clients:
            code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
        failure = ResponseFailure(code=code, message=error.message)
        return [self._event("response.failed", self._body("failed", error=failure))]

    def response(self, deltas: list[list[Parsed]]) -> BaseModel:
        """The whole response."""
        for delta in deltas:
            self.chunks(delta)
        self._items.finish(self._finish_reason)
        return self._finished_body()

    @property
    def _finish_reason(self) -> str:
        reason = self._reader.finish_reason
        assert reason is not None, "the reply is finished"
        return reason

    def _finished_body(self) -> ResponseBody:
        usage = ResponseUsage(
            input_tokens=self._num_prompt_tokens,
            output_tokens=self._reader.num_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._reader.num_reasoning_tokens),
            total_tokens=self._num_prompt_tokens + self._reader.num_tokens,
        )
        if self._finish_reason == "length":
            return self._body("incomplete", usage=usage, incomplete_details=IncompleteDetails())
        return self._body("completed", usage=usage)

    def _body(
        self,
        status: Literal["in_progress", "completed", "incomplete", "failed"],
        *,
        usage: ResponseUsage | None = None,
        error: ResponseFailure | None = None,
        incomplete_details: IncompleteDetails | None = None,
    ) -> ResponseBody:
        request, header = self._request, self._header
        effort = request.reasoning.effort if request.reasoning else None
        return ResponseBody(
            id=header["id"],
            created_at=header["created"],
            model=header["model"],
            system_fingerprint=header["system_fingerprint"],
            status=status,
            error=error,
            incomplete_details=incomplete_details,
            output=list(self._items.done),
            usage=usage,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=ReasoningEcho(effort=effort if isinstance(effort, str) else None),
            service_tier=request.service_tier or "auto",
            temperature=1.0 if request.temperature is None else request.temperature,
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_p=1.0 if request.top_p is None else request.top_p,
            user=request.user,
        )

    def _event(self, event_type: Any, body: ResponseBody) -> ResponseEvent:
        return ResponseEvent(type=event_type, sequence_number=next(self._sequence), response=body)
