"""ShmRing: broadcast of byte messages from one writer to a few readers through shared memory.

The step channel (engine core to all shards) is one ring, the reply channel (rank 0 to the engine core) another.

    word 0       head: slots published by the writer
    word 8       closed
    word 16      pid of the writer
    word 24 + 8r tail: slots consumed by reader r; the word after it holds the reader's pid
    slots        one word `length * 2 + is_last`, then `slot_bytes` of payload

Counters only grow and have one writer each, 64 bytes apart so that they do not share a cache line.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Final

from actors import futex
from actors.messages import RingHandle
from actors.process import OtherProcess
from actors.shared_memory import SharedMapping

_WORD: Final = 8
_LINE: Final = 8
"""Words between two counters: a cache line."""
_HEAD, _CLOSED, _WRITER_PID, _TAILS = 0, _LINE, 2 * _LINE, 3 * _LINE
_SLEEP_S: Final = 0.5
"""Longest sleep before a waiter looks again whether its peer lives, the ring is open and time is left."""


class RingError(RuntimeError):
    """A message could not be sent or received."""


class RingClosedError(RingError):
    """The other side closed the ring; nothing more comes."""


class RingPeerLostError(RingError):
    """The process at the other side is gone."""


class RingTimeoutError(RingError):
    """The other side did not move in time."""


class ShmRing:
    """One ring, mapped into this process.

    Protocol: one process calls `create` and hands out `handle`; writer and readers, in any processes,
    `attach`. There is one `writer()` and one `reader(r)` for every `r`, each used by one thread at a time.
    Either side may `close`, from any thread: readers still receive what was published before, then everyone
    gets RingClosedError.

    A waiter first polls and yields the processor for `spin_s`, since the next message of a busy engine is
    near, then sleeps on the counter; publishing wakes it.

    Invariants:
    - `tail <= head <= tail + num_slots` for every reader, and a slot is written only when every reader has
      consumed what it held: no reader ever sees a slot change under it.
    - a message is received whole, once, in order: `head` moves only after a slot is complete.
    """

    def __init__(self, mapping: SharedMapping, handle: RingHandle, spin_s: float) -> None:
        self.handle = handle
        self._mapping = mapping
        self._memory = _RingMemory(mapping, handle, spin_s)

    @classmethod
    def create(
        cls,
        name: str,
        *,
        num_readers: int,
        num_slots: int = 16,
        slot_bytes: int = 65536,
        spin_s: float = 1e-3,
    ) -> ShmRing:
        """Make an empty ring; others may attach until this object's `close`.

        Args:
            name: shown in `/proc/<pid>/maps`.
            num_readers: every one of them receives every message.
            num_slots: messages, or parts of long ones, that may wait for the slowest reader.
            slot_bytes: payload of one slot, a multiple of 8; longer messages take several.
            spin_s: how long this process polls before it sleeps.
        """
        assert slot_bytes % _WORD == 0, f"{slot_bytes=}"
        num_bytes = _header_words(num_readers) * _WORD + num_slots * (_WORD + slot_bytes)
        mapping = SharedMapping.create(name, num_bytes)
        handle = RingHandle(
            segment=mapping.segment, num_readers=num_readers, num_slots=num_slots, slot_bytes=slot_bytes
        )
        return cls(mapping, handle, spin_s)

    @classmethod
    def attach(cls, handle: RingHandle, *, spin_s: float = 1e-3) -> ShmRing:
        """Map a ring that another process made.

        Raises: AttachError if that process is gone.
        """
        return cls(SharedMapping.attach(handle.segment, writable=True), handle, spin_s)

    def writer(self) -> RingWriter:
        """This process's end as the writer."""
        self._memory.words[_WRITER_PID] = os.getpid()
        return RingWriter(self._memory)

    def reader(self, reader: int) -> RingReader:
        """This process's end as reader number `reader`."""
        self._memory.words[_reader_pid(reader)] = os.getpid()
        return RingReader(self._memory, reader)

    def close(self) -> None:
        """End the ring for both sides and wake everyone who waits; safe to call twice."""
        self._memory.close()
        self._mapping.close()

    def check_integrity(self) -> None:
        """Assert the counters' invariant; for tests, while neither side moves."""
        head = self._memory.head.load()
        for tail in self._memory.tails:
            assert tail.load() <= head <= tail.load() + self.handle.num_slots, f"{tail.load()=} {head=}"


class RingWriter:
    """The sending end. See ShmRing."""

    def __init__(self, memory: _RingMemory) -> None:
        self._memory = memory
        self._num_published = memory.head.load()
        self._readers = [(tail, memory.peer(_reader_pid(r))) for r, tail in enumerate(memory.tails)]

    def send(self, message: bytes, timeout_s: float) -> None:
        """Publish `message` to all readers, waiting while the ring is full.

        Raises: RingError. Readers may then hold part of the message, so the ring is closed.
        """
        deadline = time.monotonic() + timeout_s
        step = self._memory.slot_bytes
        try:
            for start in range(0, max(len(message), 1), step):
                self._publish(message[start : start + step], start + step >= len(message), deadline)
        except RingError:
            self._memory.close()
            raise

    def _publish(self, part: bytes, is_last: bool, deadline: float) -> None:
        memory = self._memory
        if memory.closed.load():
            raise RingClosedError("the ring was closed")
        for tail, reader in self._readers:
            memory.wait_while(tail, self._num_published - memory.num_slots, reader, deadline)
        memory.write_slot(self._num_published, part, is_last)
        _fence()
        self._num_published += 1
        memory.head.store(self._num_published)


