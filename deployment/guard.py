"""Guard: who may ask, and how often."""

from __future__ import annotations

from collections.abc import Callable

from deployment.api_keys import ApiKeys
from deployment.errors import AuthenticationError, RateLimitError
from deployment.rate_limit import TokenBucket


class Guard:
    """Admits requests by their API key.

    Args:
        keys: those that are accepted; None: nobody needs one.
        max_requests_per_minute: of each key; None: any number.
        now: seconds of a monotonic clock.
    """

    def __init__(
        self, keys: ApiKeys | None, max_requests_per_minute: int | None, now: Callable[[], float]
    ) -> None:
        self._keys = keys
        self._limit = max_requests_per_minute
        self._now = now
        self._buckets: dict[int, TokenBucket] = {}
        """By index of the key."""

    @property
    def needs_key(self) -> bool:
        """Whether a request without a key is refused."""
        return self._keys is not None

    def admit(self, authorization: str | None) -> None:
        """Let a request pass.

        Args:
            authorization: its header of this name.

        Raises: AuthenticationError, RateLimitError.
        """
        if self._keys is None:
            return
        if authorization is None:
            raise AuthenticationError("This server needs an API key: send 'Authorization: Bearer KEY'.")
        scheme, _, key = authorization.partition(" ")
        index = self._keys.index(key.strip()) if scheme.lower() == "bearer" else None
        if index is None:
            raise AuthenticationError("The API key is wrong, or is not sent as 'Authorization: Bearer KEY'.")
        self._count(index)

    def _count(self, index: int) -> None:
        if self._limit is None:
            return
        now_s = self._now()
        bucket = self._buckets.setdefault(index, TokenBucket(self._limit, now_s))
        wait_s = bucket.take(now_s)
        if wait_s is not None:
            raise RateLimitError(
                f"This API key may send {self._limit} requests a minute; come back in {wait_s:.1f} s.",
                retry_after_s=wait_s,
            )
