"""Engine core and client over their real channel; the core runs in a thread instead of a process."""

import asyncio
import itertools
import os
import stat
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import (
    AddRequest,
    CoreMessage,
    EngineDead,
    RequestChannel,
    RequestMessage,
    RequestOutput,
    RequestOutputs,
    SampledToken,
    StepInput,
    StepOutput,
    StopCore,
)
from deployment.engine import Engine
from deployment.engine_client import EngineClient, RequestStream, make_socket_directory
from deployment.engine_core import EngineCore
from deployment.errors import EngineDeadError
from tests.unit.deployment.builders import (
    create_request,
    create_requests,
    create_scheduler,
    output_tokens,
    solo_tokens,
)
from tests.unit.deployment.fake_executor import FakeExecutor

DEADLINE_S = 20.0
LONG = {"max_model_len": 2000, "num_blocks": 501}
"""Limits under which a request can run for a while."""


class GatedExecutor(FakeExecutor):
    """Computes a step only while its gate is open, and tells that it waits there."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()

    def execute(self, step: StepInput) -> StepOutput:
        self.is_waiting.set()
        assert self.gate.wait(DEADLINE_S), "the gate stayed closed"
        self.is_waiting.clear()
        return super().execute(step)


@asynccontextmanager
async def running_core(**limits: int) -> AsyncIterator[tuple[EngineClient, GatedExecutor, threading.Thread]]:
    scheduler = create_scheduler(**limits)
    executor = GatedExecutor(scheduler.limits.block_size)
    client = EngineClient()
    core = EngineCore(Engine(scheduler, executor), client.channel)
    thread = threading.Thread(target=core.run)
    thread.start()
    try:
        await client.wait_until_ready()
        yield client, executor, thread
    finally:
        executor.gate.set()
        await client.shutdown()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        await asyncio.sleep(0.001)


async def collect(client: EngineClient, request: AddRequest) -> list[RequestOutput]:
    return [output async for output in client.generate(request)]


def is_empty(client: EngineClient) -> bool:
    stats = client.stats
    return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks - 1)


async def test_a_request_streams_its_tokens_and_ends_once():
    async with running_core() as (client, _, _):
        request = create_request(5, max_tokens=8)
        outputs = await collect(client, request)
        assert output_tokens(outputs, request) == solo_tokens(request)
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == "length"


async def test_shards_that_are_lost_while_nothing_runs_are_noticed():
    async with running_core() as (client, executor, _):
        executor.is_lost = True
        await until(lambda: not client.is_alive)
        with pytest.raises(EngineDeadError, match="rank 1 exited"):
            await collect(client, create_request(3))


async def test_requests_at_the_same_time_get_their_own_tokens():
    async with running_core(max_num_seqs=3) as (client, _, _):
        requests = create_requests(10, prompt=6, max_tokens=12)
        results = await asyncio.gather(*(collect(client, request) for request in requests))
        for request, outputs in zip(requests, results, strict=True):
            assert output_tokens(outputs, request) == solo_tokens(request)
        await until(lambda: is_empty(client))


async def test_the_core_takes_requests_again_after_it_was_idle():
    async with running_core() as (client, _, _):
        for request in create_requests(3):
            assert output_tokens(await collect(client, request), request) == solo_tokens(request)


async def test_a_refusal_is_the_only_output():
    async with running_core(max_model_len=8) as (client, _, _):
        [output] = await collect(client, create_request(8))
        assert output.finish_reason == "error"
        assert output.error is not None
        assert output.error.kind == "invalid"


async def test_too_many_requests_are_told_when_to_retry():
    async with running_core(max_num_seqs=1, max_waiting_requests=0, **LONG) as (client, _, _):
        async with aclosing(client.generate(create_request(max_tokens=1900))) as news:
            await anext(news)
            [output] = await collect(client, create_request())
        assert output.error is not None
        assert output.error.kind == "overloaded"
        assert output.error.retry_after_s is not None


async def test_a_slow_reader_gets_all_tokens_so_far_as_one_output():
    async with running_core() as (client, _, _):
        slow, fast = create_requests(2, prompt=3, max_tokens=30)
        async with aclosing(client.generate(slow)) as news:
            outputs = [await anext(news)]
            await collect(client, fast)
            await until(lambda: is_empty(client))
            outputs += [output async for output in news]
        assert len(outputs) <= 2
        assert output_tokens(outputs, slow) == solo_tokens(slow)


async def test_closing_the_stream_early_aborts_the_request():
    async with running_core(**LONG) as (client, _, _):
        async with aclosing(client.generate(create_request(max_tokens=1900))) as news:
            await anext(news)
        await until(lambda: is_empty(client))
        assert client.stats.num_generated_tokens < 1900


async def test_cancelling_the_reader_aborts_the_request():
    async with running_core() as (client, executor, _):
        executor.gate.clear()
        reader = asyncio.create_task(collect(client, create_request()))
        await until(executor.is_waiting.is_set)
        reader.cancel()
        executor.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until(lambda: client.stats.step_id > 0 and is_empty(client))


async def test_a_stream_that_was_read_to_its_end_aborts_nothing(monkeypatch: pytest.MonkeyPatch):
    async with running_core() as (client, _, _):
        sent = []
        monkeypatch.setattr(client, "_send", sent.append)
        request = create_request()
        news = client.generate(request)
        reading = asyncio.create_task(anext(news))
        await until(lambda: bool(sent))
        client._streams[request.request_id].put(RequestOutput(request.request_id, finish_reason="stop"))
        await reading
        await news.aclose()
        assert sent == [request]
        monkeypatch.undo()


@settings(max_examples=15, deadline=None)
@given(
    readers=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=12
    )
)
def test_readers_that_leave_at_any_time_leave_nothing_open(readers: list[tuple[int, int, int]]):
    async def read(client: EngineClient, prompt: int, max_tokens: int, num_outputs: int) -> None:
        request = create_request(prompt, max_tokens=max_tokens)
        outputs = []
        async with aclosing(client.generate(request)) as news:
            async for output in news:
                outputs.append(output)
                if len(outputs) > num_outputs:
                    break
        tokens = output_tokens(outputs, request)
        assert tokens == solo_tokens(request)[: len(tokens)]

    async def read_all() -> None:
        async with running_core(max_num_seqs=3, num_blocks=20) as (client, _, _):
            await asyncio.gather(*(read(client, *reader) for reader in readers))
            assert client._streams == {}
            await until(lambda: client.stats.step_id > 0 and is_empty(client))

    asyncio.run(read_all())


async def test_lost_shards_fail_every_open_request_and_end_the_core():
    async with running_core(max_num_seqs=1) as (client, executor, thread):
        executor.gate.clear()
        readers = [asyncio.create_task(collect(client, request)) for request in create_requests(3)]
        await until(executor.is_waiting.is_set)
        executor.is_lost = True
        executor.gate.set()
        for outputs in await asyncio.gather(*readers):
            assert outputs[-1].finish_reason == "error"
            assert outputs[-1].error is not None
            assert outputs[-1].error.kind == "unavailable"
            assert "rank 1 exited" in outputs[-1].error.message
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match="rank 1 exited"):
            await collect(client, create_request())
        await until(lambda: not thread.is_alive())
        assert executor.is_shut_down


async def test_a_death_that_was_observed_from_outside_fails_open_requests():
    async with running_core() as (client, executor, _):
        executor.gate.clear()
        reader = asyncio.create_task(collect(client, create_request()))
        await until(executor.is_waiting.is_set)
        client.mark_dead("its process exited with status -9")
        client.mark_dead("later reasons do not count")
        [output] = await reader
        assert output.error is not None
        assert "status -9" in output.error.message
        with pytest.raises(EngineDeadError, match="status -9"):
            await client.wait_until_ready()
        executor.gate.set()
        await stop(client.channel)


async def stop(channel: RequestChannel) -> None:
    """Stop a core whose client believes it dead."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(channel.requests)
        socket.send(msgspec.msgpack.encode(StopCore()))


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_whenever_a_stream_is_read_it_gives_each_token_once_in_order(puts: list[tuple[int, bool]]):
    async def read_between_puts() -> list[RequestOutput]:
        stream, outputs, ids = RequestStream(), [], itertools.count()
        for num_tokens, is_read_next in puts:
            stream.put(RequestOutput("a", [SampledToken(next(ids)) for _ in range(num_tokens)]))
            if is_read_next:
                outputs.append(await stream.get())
        stream.put(RequestOutput("a", finish_reason="length"))
        return [*outputs, await stream.get()]

    outputs = asyncio.run(read_between_puts())
    token_ids = [token.token_id for output in outputs for token in output.tokens]
    assert token_ids == list(range(sum(num_tokens for num_tokens, _ in puts)))
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]


