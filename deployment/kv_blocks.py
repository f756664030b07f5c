"""Who owns which KV block and which state slot. Only ids: the memory itself is on the shards."""

from __future__ import annotations

from array import array
from collections.abc import Set

NULL_BLOCK = 0
"""Never handed out: padding rows and masked entries may read it, so its content stays finite."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens of one request."""
    return -(-num_tokens // block_size)


class KVBlocks:
    """The pool of KV blocks and each request's block table.

    Position `p` of a request is in block `p // block_size` of its table.

    Invariants:
    - every block but the null block is either free or in exactly one table, once;
    - a request without blocks has no table.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: the block freed last is used next
        self._tables: dict[str, array[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no request owns."""
        return len(self._free)

    @property
    def owners(self) -> Set[str]:
        """Requests that own blocks."""
        return self._tables.keys()

    def covers(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request's blocks hold `num_tokens` tokens."""
        return num_tokens <= len(self._tables[request_id]) * self._block_size

    def num_owned(self, request_id: str) -> int:
        """Blocks that the request owns."""
        return len(self._tables[request_id])

    def block_table(self, request_id: str) -> bytes:
        """The request's blocks in the order of its positions, int32 each."""
        return self._tables[request_id].tobytes()

    def cover(self, request_id: str, num_tokens: int) -> bool:
        """Extend the request's table to hold `num_tokens` tokens; False, and no change, if blocks lack."""
        table = self._tables.get(request_id, array("i"))
        if num_tokens <= len(table) * self._block_size:
            return True
        num_missing = num_blocks_for(num_tokens, self._block_size) - len(table)
        if num_missing > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(num_missing))
        self._tables[request_id] = table
        return True

    def release(self, request_id: str) -> None:
        """Free the request's blocks. The caller makes sure that no step in flight names them."""
        self._free.extend(reversed(self._tables.pop(request_id)))

    def check_integrity(self) -> None:
        """Assert the invariants."""
        owned = [block for table in self._tables.values() for block in table]
        assert sorted(owned + self._free) == list(range(1, self._num_blocks)), (
            f"{self._free=} {self._tables=}"
        )
        assert all(self._tables.values()), f"an empty table in {self._tables}"


class StateSlots:
    """The window-ring slots `0 .. num_slots - 1` and their owners.

    Invariant: every slot is either free or owned by exactly one request, which owns no other.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        """Slots that no request owns."""
        return len(self._free)

    @property
    def owners(self) -> Set[str]:
        """Requests that own a slot."""
        return self._slots.keys()

    def slot(self, request_id: str) -> int:
        """The slot that the request owns."""
        return self._slots[request_id]

    def acquire(self, request_id: str) -> None:
        """Give a free slot to a request that has none."""
        assert request_id not in self._slots, f"{request_id} already owns slot {self._slots[request_id]}"
        assert self._free, "no free slot"
        self._slots[request_id] = self._free.pop()

    def release(self, request_id: str) -> None:
        """Free the request's slot. The caller makes sure that no step in flight names it."""
        self._free.append(self._slots.pop(request_id))

    def check_integrity(self) -> None:
        """Assert the invariant."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self._num_slots)), (
            f"{self._free=} {self._slots=}"
        )
