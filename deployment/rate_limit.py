"""TokenBucket: at most so many requests a minute, told how long to wait otherwise."""

from __future__ import annotations


class TokenBucket:
    """Holds up to a minute's requests and is refilled evenly.

    Invariant: `0 <= tokens <= limit`; so any window of `w` seconds admits at most `limit + limit * w / 60` requests.

    Args:
        limit: requests per minute.
        now_s: of a monotonic clock; the bucket is full then.
    """

    def __init__(self, limit: int, now_s: float) -> None:
        self._limit = limit
        self._tokens = float(limit)
        self._filled_at_s = now_s

    def take(self, now_s: float) -> float | None:
        """Take a request out.

        Returns: None if it may be served, else how many seconds later it might have been.
        """
        elapsed_s = max(0.0, now_s - self._filled_at_s)
        self._filled_at_s += elapsed_s
        self._tokens = min(float(self._limit), self._tokens + elapsed_s * self._limit / 60)
        if self._tokens < 1:
            return (1 - self._tokens) * 60 / self._limit
        self._tokens -= 1
        return None