async def test_a_core_that_sends_no_message_of_ours_counts_as_dead():
    client = EngineClient()
    waiting = asyncio.create_task(client.wait_until_ready())
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(client.channel.outputs)
        socket.send(msgspec.msgpack.encode({"type": "Greeting"}))
        with pytest.raises(EngineDeadError, match="cannot be read: .*Greeting"):
            await waiting
    await client.shutdown()


async def test_an_end_that_was_not_read_yet_outlives_the_death_of_the_engine():
    stream = RequestStream()
    stream.put(RequestOutput("a", finish_reason="stop"))
    stream.put(RequestOutput("a", finish_reason="error"))
    assert (await stream.get()).finish_reason == "stop"


async def test_a_core_that_never_comes_up_is_waited_for_until_it_is_declared_dead():
    client = EngineClient()
    waiting = asyncio.create_task(client.wait_until_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    client.mark_dead("it could not load the checkpoint")
    with pytest.raises(EngineDeadError, match="could not load"):
        await waiting
    await client.shutdown()


def test_socket_directories_of_dead_processes_are_removed_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {"dead": f"hotset-{dead.pid}-a", "alive": f"hotset-{os.getpid()}-b", "other": "hotset-notes-c"}
    for name in names.values():
        (tmp_path / name).mkdir()
    made = make_socket_directory()
    assert {path.name for path in tmp_path.iterdir()} == {names["alive"], names["other"], made.name}


async def test_shutdown_fails_open_requests_stops_the_core_and_removes_the_directory():
    async with running_core(**LONG) as (client, executor, thread):
        directory = Path(client.channel.requests.removeprefix("ipc://")).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        reader = asyncio.create_task(collect(client, create_request(max_tokens=1900)))
        await until(lambda: client.stats.num_running == 1)
        await client.shutdown()
        await client.shutdown()
        assert (await reader)[-1].finish_reason == "error"
        await until(lambda: not thread.is_alive())
        assert executor.is_shut_down
        assert not directory.exists()


class RawClient:
    """The replica's end of the channel without EngineClient: every message as it is."""

    def __init__(self, directory: Path) -> None:
        self.channel = RequestChannel(f"ipc://{directory}/requests", f"ipc://{directory}/outputs")
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.bind(self.channel.outputs)
        self.inbox.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self.outbox = self.context.socket(zmq.PUSH)
        self.outbox.connect(self.channel.requests)

    def send(self, *messages: RequestMessage) -> None:
        for message in messages:
            self.outbox.send(msgspec.msgpack.encode(message))

    def receive(self) -> CoreMessage:
        return msgspec.msgpack.decode(self.inbox.recv(), type=CoreMessage)


@pytest.fixture
def raw_client(tmp_path: Path):
    client = RawClient(tmp_path)
    yield client
    client.context.destroy(linger=0)


def start_core(channel: RequestChannel, executor: FakeExecutor, **limits: int) -> threading.Thread:
    core = EngineCore(Engine(create_scheduler(**limits), executor), channel)
    thread = threading.Thread(target=core.run)
    thread.start()
    return thread


def test_the_core_sends_one_message_when_ready_and_one_per_step(raw_client: RawClient):
    request = create_request(10, max_tokens=3)
    raw_client.send(request)
    thread = start_core(raw_client.channel, FakeExecutor(block_size=4), max_num_batched_tokens=4)
    messages = [raw_client.receive() for _ in range(6)]
    assert all(isinstance(message, RequestOutputs) for message in messages)
    assert [message.stats.step_id for message in messages] == [0, 1, 2, 3, 4, 5]
    assert [len(message.outputs) for message in messages] == [0, 0, 0, 1, 1, 1]
    raw_client.send(StopCore())
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_core_without_shards_says_so_last(raw_client: RawClient):
    executor = FakeExecutor(block_size=4)
    executor.is_lost = True
    thread = start_core(raw_client.channel, executor)
    raw_client.send(create_request())
    assert isinstance(raw_client.receive(), RequestOutputs)
    assert raw_client.receive() == EngineDead("rank 1 exited")
    thread.join(DEADLINE_S)
    assert executor.is_shut_down
