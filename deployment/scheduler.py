"""Which rows the next step computes: continuous batching, chunked prefill, preemption by recompute.

Every running request has rows in every step: one if it decodes, as many as the budget leaves if its prompt is
not computed yet. Requests are served in the order of their arrival:

    oldest  |<-- running ------------------->|<-- waiting ---------------->|  newest
             decode ... decode  decode/prefill preempted ... preempted  new

- Admission takes from the front of `waiting`, when a slot is free, blocks for all known tokens are free, and
  the budget is not used up by what runs. So only the newest running request can be in the middle of its
  prompt, and a prefill that has begun never waits for memory.
- A request that decodes into a new block when none is free takes one from the newest running request, which
  goes back to the front of `waiting`, keeps its tokens, and later computes them again as a prompt.
- So the oldest request always advances, and every request becomes the oldest in the end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from actors.messages import (
    AddRequest,
    RequestError,
    RequestOutput,
    SampledToken,
    SamplingParams,
    ScheduledSequence,
    SequenceOutput,
    StepInput,
    StepOutput,
)
from deployment.kv_blocks import KVBlocks, StateSlots, num_blocks_for
from deployment.limits import SchedulerLimits
from deployment.request import Request, RequestStatus

RETRY_AFTER_S = 1.0
"""What a refused caller is told to wait: many steps, and still short for a person."""


class Scheduler:
    """Owns the requests, the KV blocks and the state slots.

    Protocol: `schedule` builds a step, `update` takes its output; between the two the step is in flight.
    `add` and `abort` may come at any time. What the step in flight names is released by its `update`, not
    earlier.

    Invariants:
    - `running` followed by `waiting` is the order of arrival, and holds every open request once;
    - running requests, and no others, own one slot each and the blocks of their computed tokens;
    - no more requests run than a step has rows;
    - the step in flight has rows of exactly the running requests, in order, in slots and blocks they own;
    - with no step in flight nothing is aborting, and only the newest running request has more than one token
      to compute.
    """

    def __init__(self, limits: SchedulerLimits, *, eos_token_id: int) -> None:
        self.limits = limits
        self.num_generated_tokens = 0
        self.num_prompt_tokens = 0
        self.num_preemptions = 0
        self._eos_token_id = eos_token_id
        self._kv = KVBlocks(limits.num_blocks, limits.block_size)
        self._slots = StateSlots(limits.max_num_seqs)
        self._requests: dict[str, Request] = {}  # in the order of arrival
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._in_flight: StepInput | None = None
        self._step_ids = itertools.count(1)

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
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request owns."""
        return self._kv.num_free

    def add(self, message: AddRequest) -> RequestError | None:
        """Queue a request, under an id that no open request has.

        Returns: None, or why it is refused.
        """
        assert message.request_id not in self._requests, f"request {message.request_id!r} is open already"
        error = self._find_invalid(message) or self._find_overload()
        if error is None:
            request = Request(
                message, eos_token_id=self._eos_token_id, max_model_len=self.limits.max_model_len
            )
            self._requests[request.request_id] = request
            self._waiting.append(request)
        return error

    def abort(self, request_id: str) -> None:
        """End a request without another output; an id that is not open is ignored."""
        request = self._requests.get(request_id)
        if request is None or request.status is RequestStatus.ABORTING:
            return
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
            self._finish(request)
        elif self._in_flight is None:
            self._running.remove(request)
            self._finish(request)
        else:
            request.move_to(RequestStatus.ABORTING)

    def schedule(self) -> StepInput | None:
        """Build the next step; None if there is no request."""
        assert self._in_flight is None, f"step {self._in_flight.step_id} is in flight"
        self._make_room()
        budget = self.limits.max_num_batched_tokens
        sequences: list[ScheduledSequence] = []
        for request in itertools.chain(tuple(self._running), self._admissions()):
            sequence = self._next_rows(request, budget)
            sequences.append(sequence)
            budget -= len(sequence.token_ids)
            if budget == 0:
                break
        if sequences:
            self._in_flight = StepInput(next(self._step_ids), sequences)
        return self._in_flight

    def update(self, step_output: StepOutput) -> list[RequestOutput]:
        """Take the output of the step in flight.

        Returns: the news of every request that has any.
        """
        step = self._in_flight
        assert step is not None, f"no step in flight, got the output of step {step_output.step_id}"
        assert step.step_id == step_output.step_id, f"{step.step_id=} {step_output.step_id=}"
        self._in_flight = None
        num_open = len(self._requests)
        outputs: list[RequestOutput] = []
        for request, sequence, result in zip(
            self._running, step.sequences, step_output.sequences, strict=True
        ):
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
        assert list(self._requests.values()) == [*self._running, *self._waiting], f"{self._requests=}"
        assert all(request.status is RequestStatus.WAITING for request in self._waiting), f"{self._waiting=}"
        assert len(self._running) <= self.limits.max_num_batched_tokens, f"{self._running=}"
        self._check_ownership()
        if self._in_flight is None:
            self._check_between_steps()
        else:
            self._check_in_flight(self._in_flight)

    def _check_ownership(self) -> None:
        running_ids = {request.request_id for request in self._running}
        assert self._slots.owners == running_ids, f"{self._slots.owners=} {running_ids=}"
        assert self._kv.owners == running_ids, f"{self._kv.owners=} {running_ids=}"
        for request in self._running:
            assert self._kv.covers(request.request_id, request.num_computed_tokens), f"{request!r}"

    def _check_between_steps(self) -> None:
        assert all(request.status is RequestStatus.RUNNING for request in self._running), f"{self._running=}"
        for request in self._running[:-1]:
            assert request.num_computed_tokens == request.num_tokens - 1, f"{request!r} is not the newest"

    def _check_in_flight(self, step: StepInput) -> None:
        for request, sequence in zip(self._running, step.sequences, strict=True):
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

    def _find_overload(self) -> RequestError | None:
        """What keeps one more request out now: those that a free slot will take do not count as waiting."""
        if len(self._waiting) < self._slots.num_free + self.limits.max_waiting_requests:
            return None
        return RequestError(
            "overloaded",
            f"{self.num_running} requests are running and {self.num_waiting} waiting, which is the limit; "
            f"try again later.",
            RETRY_AFTER_S,
        )

    def _make_room(self) -> None:
        """Give every running request the blocks of its tokens; if they run out, preempt the newest."""
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
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _admissions(self) -> Iterator[Request]:
        """Admit from the front of `waiting` while slots and blocks allow.

        A block for each running request stays free, lest the next steps preempt what is admitted here.
        """
        while self._waiting and self._slots.num_free:
            request = self._waiting[0]
            if self._kv.num_free < num_blocks_for(request.num_tokens, self.limits.block_size) + len(
                self._running
            ):
                return
            self._kv.cover(request.request_id, request.num_tokens)
            self._slots.acquire(request.request_id)
            request.move_to(RequestStatus.RUNNING)
            self._running.append(self._waiting.popleft())
            yield request

    def _next_rows(self, request: Request, budget: int) -> ScheduledSequence:
        """The request's next tokens to compute, at most `budget`."""
        start, end = request.num_computed_tokens, request.num_tokens
        sampling: SamplingParams | None = request.sampling
        if end - start > budget:
            end, sampling = start + budget, None
        return ScheduledSequence(
            state_slot=self._slots.slot(request.request_id),
            start_position=start,
            token_ids=request.token_ids[start:end],
            history=request.token_ids[max(0, start - self.limits.history_len) : start],
            block_table=self._kv.block_table(request.request_id),
            sampling=sampling,
        )

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
