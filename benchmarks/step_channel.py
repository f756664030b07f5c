"""How long does one step's message take to the shards and back, and what do waiting shards cost?

    python -m benchmarks.step_channel --world-size 2 --message-bytes 600

Echo processes stand for the shards; nothing else runs in them. Prints one JSON line: round trip with the
reply of rank 0 only (as the engine does) and of all ranks, the step channel's share of one processor per
idle shard, and the round trip of the first message after the idle time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence

from actors.messages import RingHandle
from actors.shm_ring import RingClosedError, RingReader, RingWriter, ShmRing

_TIMEOUT_S = 60.0
_ALL_REPLY, _RANK_0_REPLIES, _REPORT_CPU = b"a", b"0", b"c"
"""First byte of a message: what the shards do with it."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--message-bytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--idle-s", type=float, default=5.0)
    options = parser.parse_args()
    steps = ShmRing.create("hotset-steps", num_readers=options.world_size)
    replies = [ShmRing.create(f"hotset-replies-{r}", num_readers=1) for r in range(options.world_size)]
    context = multiprocessing.get_context("spawn")
    shards = [
        context.Process(target=_echo, args=(steps.handle, ring.handle, rank))
        for rank, ring in enumerate(replies)
    ]
    for shard in shards:
        shard.start()
    record = _measure(options, steps.writer(), [ring.reader(0) for ring in replies])
    steps.close()
    for shard in shards:
        shard.join()
    print(json.dumps(record))


def _measure(
    options: argparse.Namespace, writer: RingWriter, readers: Sequence[RingReader]
) -> dict[str, object]:
    payload = os.urandom(options.message_bytes - 1)
    _round_trips(writer, readers, _ALL_REPLY + payload, 100)  # everyone has started
    all_us = _round_trips(writer, readers, _ALL_REPLY + payload, options.rounds)
    one_us = _round_trips(writer, readers[:1], _RANK_0_REPLIES + payload, options.rounds)
    busy_before = _cpu_seconds(writer, readers)
    time.sleep(options.idle_s)
    first_us = _round_trips(writer, readers, _ALL_REPLY + payload, 1)
    busy_after = _cpu_seconds(writer, readers)
    return {
        "world_size": options.world_size,
        "message_bytes": options.message_bytes,
        "num_cpus": os.cpu_count(),
        "rank_0_reply_us": _percentiles(one_us),
        "all_replies_us": _percentiles(all_us),
        "after_idle_us": round(first_us[0], 1),
        "idle_cpu_percent_per_shard": [
            round(100 * (after - before) / options.idle_s, 3)
            for before, after in zip(busy_before, busy_after, strict=True)
        ],
    }


def _round_trips(
    writer: RingWriter, readers: Sequence[RingReader], message: bytes, rounds: int
) -> list[float]:
    times_us = []
    for _ in range(rounds):
        start = time.perf_counter()
        writer.send(message, _TIMEOUT_S)
        for reader in readers:
            reader.receive(_TIMEOUT_S)
        times_us.append((time.perf_counter() - start) * 1e6)
    return times_us


def _cpu_seconds(writer: RingWriter, readers: Sequence[RingReader]) -> list[float]:
    writer.send(_REPORT_CPU, _TIMEOUT_S)
    return [float(reader.receive(_TIMEOUT_S)) for reader in readers]


def _percentiles(times_us: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times_us, n=100)
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1)}


def _echo(steps: RingHandle, replies: RingHandle, rank: int) -> None:
    reader = ShmRing.attach(steps).reader(rank)
    writer = ShmRing.attach(replies).writer()
    while True:
        try:
            message = reader.receive(_TIMEOUT_S)
        except RingClosedError:
            return
        kind = message[:1]
        if kind == _REPORT_CPU:
            writer.send(str(time.process_time()).encode(), _TIMEOUT_S)
        elif kind == _ALL_REPLY or rank == 0:
            writer.send(message, _TIMEOUT_S)


if __name__ == "__main__":
    main()
