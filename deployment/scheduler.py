"""Which rows the next step computes: continuous batching, chunked prefill, priorities, preemption by recompute.

A step has so many rows. They go, in this order, to

    interactive requests:  running ones that decode, running ones in their prompt, waiting ones
    batch requests:        running ones that decode, running ones in their prompt, waiting ones

so that batch work fills what interactive work leaves. Beside interactive requests that decode, `PrefillChunks` says
how many rows prompts get altogether, unless chunks are fixed; otherwise they get all that are left. A running request
without rows in a step keeps its memory and goes on later. Within a class requests are served in the order of their
arrival.

- Admission takes from the front of a queue, when a slot is free, blocks for all known tokens are free, and rows are
  left. So a prefill that has begun never waits for memory. Batch requests are admitted only when no interactive one
  waits.
- An interactive request that lacks a slot or blocks takes those of the newest running batch requests, if that is
  enough. A request that decodes into a new block when none is free takes one from the last running request, batch
  before interactive, newest first. Either way the loser goes back to its place in its queue, keeps its tokens, and
  later computes them again as a prompt.
- A batch request that has got no token for `max_batch_wait_s` becomes interactive for good, behind all that are.
- So the first of the interactive requests always advances, and every request becomes the first in the end.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable

from actors.messages import (
    AddRequest,
    RequestError,
    RequestOutput,
    SampledToken,
    ScheduledSequence,
    SequenceOutput,
    StepInput,
    StepOutput,
)
from deployment.kv_blocks import KVBlocks, StateSlots, num_blocks_for
from deployment.limits import SchedulerLimits
from deployment.prefill_chunks import PrefillChunks
from deployment.request import Request, RequestStatus

RETRY_AFTER_S = 1.0
"""What a refused caller is told to wait: many steps, and still short for a person."""

_rank = operator.attrgetter("rank")
_is_batch = operator.attrgetter("is_batch")


class _Draft:
    """A step while it is put together."""

    __slots__ = (
        "num_decodes",
        "num_prefill_rows",
        "num_prefill_rows_left",
        "num_rows_left",
        "requests",
        "sequences",
    )

    def __init__(self, num_rows: int) -> None:
        self.num_rows_left = num_rows
        self.num_prefill_rows_left = num_rows
        """Of those; they may be fewer."""
        self.num_decodes = 0
        self.num_prefill_rows = 0
        self.requests: list[Request] = []
        self.sequences: list[ScheduledSequence] = []


class Scheduler:
    """Owns the requests, the KV blocks and the state slots.

    Protocol: `schedule` builds a step, `update` takes its output; between the two the step is in flight.
    `add` and `abort` may come at any time. What the step in flight names is released by its `update`, not
    earlier. Times are seconds since any fixed moment and never go back; the scheduler reads no clock.

    Invariants:
    - `running`, the interactive queue and the batch queue are each in the order of `Request.rank`, and together
      hold every open request once;
    - running requests, and no others, own one slot each and the blocks of their computed tokens;
    - the step in flight has rows of running requests, at most as many as a step may have, in slots and blocks
      that they own;
    - nothing is aborting that the step in flight does not name.
    """

    def __init__(self, limits: SchedulerLimits, *, eos_token_id: int) -> None:
        self.limits = limits
        self.num_generated_tokens = 0
        self.num_prompt_tokens = 0
        self.num_preemptions = 0
        self._eos_token_id = eos_token_id
        self._kv = KVBlocks(limits.num_blocks, limits.block_size)
        self._slots = StateSlots(limits.max_num_seqs)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()  # interactive
        self._waiting_batch: deque[Request] = deque()
        self._running: list[Request] = []
        self._chunks = (
            None
            if limits.max_itl_factor is None
            else PrefillChunks(
                max_itl_factor=limits.max_itl_factor,
                min_rows=limits.min_chunk_tokens,
                max_rows=limits.max_num_batched_tokens,
            )
        )
        self._in_flight: StepInput | None = None
        self._in_flight_kind = (0, 0)  # decodes and prompt rows of the step
        self._in_flight_requests: list[Request] = []  # one for each sequence of the step
        self._step_ids = itertools.count(1)
        self._numbers = itertools.count()
        self._now_s = -math.inf  # of the last step
        self._next_aging_s = -math.inf  # no batch request has waited too long before

    @property
    def has_requests(self) -> bool:
        """Whether a step would have rows."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that own a slot and blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted."""
        return len(self._waiting) + len(self._waiting_batch)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request owns."""
        return self._kv.num_free

    def add(self, message: AddRequest, now_s: float) -> RequestError | None:
        """Queue a request, under an id that no open request has.

        Args:
            message: the request.
            now_s: when it came; only batch requests need that, which grow old.

        Returns: None, or why it is refused.
        """
        assert message.request_id not in self._requests, f"request {message.request_id!r} is open already"
        error = self._find_invalid(message) or self._find_overload(message)
        if error is None:
            request = Request(
                message,
                eos_token_id=self._eos_token_id,
                max_model_len=self.limits.max_model_len,
                number=next(self._numbers),
                arrival_s=now_s,
            )
            self._requests[request.request_id] = request
            self._queue_of(request).append(request)
        return error

    def abort(self, request_id: str) -> None:
        """End a request without another output; an id that is not open is ignored."""
        request = self._requests.get(request_id)
        if request is None or request.status is RequestStatus.ABORTING:
            return
        if request.status is RequestStatus.WAITING:
            self._queue_of(request).remove(request)
            self._finish(request)
        elif request not in self._in_flight_requests:
            self._running.remove(request)
            self._finish(request)
        else:
            request.move_to(RequestStatus.ABORTING)

    def schedule(self, now_s: float) -> StepInput | None:
        """Build the next step; None if there is no request.

        Args:
            now_s: the time, for batch requests that grow old.
        """
        assert self._in_flight is None, f"step {self._in_flight.step_id} is in flight"
        self._now_s = now_s
        self._make_old_ones_interactive()
        self._make_room()
        draft = _Draft(self.limits.max_num_batched_tokens)
        interactive = self._running[: self._num_interactive()]
        in_prompt = self._draft_decodes(draft, interactive)
        if draft.num_decodes:
            self._limit_prefill(draft)
        self._draft_prefills(draft, in_prompt)
        self._admit(draft, self._waiting)
        in_prompt = self._draft_decodes(draft, self._running[self._num_interactive() :])
        self._draft_prefills(draft, in_prompt)
        if not self._waiting:
            self._admit(draft, self._waiting_batch)
        if draft.sequences:
            self._in_flight = StepInput(next(self._step_ids), draft.sequences)
            self._in_flight_requests = draft.requests
            self._in_flight_kind = draft.num_decodes, draft.num_prefill_rows
        return self._in_flight

    def update(self, step_output: StepOutput, step_s: float) -> list[RequestOutput]:
        """Take the output of the step in flight.

        Args:
            step_output: of the shards.
            step_s: what the step took; only chunks that are not fixed need that.

        Returns: the news of every request that has any.
        """
        step = self._in_flight
        assert step is not None, f"no step in flight, got the output of step {step_output.step_id}"
        assert step.step_id == step_output.step_id, f"{step.step_id=} {step_output.step_id=}"
        requests, self._in_flight, self._in_flight_requests = self._in_flight_requests, None, []
        if self._chunks is not None:
            self._chunks.observe(*self._in_flight_kind, step_s)
        num_open = len(self._requests)
        outputs: list[RequestOutput] = []
        for request, sequence, result in zip(requests, step.sequences, step_output.sequences, strict=True):
            output = self._apply(request, sequence, result)
            if output is not None:
                outputs.append(output)
        if len(self._requests) < num_open:
            self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
        return outputs

    def check_integrity(self) -> None:
        """Assert the invariants, also of everything owned."""
        self._kv.check_integrity()
        self._slots.check_integrity()
        for request in self._requests.values():
            request.check_integrity()
        waiting = [*self._waiting, *self._waiting_batch]
        requests = [*self._running, *waiting]
        assert len(requests) == len(self._requests), f"{requests=} {self._requests=}"
        assert {request.request_id: request for request in requests} == self._requests, f"{self._requests=}"
        assert all(request.status is RequestStatus.WAITING for request in waiting), f"{waiting=}"
        assert not any(request.is_batch for request in self._waiting), f"{self._waiting=}"
        assert all(request.is_batch for request in self._waiting_batch), f"{self._waiting_batch=}"
        for queue in (self._running, self._waiting, self._waiting_batch):
            assert list(queue) == sorted(queue, key=_rank), f"{queue=}"
        self._check_ownership()
        self._check_in_flight()

    def _check_ownership(self) -> None:
        running_ids = {request.request_id for request in self._running}
        assert self._slots.owners == running_ids, f"{self._slots.owners=} {running_ids=}"
        assert self._kv.owners == running_ids, f"{self._kv.owners=} {running_ids=}"
        for request in self._running:
            assert self._kv.covers(request.request_id, request.num_computed_tokens), f"{request!r}"

    def _check_in_flight(self) -> None:
        requests = self._in_flight_requests
        sequences = [] if self._in_flight is None else self._in_flight.sequences
        num_rows = sum(len(sequence.token_ids) for sequence in sequences)
        assert num_rows <= self.limits.max_num_batched_tokens, f"{num_rows=}"
        assert len({request.request_id for request in requests}) == len(requests), f"{requests=}"
        for request in self._running:
            is_aborting = request.status is RequestStatus.ABORTING and request in requests
            assert is_aborting or request.status is RequestStatus.RUNNING, f"{request!r}"
        for request, sequence in zip(requests, sequences, strict=True):
            assert request in self._running, f"{request!r}"
            end = sequence.start_position + len(sequence.token_ids)
            assert sequence.state_slot == self._slots.slot(request.request_id), f"{request!r} {sequence=}"
            assert sequence.block_table == self._kv.block_table(request.request_id), (
                f"{request!r} {sequence=}"
            )
            assert self._kv.covers(request.request_id, end), f"{request!r} {sequence=}"

    def _find_invalid(self, message: AddRequest) -> RequestError | None:
        """What keeps the request from ever being served here."""
        num_prompt_tokens, max_model_len = len(message.prompt_token_ids), self.limits.max_model_len
        if num_prompt_tokens == 0:
            return RequestError("invalid", "The prompt is empty; it needs at least one token.")
        if num_prompt_tokens + 1 > max_model_len:
            return RequestError(
                "invalid",
                f"The prompt has {num_prompt_tokens} tokens, but the context holds {max_model_len}, prompt "
                f"and output together; shorten the prompt to at most {max_model_len - 1} tokens.",
            )
        if message.max_tokens < 1:
            return RequestError("invalid", f"max_tokens is {message.max_tokens}; it must be at least 1.")
        return None

    def _find_overload(self, message: AddRequest) -> RequestError | None:
        """What keeps one more request out now.

        Those that a free slot will take do not count as waiting. For an interactive request the batch ones do not
        count at all: it goes before those that wait, and gets the slots of those that run.
        """
        num_waiting, num_slots = self.num_waiting, self._slots.num_free
        if message.priority == "interactive":
            num_waiting = len(self._waiting)
            num_slots += len(self._running) - self._num_interactive()
        if num_waiting < num_slots + self.limits.max_waiting_requests:
            return None
        return RequestError(
            "overloaded",
            f"{self.num_running} requests are running and {self.num_waiting} waiting, which is the limit; "
            f"try again later.",
            RETRY_AFTER_S,
        )

    def _queue_of(self, request: Request) -> deque[Request]:
        """Where the request waits, if it waits."""
        return self._waiting_batch if request.is_batch else self._waiting

    def _num_interactive(self) -> int:
        """Running requests that are interactive; they come first."""
        return bisect.bisect_left(self._running, True, key=_is_batch)

    def _make_old_ones_interactive(self) -> None:
        """Let no batch request go without a token for too long."""
        if self._now_s < self._next_aging_s:
            return
        wait_s = self.limits.max_batch_wait_s
        batch = sorted((request for request in self._requests.values() if request.is_batch), key=_rank)
        for request in batch:
            if request.last_token_s + wait_s <= self._now_s:
                is_waiting = request.status is RequestStatus.WAITING
                if is_waiting:
                    self._waiting_batch.remove(request)
                request.make_interactive(next(self._numbers))
                if is_waiting:
                    self._waiting.append(request)
        self._running.sort(key=_rank)
        times_s = (request.last_token_s for request in batch if request.is_batch)
        self._next_aging_s = min(times_s, default=self._now_s) + wait_s

    def _make_room(self) -> None:
        """Give every running request the blocks of its tokens; if they run out, preempt the last."""
        num_covered = 0
        while num_covered < len(self._running):
            request = self._running[num_covered]
            if self._kv.cover(request.request_id, request.num_tokens):
                num_covered += 1
            else:
                self._preempt(self._running.pop())

    def _preempt(self, request: Request) -> None:
        request.move_to(RequestStatus.WAITING)
        self._release(request)
        bisect.insort(self._queue_of(request), request, key=_rank)
        self.num_preemptions += 1

    def _admit(self, draft: _Draft, queue: deque[Request]) -> None:
        """Admit from the front of `queue` while rows, slots and blocks allow."""
        while queue and draft.num_prefill_rows_left and draft.num_rows_left and self._make_way(queue[0]):
            request = queue.popleft()
            self._kv.cover(request.request_id, request.num_tokens)
            self._slots.acquire(request.request_id)
            request.move_to(RequestStatus.RUNNING)
            bisect.insort(self._running, request, key=_rank)
            self._draft_prefills(draft, [request])

    def _make_way(self, request: Request) -> bool:
        """See to a slot and blocks for a waiting request, of running batch requests if it is interactive.

        A block for each running request that it does not go before stays free, lest the next steps preempt what is
        admitted here.

        Returns: whether it can be admitted now; if not, nothing has changed.
        """
        num_before = len(self._running) if request.is_batch else self._num_interactive()
        num_blocks = num_blocks_for(request.num_tokens, self.limits.block_size) + num_before
        num_free, num_slots, num_left = self._kv.num_free, self._slots.num_free, len(self._running)
        while num_slots == 0 or num_free < num_blocks:
            if num_left == num_before:
                return False
            num_left -= 1
            num_slots += 1
            num_free += self._kv.num_owned(self._running[num_left].request_id)
        while len(self._running) > num_left:
            self._preempt(self._running.pop())
        return True

    def _limit_prefill(self, draft: _Draft) -> None:
        """Leave prompts as many rows as the interactive requests that decode can bear."""
        if self._chunks is not None:
            num_decodes = sum(request.is_decoding for request in self._running)
            num_rows = self._chunks.num_rows(min(num_decodes, self.limits.max_num_batched_tokens))
            draft.num_prefill_rows_left = min(num_rows, draft.num_prefill_rows_left)

    def _draft_decodes(self, draft: _Draft, requests: Iterable[Request]) -> list[Request]:
        """Give running requests that decode their row while rows are left. Returns: those in their prompt."""
        in_prompt = []
        for request in requests:
            if not request.is_decoding:
                in_prompt.append(request)
            elif draft.num_rows_left:
                self._draft_rows(draft, request, 1)
                draft.num_decodes += 1
        return in_prompt

    def _draft_prefills(self, draft: _Draft, requests: Iterable[Request]) -> None:
        """Give requests their next chunks while rows are left."""
        for request in requests:
            num_missing = request.num_tokens - request.num_computed_tokens
            num_rows = min(num_missing, draft.num_prefill_rows_left, draft.num_rows_left)
            if num_rows:
                self._draft_rows(draft, request, num_rows)
                draft.num_prefill_rows += num_rows
                draft.num_prefill_rows_left -= num_rows

    def _draft_rows(self, draft: _Draft, request: Request, num_rows: int) -> None:
        """Put the request's next rows into the step; the last of its tokens brings another one."""
        request_id, token_ids = request.request_id, request.token_ids
        start = request.num_computed_tokens
        end = start + num_rows
        sequence = ScheduledSequence(
            state_slot=self._slots.slot(request_id),
            start_position=start,
            token_ids=token_ids[start:end],
            history=token_ids[max(0, start - self.limits.history_len) : start],
            block_table=self._kv.block_table(request_id),
            sampling=request.sampling if end == len(token_ids) else None,
        )
        draft.requests.append(request)
        draft.sequences.append(sequence)
        draft.num_rows_left -= num_rows

    def _apply(
        self, request: Request, sequence: ScheduledSequence, result: SequenceOutput
    ) -> RequestOutput | None:
        """Take what the step in flight gave one request."""
        if request.status is RequestStatus.ABORTING:
            self._finish(request)
            return None
        if result.error is not None:
            self._finish(request)
            error = RequestError("internal", result.error)
            return RequestOutput(request.request_id, finish_reason="error", error=error)
        request.num_computed_tokens += len(sequence.token_ids)
        if sequence.start_position < request.num_prompt_tokens:
            end = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.num_prompt_tokens += end - sequence.start_position
        return None if sequence.sampling is None else self._take_token(request, result.token)

    def _take_token(self, request: Request, token: SampledToken | None) -> RequestOutput:
        assert token is not None, f"{request!r} was to get a token"
        self.num_generated_tokens += 1
        request.last_token_s = self._now_s
        reason = request.append(token.token_id)
        if reason is None:
            return RequestOutput(request.request_id, [token])
        self._finish(request)
        stop_token_id = token.token_id if reason == "stop" else None
        return RequestOutput(request.request_id, [token], finish_reason=reason, stop_token_id=stop_token_id)

    def _finish(self, request: Request) -> None:
        """Forget an open request; the caller takes it out of its queue."""
        if request.status is not RequestStatus.WAITING:
            self._release(request)
        request.move_to(RequestStatus.FINISHED)
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self._kv.release(request.request_id)
        self._slots.release(request.request_id)