class RingReader:
    """A receiving end. See ShmRing."""

    def __init__(self, memory: _RingMemory, reader: int) -> None:
        self._memory = memory
        self._tail = memory.tails[reader]
        self._num_consumed = self._tail.load()
        self._writer = memory.peer(_WRITER_PID)
        self._parts: list[bytes] = []

    def receive(self, timeout_s: float) -> bytes:
        """Next message. After RingTimeoutError nothing is lost: call again.

        Raises: RingError.
        """
        deadline = time.monotonic() + timeout_s
        while not self._take_part(deadline):
            pass
        message = b"".join(self._parts)
        self._parts.clear()
        return message

    def _take_part(self, deadline: float) -> bool:
        """Consume one slot; true if it ends a message."""
        memory = self._memory
        memory.wait_while(memory.head, self._num_consumed, self._writer, deadline)
        _fence()
        part, is_last = memory.read_slot(self._num_consumed)
        self._parts.append(part)
        _fence()
        self._num_consumed += 1
        self._tail.store(self._num_consumed)
        return is_last


class _RingMemory:
    """The ring's words and slots, and how to wait for a counter; what the two ends share."""

    def __init__(self, mapping: SharedMapping, handle: RingHandle, spin_s: float) -> None:
        self.num_slots = handle.num_slots
        self.slot_bytes = handle.slot_bytes
        self.words = memoryview(mapping.memory).cast("Q")
        self.closed = _Counter(self.words, _CLOSED)
        self.head = _Counter(self.words, _HEAD)
        self.tails = [_Counter(self.words, _TAILS + r * _LINE) for r in range(handle.num_readers)]
        self._bytes = memoryview(mapping.memory)
        self._first_slot = _header_words(handle.num_readers) * _WORD
        self._spin_s = spin_s

    def peer(self, pid_word: int) -> _Peer:
        return _Peer(self.words, pid_word)

    def write_slot(self, sequence: int, part: bytes, is_last: bool) -> None:
        offset = self._slot_offset(sequence)
        self.words[offset // _WORD] = len(part) * 2 + is_last
        self._bytes[offset + _WORD : offset + _WORD + len(part)] = part

    def read_slot(self, sequence: int) -> tuple[bytes, bool]:
        offset = self._slot_offset(sequence)
        length, is_last = divmod(self.words[offset // _WORD], 2)
        return bytes(self._bytes[offset + _WORD : offset + _WORD + length]), bool(is_last)

    def close(self) -> None:
        self.closed.store(1)
        for counter in (self.head, *self.tails):
            counter.wake()

    def wait_while(self, counter: _Counter, value: int, peer: _Peer, deadline: float) -> None:
        """Return once `counter` differs from `value`; raise if it cannot or does not before `deadline`."""
        spin_until = min(time.monotonic() + self._spin_s, deadline)
        while counter.load() == value:
            now = time.monotonic()
            if now < spin_until:
                os.sched_yield()
                continue
            problem = self._problem(peer, now, deadline)
            if problem is None:
                counter.sleep_while(value, min(_SLEEP_S, deadline - now))
            elif counter.load() == value:  # the other side may have moved just before it closed or died
                raise problem

    def _problem(self, peer: _Peer, now: float, deadline: float) -> RingError | None:
        if self.closed.load():
            return RingClosedError("the ring was closed")
        if peer.is_gone():
            return RingPeerLostError(f"process {peer.pid} at the other side of the ring is gone")
        if now >= deadline:
            return RingTimeoutError("the other side of the ring did not move in time")
        return None

    def _slot_offset(self, sequence: int) -> int:
        return self._first_slot + sequence % self.num_slots * (_WORD + self.slot_bytes)


class _Counter:
    """A word of shared memory that one process writes and others sleep on."""

    def __init__(self, words: memoryview, index: int) -> None:
        self._words = words
        self._index = index
        self._address = ctypes.addressof(ctypes.c_uint64.from_buffer(words, index * _WORD))

    def load(self) -> int:
        value: int = self._words[self._index]
        return value

    def store(self, value: int) -> None:
        """Set the word and wake who sleeps on it."""
        self._words[self._index] = value
        self.wake()

    def wake(self) -> None:
        futex.wake_all(self._address)

    def sleep_while(self, value: int, timeout_s: float) -> None:
        futex.wait(self._address, value & 0xFFFFFFFF, timeout_s)


class _Peer:
    """The process whose pid is in a word of the ring; 0 until it attaches."""

    def __init__(self, words: memoryview, pid_word: int) -> None:
        self._words = words
        self._pid_word = pid_word
        self._process: OtherProcess | None = None

    @property
    def pid(self) -> int:
        pid: int = self._words[self._pid_word]
        return pid

    def is_gone(self) -> bool:
        """Whether it attached and has ended since."""
        if self._process is None:
            if self.pid == 0:
                return False
            try:
                self._process = OtherProcess(self.pid)
            except ProcessLookupError:
                return True
        return self._process.is_gone()


def _header_words(num_readers: int) -> int:
    return _TAILS + num_readers * _LINE


def _reader_pid(reader: int) -> int:
    return _TAILS + reader * _LINE + 1


_fence_lock = threading.Lock()


def _fence() -> None:
    """Keep the memory accesses before this call before those after it, also on machines weaker than x86.

    One release only holds back what precedes it and one acquire only what follows; release, then acquire,
    do both.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass
