"""EngineClient: the engine core as the event loop of the Engine replica sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from actors.messages import (
    AbortRequest,
    AddRequest,
    CoreMessage,
    EngineDead,
    EngineStats,
    RequestChannel,
    RequestError,
    RequestMessage,
    RequestOutput,
    RequestOutputs,
    SampledToken,
    StopCore,
)
from deployment.errors import EngineDeadError

logger = logging.getLogger(__name__)

_LINGER_MS: Final = 1000
"""For `StopCore` to reach a core that still reads."""


def make_socket_directory() -> Path:
    """A new directory that only this user may enter, for this process's sockets.

    Directories of processes that were killed are removed first: nobody else will.
    """
    for old in Path(tempfile.gettempdir()).glob("hotset-*-*"):
        owner = old.name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(old, ignore_errors=True)  # another user's stays
    return Path(tempfile.mkdtemp(prefix=f"hotset-{os.getpid()}-"))  # mode 0700


class RequestStream:
    """News of one request, between the channel and whoever reads them.

    However slow the reader, what waits for it is one output with all the tokens since the last one it took: it
    holds up nobody, and `max_tokens` bounds it.
    """

    def __init__(self) -> None:
        self._tokens: list[SampledToken] = []
        self._newest: RequestOutput | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Add news after those that wait; there are none after the end."""
        if self._newest is None or self._newest.finish_reason is None:
            self._tokens += output.tokens
            self._newest = output
            self._has_news.set()

    async def get(self) -> RequestOutput:
        """Wait for news and take all of them as one output."""
        await self._has_news.wait()
        self._has_news.clear()
        assert self._newest is not None, "news without an output"
        tokens, self._tokens = self._tokens, []
        return msgspec.structs.replace(self._newest, tokens=tokens)


class EngineClient:
    """Sends requests to the engine core and gives each reader the news of its own request.

    Protocol: made, used and shut down on one running event loop. It chooses the addresses of the channel, in a
    directory that only this user may enter; the core may come up later, and finds there what was sent before.

    Invariants:
    - a request has a stream exactly while its `generate` runs;
    - the core holds no request without a stream, but for those whose `AbortRequest` is on its way;
    - once the engine is dead, every stream has had its end.
    """

    def __init__(self) -> None:
        self._directory = make_socket_directory()
        self.channel = RequestChannel(
            requests=f"ipc://{self._directory}/requests", outputs=f"ipc://{self._directory}/outputs"
        )
        """For the engine core."""
        self.stats = EngineStats()
        """The newest ones that the core sent."""
        self._streams: dict[str, RequestStream] = {}
        self._death: str | None = None
        self._is_settled = asyncio.Event()  # the core is ready, or dead
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)
        # No limit on queued messages, see EngineCore. Sending never waits, so it needs no asyncio.
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(self.channel.outputs)
        self._outbox = zmq.Socket(self._context, zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(self.channel.requests)
        self._receiver = asyncio.create_task(self._receive(), name="receive-from-engine-core")

    @property
    def is_alive(self) -> bool:
        """Whether the engine may still answer; it counts as alive while it comes up."""
        return self._death is None

    async def wait_until_ready(self) -> None:
        """Wait for the engine core to come up.

        Raises: EngineDeadError if it dies instead.
        """
        await self._is_settled.wait()
        self._check_alive()

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request, under an id that was not used before.

        Yields: its news, in order; the last one has a `finish_reason`. A refusal is the first and only output.
            Closing the generator early, or cancelling its reader, aborts the request.
        Raises: EngineDeadError if the engine is dead already. If it dies later, the last output says so.
        """
        self._check_alive()
        assert request.request_id not in self._streams, f"request {request.request_id!r} is open already"
        stream = self._streams[request.request_id] = RequestStream()
        self._send(request)
        has_ended = False
        try:
            while not has_ended:
                output = await stream.get()
                has_ended = output.finish_reason is not None
                yield output
        finally:
            del self._streams[request.request_id]
            if not has_ended:
                self._send(AbortRequest(request.request_id))

    def mark_dead(self, reason: str) -> None:
        """Fail every open request and refuse new ones; only the first reason counts.

        For whoever watches the core's process: a core that dies suddenly cannot say so itself.
        """
        if self._death is not None:
            return
        self._death = reason
        self._is_settled.set()
        error = RequestError("unavailable", f"The engine stopped while this request was running: {reason}")
        for request_id, stream in self._streams.items():
            stream.put(RequestOutput(request_id, finish_reason="error", error=error))

    async def shutdown(self) -> None:
        """Tell the core to stop, fail what is open, remove the directory; safe to call twice."""
        linger_ms = _LINGER_MS if self.is_alive else 0
        self._send(StopCore())
        self.mark_dead("it was shut down")
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._inbox.close(linger=0)
        self._outbox.close(linger=linger_ms)
        await asyncio.to_thread(self._context.term)
        shutil.rmtree(self._directory, ignore_errors=True)  # the core may be removing its socket

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"The engine is not running: {self._death}")

    def _send(self, message: RequestMessage) -> None:
        if self.is_alive:
            self._outbox.send(self._encoder.encode(message))

    async def _receive(self) -> None:
        try:
            while True:
                self._take(self._decoder.decode(await self._inbox.recv()))
        except msgspec.DecodeError as error:
            logger.exception("the engine core sent what is no message")
            self.mark_dead(f"its message cannot be read: {error}")

    def _take(self, message: CoreMessage) -> None:
        match message:
            case RequestOutputs(outputs, stats):
                self.stats = stats
                self._is_settled.set()
                for output in outputs:
                    if output.request_id in self._streams:  # else its reader has left
                        self._streams[output.request_id].put(output)
            case EngineDead(error):
                logger.error("the engine core is dead: %s", error)
                self.mark_dead(error)
