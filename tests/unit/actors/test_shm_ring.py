import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import RingHandle
from actors.shared_memory import AttachError
from actors.shm_ring import RingClosedError, RingPeerLostError, RingTimeoutError, ShmRing

_SPAWN = multiprocessing.get_context("spawn")


def create_ring(num_readers: int = 1, num_slots: int = 4, slot_bytes: int = 64) -> ShmRing:
    return ShmRing.create("hotset-test", num_readers=num_readers, num_slots=num_slots, slot_bytes=slot_bytes)


def message_of(index: int, size: int) -> bytes:
    return random.Random(index).randbytes(size)


def receive_all(handle: RingHandle, reader: int, sizes: list[int], pause_every: int) -> list[bytes]:
    ring = ShmRing.attach(handle)
    end = ring.reader(reader)
    messages = []
    for index in range(len(sizes)):
        if index % pause_every == 0:
            os.sched_yield()
        messages.append(end.receive(timeout_s=20))
    return messages


@given(
    sizes=st.lists(st.integers(0, 700), max_size=40),
    num_slots=st.integers(1, 5),
    slot_bytes=st.sampled_from([8, 64, 256]),
    pauses=st.lists(st.integers(1, 7), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_every_reader_gets_every_message_once_whole_and_in_order(sizes, num_slots, slot_bytes, pauses):
    ring = create_ring(len(pauses), num_slots, slot_bytes)
    messages = [message_of(index, size) for index, size in enumerate(sizes)]
    with ThreadPoolExecutor(len(pauses)) as pool:
        received = [
            pool.submit(receive_all, ring.handle, reader, sizes, pause) for reader, pause in enumerate(pauses)
        ]
        writer = ring.writer()
        for message in messages:
            writer.send(message, timeout_s=20)
        assert all(future.result() == messages for future in received)
    ring.check_integrity()
    ring.close()


def _echo_until_closed(request: RingHandle, reply: RingHandle) -> None:
    reader = ShmRing.attach(request).reader(0)
    writer = ShmRing.attach(reply).writer()
    while True:
        try:
            message = reader.receive(timeout_s=20)
        except RingClosedError:
            return
        writer.send(message, timeout_s=20)


def test_messages_larger_than_the_ring_pass_between_processes_unchanged():
    request, reply = create_ring(slot_bytes=4096), create_ring(slot_bytes=4096)
    process = _SPAWN.Process(target=_echo_until_closed, args=(request.handle, reply.handle))
    process.start()
    sizes = [0, 1, 4096, 4097, 1_000_000, 3]
    writer, reader = request.writer(), reply.reader(0)
    echoed = []
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [writer.send(message_of(i, n), 20) for i, n in enumerate(sizes)])
        echoed = [reader.receive(timeout_s=20) for _ in sizes]
        sending.result()
    assert echoed == [message_of(i, n) for i, n in enumerate(sizes)]
    request.close()
    process.join(20)
    assert process.exitcode == 0


def _attach_and_hang(request: RingHandle, reply: RingHandle) -> None:
    ShmRing.attach(request).reader(0)
    ShmRing.attach(reply).writer().send(b"ready", 20)
    threading.Event().wait()


def test_a_peer_that_is_killed_is_noticed_by_the_reader_and_the_writer():
    request, reply = create_ring(num_slots=1), create_ring()
    process = _SPAWN.Process(target=_attach_and_hang, args=(request.handle, reply.handle))
    process.start()
    assert process.pid is not None
    reader, writer = reply.reader(0), request.writer()
    assert reader.receive(timeout_s=20) == b"ready"
    writer.send(b"fills the only slot", timeout_s=20)
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RingPeerLostError, match=str(process.pid)):
        reader.receive(timeout_s=20)
    with pytest.raises(RingPeerLostError):
        writer.send(b"never read", timeout_s=20)
    assert time.monotonic() - started < 5
    process.join(20)


def test_a_reader_receives_what_was_sent_before_the_ring_closed():
    ring = create_ring()
    writer, reader = ring.writer(), ring.reader(0)
    writer.send(b"last", timeout_s=1)
    ring.close()
    assert reader.receive(timeout_s=1) == b"last"
    with pytest.raises(RingClosedError):
        reader.receive(timeout_s=1)
    with pytest.raises(RingClosedError):
        writer.send(b"too late", timeout_s=1)


def test_a_message_sent_just_before_the_ring_closed_is_not_lost(monkeypatch):
    ring = create_ring()
    writer, reader = ring.writer(), ring.reader(0)
    look_for_problem = ring._memory._problem

    def send_and_close_first(
        *args,
    ):  # after the reader saw no message, before it sees that the ring is closed
        if not ring._memory.closed.load():
            writer.send(b"last", timeout_s=1)
            ring.close()
        return look_for_problem(*args)

    monkeypatch.setattr(ring._memory, "_problem", send_and_close_first)
    assert reader.receive(timeout_s=1) == b"last"


def test_closing_wakes_a_reader_that_sleeps():
    ring = create_ring()
    reader = ring.reader(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.receive, 20)
        ring.close()
        with pytest.raises(RingClosedError):
            waiting.result(timeout=5)


def test_a_receive_that_timed_out_in_the_middle_of_a_message_goes_on_later():
    ring = create_ring(num_slots=2, slot_bytes=8)
    reader, writer = ring.reader(0), ring.writer()
    message = message_of(0, 40)
    writer._publish(message[:8], False, time.monotonic() + 1)
    with pytest.raises(RingTimeoutError):
        reader.receive(timeout_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(writer.send, message[8:], 20)
        assert reader.receive(timeout_s=20) == message


def test_a_send_that_finds_no_room_in_time_closes_the_ring():
    ring = create_ring(num_slots=1)
    writer, reader = ring.writer(), ring.reader(0)
    writer.send(b"a", timeout_s=1)
    with pytest.raises(RingTimeoutError):
        writer.send(b"b", timeout_s=0.01)
    assert reader.receive(timeout_s=1) == b"a"
    with pytest.raises(RingClosedError):
        reader.receive(timeout_s=1)


def test_a_handle_of_memory_that_is_gone_is_refused():
    ring = create_ring()
    ring.close()
    with pytest.raises(AttachError, match="shared memory"):
        ShmRing.attach(ring.handle)
