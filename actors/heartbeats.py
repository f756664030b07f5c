"""Heartbeats: a counter per rank in shared memory, which tells a rank that is slow from one that is stuck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from actors.messages import SharedSegment
from actors.shared_memory import SharedMapping

_WORD: Final = 8
_LINE: Final = 8
"""Words between two counters: a cache line."""


class Heartbeats:
    """The counters of all ranks.

    Protocol: the engine core creates them and reads; each shard beats its own, at least once in
    BEAT_INTERVAL_S while it waits for a step, and when one arrives. A shard that computes does not beat.
    """

    def __init__(self, mapping: SharedMapping) -> None:
        self.segment = mapping.segment
        self._mapping = mapping
        self._words = memoryview(mapping.memory).cast("Q")

    @classmethod
    def create(cls, world_size: int) -> Heartbeats:
        """Counters at zero."""
        return cls(SharedMapping.create("hotset-heartbeats", world_size * _LINE * _WORD))

    @classmethod
    def attach(cls, segment: SharedSegment) -> Heartbeats:
        """Those that another process created."""
        return cls(SharedMapping.attach(segment, writable=True))

    def beat(self, rank: int) -> None:
        """Rank `rank` is alive; called by itself only."""
        self._words[rank * _LINE] += 1

    def counts(self) -> list[int]:
        """Beats of every rank so far."""
        return list(self._words[::_LINE])

    def close(self) -> None:
        """End new attachments; safe to call twice."""
        self._mapping.close()


BEAT_INTERVAL_S: Final = 1.0
"""Longest time between two beats of a rank that waits for a step."""


class HeartbeatWatch:
    """Finds ranks that should beat and do not.

    Args:
        timeout_s: silence of an idle rank after which it counts as stuck.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: list[_Beat] = []

    def stuck_ranks(self, counts: Sequence[int], *, is_idle: bool, now: float) -> list[int]:
        """Look again.

        Args:
            counts: of every rank.
            is_idle: no step is under way, so every rank should beat.
            now: monotonic seconds.
        """
        if not self._last or not is_idle:
            self._last = [_Beat(count, now) for count in counts]
        for beat, count in zip(self._last, counts, strict=True):
            if count != beat.count:
                beat.count, beat.seen_at = count, now
        return [rank for rank, beat in enumerate(self._last) if now - beat.seen_at > self._timeout_s]


@dataclass(slots=True)
class _Beat:
    count: int
    seen_at: float
