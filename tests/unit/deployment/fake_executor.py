"""An executor without a model: its next token depends on all that a real model would read from its caches."""

from array import array
from collections import defaultdict
from collections.abc import Sequence

from actors.messages import SampledToken, ScheduledSequence, SequenceOutput, StepInput, StepOutput
from deployment.errors import ShardsLostError

WINDOW = 4
"""Positions that a state slot keeps."""
VOCAB_SIZE = 13
"""Small, so that stop tokens come up."""

Ring = dict[int, tuple[int, int]]
"""Position and token of each ring entry."""


def next_token(seed: int, token_ids: Sequence[int]) -> int:
    """What `FakeExecutor` samples after `token_ids` if tables, slots, positions and history are right."""
    window = list(enumerate(token_ids))[-WINDOW:]
    return _mix(seed, token_ids, window, token_ids[-WINDOW:])


def _mix(seed: int, kv: Sequence[int], window: Sequence[tuple[int, int]], ngram: Sequence[int]) -> int:
    return hash((seed, tuple(kv), tuple(window), tuple(ngram))) % VOCAB_SIZE


class FakeExecutor:
    """Keeps the contents of blocks and slots, as shards do, and never clears what was written.

    A step first writes the rows of all sequences, then reads: sequences that share a block or a slot spoil
    each other's tokens, as a wrong table, slot, start position or history does.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.steps: list[StepInput] = []
        self.failing_slots: set[int] = set()
        """Sequences in these slots get an error in the next step."""
        self.is_lost = False
        self.is_shut_down = False
        self._blocks: dict[int, dict[int, int]] = defaultdict(dict)
        self._rings: dict[int, Ring] = defaultdict(dict)

    def execute(self, step: StepInput) -> StepOutput:
        if self.is_lost:
            raise ShardsLostError("rank 1 exited")
        self.steps.append(step)
        for sequence in step.sequences:
            self._write(sequence)
        results = [self._read(sequence) for sequence in step.sequences]
        self.failing_slots.clear()
        return StepOutput(step.step_id, results)

    def check(self) -> None:
        if self.is_lost:
            raise ShardsLostError("rank 1 exited")

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _write(self, sequence: ScheduledSequence) -> None:
        end = sequence.start_position + len(sequence.token_ids)
        assert sequence.token_ids, "a sequence without rows"
        block_table = array("i", sequence.block_table)
        assert len(block_table) * self.block_size >= end, f"{sequence}"
        assert len(sequence.history) == min(WINDOW - 1, sequence.start_position), f"{sequence}"
        assert 0 not in block_table, f"the null block in {block_table}"
        ring = self._rings[sequence.state_slot]
        for position, token in enumerate(sequence.token_ids, start=sequence.start_position):
            block, offset = divmod(position, self.block_size)
            self._blocks[block_table[block]][offset] = token
            ring[position % WINDOW] = (position, token)

    def _read(self, sequence: ScheduledSequence) -> SequenceOutput:
        if sequence.state_slot in self.failing_slots:
            return SequenceOutput(error="non-finite logits")
        if sequence.sampling is None:
            return SequenceOutput()
        end = sequence.start_position + len(sequence.token_ids)
        places = (divmod(position, self.block_size) for position in range(end))
        block_table = array("i", sequence.block_table)
        kv = [self._blocks[block_table[block]].get(offset, -1) for block, offset in places]
        ring = self._rings[sequence.state_slot]
        window = [ring.get(position % WINDOW, (-1, -1)) for position in range(max(0, end - WINDOW), end)]
        ngram = [*sequence.history, *sequence.token_ids][-WINDOW:]
        return SequenceOutput(SampledToken(_mix(sequence.sampling.seed, kv, window, ngram)))
