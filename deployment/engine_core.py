"""EngineCore: the loop of the engine's own process, between the request channel and the Engine.

It has its own process since a loop that computes all the time and an event loop that serves HTTP starve each
other under one interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import zmq

from actors.messages import (
    AbortRequest,
    AddRequest,
    CoreMessage,
    EngineDead,
    RequestChannel,
    RequestMessage,
    RequestOutput,
    RequestOutputs,
    StopCore,
)
from deployment.engine import Engine
from deployment.errors import ShardsLostError

_IDLE_CHECK_MS = 1000
"""Between looks at idle shards."""
_LINGER_MS = 1000
"""For the last messages to reach a replica that still reads."""


class EngineCore:
    """Feeds the Engine from the request channel and sends its news back.

    Protocol: one thread calls `run`, once. Every turn of the loop takes the messages that have arrived, computes
    a step and sends one `RequestOutputs`, with or without news; only a turn with nothing to compute waits, for
    the next message or until it is time to look after the shards. The first `RequestOutputs`, before any turn,
    says that the core is ready.
    """

    def __init__(self, engine: Engine, channel: RequestChannel) -> None:
        self._engine = engine
        self._context = zmq.Context()
        # Neither end limits the number of queued messages: what is open limits them, and the core never blocks.
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(channel.requests)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(channel.outputs)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RequestMessage] = msgspec.msgpack.Decoder(RequestMessage)

    def run(self) -> None:
        """Serve until told to stop or until the shards are lost; then stop the shards and close the channel."""
        try:
            self._loop()
        except ShardsLostError as error:
            self._send(EngineDead(str(error)))
        finally:
            self._engine.shutdown()
            self._context.destroy(linger=_LINGER_MS)

    def _loop(self) -> None:
        self._send(RequestOutputs([], self._engine.stats()))
        while True:
            outputs = []
            for message in self._arrived():
                match message:
                    case AddRequest():
                        outputs += self._add(message)
                    case AbortRequest(request_id):
                        self._engine.abort(request_id)
                    case StopCore():
                        return
            outputs += self._engine.step()
            self._send(RequestOutputs(outputs, self._engine.stats()))

    def _arrived(self) -> Iterator[RequestMessage]:
        """Messages that are there; waits a while for one if there is nothing to compute."""
        timeout_ms = 0 if self._engine.has_requests else _IDLE_CHECK_MS
        while self._inbox.poll(timeout_ms):
            yield self._decoder.decode(self._inbox.recv())
            timeout_ms = 0

    def _add(self, request: AddRequest) -> list[RequestOutput]:
        """Hand a request to the engine. Returns: the news that it is refused, if it is."""
        error = self._engine.add(request)
        if error is None:
            return []
        return [RequestOutput(request.request_id, finish_reason="error", error=error)]

    def _send(self, message: CoreMessage) -> None:
        self._outbox.send(self._encoder.encode(message))
