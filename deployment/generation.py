"""From the engine's outputs to an HTTP response, whole or as server-sent events, for any kind of reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypedDict, TypeVar

from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.messages import AddRequest, EngineHealth, EnginePlacement, RequestOutput, SampledToken
from deployment.errors import ApiError, EngineDeadError, InternalError
from deployment.http_errors import error_body, error_of_request, internal_error
from deployment.openai_base import TypedEvent
from deployment.openai_generation import CompletionTokensDetails, Usage
from deployment.tokenizer import Detokenizer
from placement.profile import Profile

logger = logging.getLogger(__name__)

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

_D = TypeVar("_D")
_T = TypeVar("_T")


class EngineHandle(Protocol):
    """The engine, as the API sees it."""

    def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request.

        Yields its news, in order; the last one has a `finish_reason`. A refusal is the first and only output.
        Closing the generator early aborts the request. Raises ApiError if the engine is gone.
        """

    async def profile(self, label: str) -> Profile:
        """How often each expert was chosen since the engine started. Raises ApiError if the engine is gone."""

    async def placement(self) -> EnginePlacement:
        """Which pages are hot on each rank now. Raises ApiError if the engine is gone."""

    async def pause_adaptation(self, is_paused: bool) -> None:
        """Let the hot sets stay as they are, or follow the traffic again. Raises ApiError if the engine is gone."""

    async def health(self) -> EngineHealth:
        """Whether the engine takes requests and makes progress."""


class Reply(Protocol[_D]):
    """One reply on its way to the client; `_D` is what one engine output adds to it.

    The whole response is made from the same deltas as the stream, so they cannot differ.
    """

    end_marker: str | None
    """What the stream's last event has instead of a chunk; None: the last chunk is the end."""

    @property
    def is_finished(self) -> bool:
        """Whether the reply ended, which it may do before the engine does (at a stop string)."""

    def push(self, output: RequestOutput) -> _D | None:
        """Add an engine output; return what it adds for the client, if anything."""

    def opening_chunks(self) -> list[BaseModel]:
        """What a stream begins with."""

    def chunks(self, delta: _D) -> list[BaseModel]:
        """A delta as events of the stream; a `TypedEvent` is sent under its type."""

    def closing_chunks(self) -> list[BaseModel]:
        """What a finished stream ends with."""

    def failure_chunks(self, error: ApiError) -> list[BaseModel]:
        """What a stream ends with that failed midway."""

    def response(self, deltas: list[_D]) -> BaseModel:
        """The whole of a finished reply."""


class CompletionStream:
    """How both completion endpoints end a stream, and tell of a failure in it."""

    end_marker: str | None = "[DONE]"

    def failure_chunks(self, error: ApiError) -> list[BaseModel]:
        """The error."""
        return [error_body(error)]


class ReplyHeader(TypedDict):
    """What a response and all its chunks have in common."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str
    """See `deployment/fingerprint.py`."""


def make_usage(
    num_prompt_tokens: int, num_tokens: int, details: CompletionTokensDetails | None = None
) -> Usage:
    """Token counts of a finished reply."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
        completion_tokens_details=details,
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one token adds to a reply; the last piece may have none."""

    text: str
    token: SampledToken | None = None


class OutputReader:
    """Reads engine outputs token by token: counts, drops the stop token, makes text."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.num_tokens = 0
        """Tokens read so far, the stop token included."""
        self._detokenizer = detokenizer

    def read(self, output: RequestOutput) -> Iterator[Piece]:
        """The pieces of one output; a reader that stops midway has not counted the rest."""
        for index, token in enumerate(output.tokens):
            self.num_tokens += 1
            is_last = index == len(output.tokens) - 1
            if is_last and output.finish_reason == "stop" and token.token_id == output.stop_token_id:
                break
            yield Piece(self._detokenizer.push(token.token_id), token)
        if output.finish_reason is not None and (rest := self._detokenizer.flush()):
            yield Piece(rest)


class Generation(Generic[_D]):
    """Runs a request on the engine and sends its reply: the ASGI app that an endpoint returns.

    Nothing is sent before the engine's first output, so that a refusal has its own HTTP status, streamed or
    not. The request ends on the engine when the reply is finished, when the client leaves, and when anything
    fails.
    """

    def __init__(self, engine: EngineHandle, request: AddRequest, reply: Reply[_D], *, stream: bool) -> None:
        self._engine = engine
        self._request = request
        self._reply = reply
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request whose body was read."""
        await _run_until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._deltas()) as deltas:
            first = await anext(deltas)
            if self._stream:
                events = self._events(first, deltas)
                await StreamingResponse(events, headers=STREAM_HEADERS).stream_response(send)
            else:
                whole = [delta async for delta in _chain(first, deltas) if delta is not None]
                body = self._reply.response(whole).model_dump_json()
                await Response(body, media_type="application/json")(scope, receive, send)

    async def _deltas(self) -> AsyncGenerator[_D | None, None]:
        """What each engine output adds to the reply, None where it adds nothing."""
        async with aclosing(self._engine.generate(self._request)) as outputs:
            async for output in outputs:
                _raise_for_error(output)
                yield self._reply.push(output)
                if self._reply.is_finished:
                    return
        raise InternalError("The engine ended this request without a reason.")

    async def _events(
        self, first: _D | None, rest: AsyncGenerator[_D | None, None]
    ) -> AsyncGenerator[bytes, None]:
        """The stream; what fails once it has begun becomes an event of it."""
        try:
            opening = self._reply.opening_chunks()
            async for delta in _chain(first, rest):
                chunks = opening if delta is None else [*opening, *self._reply.chunks(delta)]
                opening = []
                if chunks:
                    yield _events_of(chunks)
            yield _events_of(self._reply.closing_chunks())
        except ApiError as error:
            yield _events_of(self._reply.failure_chunks(error))
        except Exception:
            logger.exception("request %s failed while it was streamed", self._request.request_id)
            yield _events_of(self._reply.failure_chunks(internal_error()))
        if self._reply.end_marker is not None:
            yield _data(self._reply.end_marker)


def _events_of(chunks: list[BaseModel]) -> bytes:
    return b"".join(map(_event, chunks))


def _event(chunk: BaseModel) -> bytes:
    name = f"event: {chunk.type}\n".encode() if isinstance(chunk, TypedEvent) else b""
    return name + _data(chunk.model_dump_json())


def _data(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


async def _chain(first: _T, rest: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
    yield first
    async for item in rest:
        yield item


def _raise_for_error(output: RequestOutput) -> None:
    if output.error is not None:
        raise error_of_request(output.error)
    if output.finish_reason in ("abort", "error"):
        raise EngineDeadError("The engine was stopped before this request was finished.")


async def _run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, or cancel it when the client leaves."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
