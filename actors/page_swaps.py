"""PageSwapper: hot pages change places with cold ones between two steps, while requests run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.messages import AdaptationNews
from actors.staging import Copier, Copy
from placement.adaptation import AdaptationPolicy, Swap

logger = logging.getLogger(__name__)

STEPS_PER_LOOK: Final = 16
"""Steps between two looks at what was routed; each costs a core about a millisecond."""
MAX_SWAPS: Final = 16
"""At once. The next ones wait until these have ended."""


class HotPages(Protocol):
    """What holds the hot pages of a rank: `actors.expert_tiers.TieredExpertSource`."""

    def page_in_pool(self, page: tuple[int, int]) -> Tensor | None:
        """A sound page in the host pool, `[page_bytes]` uint8; None if it is not there."""

    def make_cold(self, page: tuple[int, int]) -> Tensor:
        """Read a hot page in the pool from `publish` on. Returns: the slot that it leaves, `[page_bytes]` uint8."""

    def make_hot(self, page: tuple[int, int], slot: Tensor) -> None:
        """Read a page in a slot from `publish` on, which holds its bytes."""

    def publish(self) -> None:
        """Let the next step know. No step is computed between a change and this."""


class RoutedCounts:
    """Reads counters of the device some steps late, so that nothing waits for them.

    Args:
        read: rows by layer and local expert since start, flat: `[num_pages]` int64 on the device.
        count_tokens: rows that went through the model since start.
    """

    def __init__(self, read: Callable[[], Tensor], count_tokens: Callable[[], int]) -> None:
        self._read = read
        self._count_tokens = count_tokens
        self._seen: NDArray[np.int64] | None = None
        self._seen_tokens = 0
        self._under_way: tuple[Tensor, int, torch.cuda.Event | None] | None = None

    def ask(self) -> None:
        """Begin to read, unless that has begun."""
        if self._under_way is not None:
            return
        counts = self._read()
        if counts.device.type == "cpu":
            self._under_way = (counts.clone(), self._count_tokens(), None)
            return
        host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
        host.copy_(counts, non_blocking=True)
        event = torch.cuda.current_stream(counts.device).record_event()
        self._under_way = (host, self._count_tokens(), event)

    def take(self) -> tuple[NDArray[np.int64], int] | None:
        """Rows by page and tokens since the last call that gave some; None if they are not there yet."""
        if self._under_way is None:
            return None
        counts, num_tokens, event = self._under_way
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return None
        self._under_way = None
        total: NDArray[np.int64] = counts.numpy()
        new = total if self._seen is None else total - self._seen
        new_tokens = num_tokens - self._seen_tokens
        self._seen, self._seen_tokens = total, num_tokens
        return new, new_tokens


@dataclass(frozen=True, slots=True)
class _UnderWay:
    swap: Swap
    slot: Tensor
    copy: Copy


class PageSwapper:
    """Carries out what the policy of one rank proposes.

    The evicted page is read in the pool at once; its slot is then filled beside the computation, and the admitted page
    is read there from the first step on that begins after the copy has ended. Until then it stays cold. So nothing
    ever waits for a swap, and whatever a step reads holds the page's bytes.

    Protocol: `between_steps` after each step, on the thread that computes. `news` and `set_paused` at any time, from
    any thread.

    Args:
        pages: the hot pages.
        policy: decides.
        counts: what was routed.
        copier: of this object alone; it ends with it.
        now: seconds, from any origin.
    """

    def __init__(
        self,
        pages: HotPages,
        policy: AdaptationPolicy,
        counts: RoutedCounts,
        copier: Copier,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pages = pages
        self._policy = policy
        self._counts = counts
        self._copier = copier
        self._now = now
        self._last_look = now()
        self._num_steps = 0
        self._under_way: list[_UnderWay] = []

    def between_steps(self) -> None:
        """End swaps whose copies have ended, and now and then start some."""
        self._finish()
        self._look()
        self._pages.publish()

    def _look(self) -> None:
        """Now and then, take note of what was routed and start what is worth it."""
        self._num_steps += 1
        if self._num_steps % STEPS_PER_LOOK == 0:
            self._counts.ask()
        new = self._counts.take()
        if new is None:
            return
        self._policy.observe(*new)
        now = self._now()
        elapsed_s, self._last_look = now - self._last_look, now
        # Not while a page that the policy counts as hot is still on its way: it could be the next to go.
        self._start(self._policy.propose(elapsed_s, 0 if self._under_way else MAX_SWAPS))

    def news(self) -> AdaptationNews:
        """What the policy has seen and done."""
        state = self._policy.state()
        return AdaptationNews(
            is_paused=state.is_paused,
            num_tokens=state.num_tokens,
            num_swaps=state.num_swaps,
            num_swaps_under_way=len(self._under_way),
            swapped_bytes=state.swapped_bytes,
            hit_rate=state.hit_rate,
        )

    def set_paused(self, is_paused: bool) -> None:
        """Start no swap, or start some again; counting goes on."""
        if is_paused:
            self._policy.pause()
        else:
            self._policy.resume()

    def close(self) -> None:
        """Wait for the copies; safe to call twice."""
        self._copier.close()

    def _start(self, swaps: tuple[Swap, ...]) -> None:
        for swap in swaps:
            source, evicted = self._pages.page_in_pool(swap.admit), self._pages.page_in_pool(swap.evict)
            if source is None or evicted is None:
                self._policy.undo(swap)
                continue
            slot = self._pages.make_cold(swap.evict)
            [copy] = self._copier.start([lambda source=source: source], [slot])  # type: ignore[misc]
            self._under_way.append(_UnderWay(swap, slot, copy))

    def _finish(self) -> None:
        left = []
        for swap in self._under_way:
            if swap.copy.is_done():
                swap.copy.join()
                self._pages.make_hot(swap.swap.admit, swap.slot)
            else:
                left.append(swap)
        logger.debug("%d pages became hot", len(self._under_way) - len(left))
        self._under_way = left
