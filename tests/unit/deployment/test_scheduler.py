import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.messages import AddRequest, RequestOutput, SamplingParams, StepInput
from deployment.prefill_chunks import MIN_DECODE_SAMPLES
from deployment.scheduler import RETRY_AFTER_S, Scheduler
from tests.unit.deployment.builders import (
    EOS,
    create_request,
    create_requests,
    create_scheduler,
    output_tokens,
    solo_tokens,
)
from tests.unit.deployment.fake_executor import FakeExecutor


def create(**limits: int) -> tuple[Scheduler, FakeExecutor]:
    scheduler = create_scheduler(**limits)
    return scheduler, FakeExecutor(scheduler.limits.block_size)


def add_all(scheduler: Scheduler, requests: list[AddRequest]) -> None:
    assert [scheduler.add(request, 0.0) for request in requests] == [None] * len(requests)


def step(scheduler: Scheduler, executor: FakeExecutor) -> list[RequestOutput]:
    step_input = scheduler.schedule(0.0)
    assert step_input is not None
    scheduler.check_integrity()
    outputs = scheduler.update(executor.execute(step_input), 0.0)
    scheduler.check_integrity()
    return outputs


def drain(scheduler: Scheduler, executor: FakeExecutor, max_steps: int = 1000) -> list[RequestOutput]:
    outputs = []
    for _ in range(max_steps):
        if not scheduler.has_requests:
            assert scheduler.schedule(0.0) is None
            return outputs
        outputs += step(scheduler, executor)
    raise AssertionError(f"not done after {max_steps} steps: {scheduler._requests}")


def news_of(request: AddRequest, outputs: list[RequestOutput]) -> list[RequestOutput]:
    return [output for output in outputs if output.request_id == request.request_id]


def rows(step_input: StepInput | None) -> list[int]:
    assert step_input is not None
    return [len(sequence.token_ids) for sequence in step_input.sequences]


def test_without_requests_there_is_no_step():
    scheduler = create_scheduler()
    assert not scheduler.has_requests
    assert scheduler.schedule(0.0) is None


def test_a_request_is_prefilled_in_one_step_and_then_decoded_token_by_token():
    scheduler, executor = create()
    request = create_request(5, max_tokens=3)
    scheduler.add(request, 0.0)
    outputs = drain(scheduler, executor)
    assert [rows(step_input) for step_input in executor.steps] == [[5], [1], [1]]
    assert output_tokens(outputs, request) == solo_tokens(request)
    assert [output.finish_reason for output in outputs] == [None, None, "length"]


def test_step_ids_ascend_from_one():
    scheduler, executor = create()
    scheduler.add(create_request(max_tokens=3), 0.0)
    drain(scheduler, executor)
    assert [step_input.step_id for step_input in executor.steps] == [1, 2, 3]


def test_a_long_prompt_is_prefilled_in_chunks_and_only_the_last_one_samples():
    scheduler, executor = create(max_num_batched_tokens=4)
    scheduler.add(create_request(10, max_tokens=1), 0.0)
    drain(scheduler, executor)
    sequences = [step_input.sequences[0] for step_input in executor.steps]
    assert [(s.start_position, len(s.token_ids)) for s in sequences] == [(0, 4), (4, 4), (8, 2)]
    assert [s.sampling is not None for s in sequences] == [False, False, True]


def test_a_step_brings_the_three_true_tokens_before_its_rows():
    scheduler, executor = create(max_num_batched_tokens=2)
    scheduler.add(create_request([3, 4, 5, 6, 7], max_tokens=2), 0.0)
    drain(scheduler, executor)
    histories = [step_input.sequences[0].history for step_input in executor.steps]
    assert histories == [[], [3, 4], [4, 5, 6], [5, 6, 7]]


def test_a_chunk_in_the_middle_of_a_prompt_is_no_news():
    scheduler, executor = create(max_num_batched_tokens=4)
    scheduler.add(create_request(10, max_tokens=1), 0.0)
    assert [len(step(scheduler, executor)) for _ in range(3)] == [0, 0, 1]


def test_decodes_come_before_prefill_and_share_the_budget_with_it():
    scheduler, executor = create(max_num_batched_tokens=4)
    scheduler.add(create_request(2, max_tokens=9), 0.0)
    step(scheduler, executor)
    scheduler.add(create_request(7, max_tokens=9), 0.0)
    assert [rows(scheduler.schedule(0.0))] == [[1, 3]]


def test_a_chunk_shrinks_so_that_no_decode_waits():
    scheduler, executor = create(max_num_batched_tokens=2, max_num_seqs=4)
    add_all(scheduler, create_requests(2, prompt=1, max_tokens=20))
    add_all(scheduler, create_requests(2, prompt=6, max_tokens=20))
    for _ in range(5):
        step(scheduler, executor)
    assert rows(executor.steps[-1]) == [1, 1]
    assert scheduler.num_waiting == 2


def test_budget_that_a_prompt_leaves_goes_to_the_next_request():
    scheduler, _ = create(max_num_batched_tokens=8)
    add_all(scheduler, create_requests(3, prompt=3))
    assert rows(scheduler.schedule(0.0)) == [3, 3, 2]


def test_no_more_requests_run_than_there_are_slots():
    scheduler, executor = create(max_num_seqs=2)
    add_all(scheduler, create_requests(5))
    step_input = scheduler.schedule(0.0)
    assert step_input is not None
    assert sorted(s.state_slot for s in step_input.sequences) == [0, 1]
    assert scheduler.num_waiting == 3
    scheduler.update(executor.execute(step_input), 0.0)
    drain(scheduler, executor)


def test_a_finished_request_leaves_its_slot_to_the_next_one():
    scheduler, executor = create(max_num_seqs=1)
    first, second = create_requests(2, max_tokens=1)
    add_all(scheduler, [first, second])
    assert [output.request_id for output in step(scheduler, executor)] == [first.request_id]
    assert [output.request_id for output in step(scheduler, executor)] == [second.request_id]


def test_waiting_requests_are_admitted_in_the_order_of_arrival_even_if_a_later_one_would_fit():
    scheduler, executor = create(num_blocks=9, max_model_len=33)
    add_all(scheduler, [create_request(16, max_tokens=9), create_request(16), create_request(1)])
    step(scheduler, executor)
    step(scheduler, executor)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_the_stop_token_is_reported():
    scheduler, executor = create()
    request = create_request(max_tokens=40, ignore_eos=False)
    scheduler.add(request, 0.0)
    outputs = drain(scheduler, executor)
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_token_id == EOS
    assert output_tokens(outputs, request)[-1] == EOS


def test_a_request_that_ends_by_length_reports_no_stop_token():
    scheduler, executor = create()
    scheduler.add(create_request(max_tokens=1, stop_token_ids=[]), 0.0)
    assert drain(scheduler, executor)[-1].stop_token_id is None


def test_a_request_may_fill_the_whole_context():
    scheduler, executor = create(max_model_len=13, block_size=4, num_blocks=4)
    request = create_request(12, max_tokens=50)
    scheduler.add(request, 0.0)
    outputs = drain(scheduler, executor)
    assert outputs[-1].finish_reason == "length"
    assert len(output_tokens(outputs, request)) == 1


def test_a_prompt_that_leaves_no_room_for_output_is_invalid():
    error = create_scheduler(max_model_len=13).add(create_request(13), 0.0)
    assert error is not None
    assert error.kind == "invalid"
    assert "13 tokens" in error.message
    assert "at most 12" in error.message


def test_an_empty_prompt_is_invalid():
    error = create_scheduler().add(create_request([]), 0.0)
    assert error is not None
    assert error.kind == "invalid"


def test_a_request_for_no_tokens_is_invalid():
    error = create_scheduler().add(create_request(max_tokens=0), 0.0)
    assert error is not None
    assert error.kind == "invalid"


def test_more_waiting_requests_than_allowed_are_refused_with_a_time_to_retry():
    scheduler, executor = create(max_num_seqs=2, max_waiting_requests=3)
    add_all(scheduler, create_requests(5))
    error = scheduler.add(create_request(), 0.0)
    assert error is not None
    assert (error.kind, error.retry_after_s) == ("overloaded", RETRY_AFTER_S)
    step(scheduler, executor)
    refused = [scheduler.add(request, 0.0) is not None for request in create_requests(2)]
    assert refused == [True, True]


def test_with_no_waiting_allowed_free_slots_still_take_requests():
    scheduler, executor = create(max_num_seqs=2, max_waiting_requests=0)
    add_all(scheduler, create_requests(2))
    assert scheduler.add(create_request(), 0.0) is not None
    drain(scheduler, executor)
    assert scheduler.add(create_request(), 0.0) is None


def test_two_open_requests_cannot_share_an_id():
    scheduler = create_scheduler()
    request = create_request()
    scheduler.add(request, 0.0)
    with pytest.raises(AssertionError, match="is open already"):
        scheduler.add(request, 0.0)


def create_crowded() -> tuple[Scheduler, FakeExecutor, list[AddRequest]]:
    """Two requests that fit together at first and not to their end."""
    scheduler, executor = create(max_num_seqs=2, block_size=4, num_blocks=7, max_model_len=21)
    requests = create_requests(2, prompt=4, max_tokens=14)
    add_all(scheduler, requests)
    return scheduler, executor, requests


def test_when_blocks_run_out_the_newest_request_waits_and_continues_without_losing_or_repeating_a_token():
    scheduler, executor, requests = create_crowded()
    outputs = drain(scheduler, executor)
    assert scheduler.num_preemptions >= 1
    for request in requests:
        assert output_tokens(outputs, request) == solo_tokens(request)
    finished = [output.request_id for output in outputs if output.finish_reason]
    assert finished == [request.request_id for request in requests]


def test_a_preempted_request_is_prefilled_with_its_output_before_those_that_came_later():
    scheduler, executor, _ = create_crowded()
    add_all(scheduler, [create_request(1, max_tokens=1)])
    drain(scheduler, executor)
    prefills = [s for step_input in executor.steps for s in step_input.sequences if s.start_position == 0]
    assert [len(s.token_ids) for s in prefills] == [4, 4, 13, 1]


def test_the_prompt_computed_again_counts_again_and_output_counts_once():
    scheduler, executor, requests = create_crowded()
    outputs = drain(scheduler, executor)
    assert scheduler.num_generated_tokens == sum(len(output_tokens(outputs, request)) for request in requests)
    assert scheduler.num_prompt_tokens == 4 * (2 + scheduler.num_preemptions)


def test_an_admission_leaves_a_block_for_each_running_request_to_grow():
    scheduler, executor = create(num_blocks=6, block_size=4, max_model_len=21)
    add_all(scheduler, [create_request(8, max_tokens=8), create_request(9)])
    step(scheduler, executor)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.num_free_blocks == 3


def test_a_waiting_request_is_aborted_at_once():
    scheduler = create_scheduler()
    request = create_request()
    scheduler.add(request, 0.0)
    scheduler.abort(request.request_id)
    assert scheduler.schedule(0.0) is None
    scheduler.check_integrity()


def test_a_running_request_aborted_between_steps_frees_its_memory_at_once():
    scheduler, executor = create()
    request = create_request()
    scheduler.add(request, 0.0)
    step(scheduler, executor)
    scheduler.abort(request.request_id)
    assert scheduler.num_free_blocks == scheduler.limits.num_blocks - 1
    assert scheduler.schedule(0.0) is None


def test_a_request_aborted_in_flight_keeps_its_memory_until_the_step_is_back():
    scheduler, executor = create()
    gone, stays = create_requests(2, max_tokens=1)
    add_all(scheduler, [gone, stays])
    step_input = scheduler.schedule(0.0)
    assert step_input is not None
    num_free = scheduler.num_free_blocks
    scheduler.abort(gone.request_id)
    scheduler.abort(gone.request_id)
    assert scheduler.num_free_blocks == num_free
    scheduler.check_integrity()
    outputs = scheduler.update(executor.execute(step_input), 0.0)
    assert [output.request_id for output in outputs] == [stays.request_id]
    assert scheduler.num_free_blocks == scheduler.limits.num_blocks - 1
    scheduler.check_integrity()


def test_aborting_an_unknown_request_is_ignored():
    create_scheduler().abort("nobody")


def test_a_sequence_error_ends_its_request_and_no_other():
    scheduler, executor = create()
    bad, good = create_requests(2)
    add_all(scheduler, [bad, good])
    step(scheduler, executor)
    executor.failing_slots = {executor.steps[0].sequences[0].state_slot}
    outputs = drain(scheduler, executor)
    [failed] = news_of(bad, outputs)
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert (failed.error.kind, failed.error.message) == ("internal", "non-finite logits")
    assert news_of(good, outputs)[-1].finish_reason == "length"


def test_a_second_step_cannot_be_scheduled_while_one_is_in_flight():
    scheduler = create_scheduler()
    scheduler.add(create_request(), 0.0)
    scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="is in flight"):
        scheduler.schedule(0.0)


def test_the_output_of_another_step_is_not_accepted():
    scheduler, executor = create()
    scheduler.add(create_request(), 0.0)
    step(scheduler, executor)
    scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="step_id"):
        scheduler.update(executor.execute(executor.steps[0]), 0.0)


def test_a_broken_promise_is_found():
    scheduler, executor = create()
    add_all(scheduler, create_requests(2))
    step(scheduler, executor)
    scheduler._running.reverse()
    with pytest.raises(AssertionError):
        scheduler.check_integrity()


LIMITS = st.builds(
    lambda max_model_len, block_size, spare, **other: {
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_blocks": 1 + -(-(max_model_len - 1) // block_size) + spare,
        **other,
    },
    max_model_len=st.integers(8, 24),
    block_size=st.integers(1, 5),
    spare=st.integers(0, 8),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(1, 12),
    max_itl_factor=st.sampled_from([None, 1.5, 3.0]),
    min_chunk_tokens=st.integers(1, 4),
    max_waiting_requests=st.integers(0, 6),
)


MAX_PROBES = 3 * MIN_DECODE_SAMPLES
"""Steps without prompt rows that a few requests can cause: 1, 2 to 3, and 4 to 7 decodes are measured apart."""


def max_steps(request: AddRequest, limits: dict[str, int]) -> int:
    """Steps that a request needs from when it is the oldest."""
    num_tokens = len(request.prompt_token_ids) + request.max_tokens
    chunk = limits["max_num_batched_tokens"]
    if limits["max_itl_factor"] is not None:
        chunk = min(chunk, limits["min_chunk_tokens"])
    return -(-num_tokens // chunk) + request.max_tokens


class AnyTraffic(RuleBasedStateMachine):
    """Adds, aborts, fails and steps requests of both priorities in any order, under any limits.

    After every rule the accounting is exact. Every token that a request got is the token it gets alone; at
    the end each request has ended once, in a bounded number of steps, and nothing is left.
    """

    requests: Bundle[AddRequest] = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: StepInput | None = None
        self.outputs: list[RequestOutput] = []
        self.accepted: dict[str, AddRequest] = {}
        self.aborted: set[str] = set()
        self.ids = itertools.count()
        self.now_s = 0.0

    @initialize(limits=LIMITS)
    def start(self, limits: dict[str, int]) -> None:
        self.limits = limits
        self.scheduler = create_scheduler(**limits)
        self.executor = FakeExecutor(limits["block_size"])

    @rule(
        target=requests,
        prompt=st.lists(st.integers(2, 12), min_size=1, max_size=16),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 3),
        stop_token_ids=st.lists(st.integers(0, 12), max_size=1),
        ignore_eos=st.booleans(),
        priority=st.sampled_from(["interactive", "batch"]),
    )
    def add(self, prompt: list[int], max_tokens: int, **options: object) -> AddRequest:
        request = AddRequest(
            request_id=str(next(self.ids)),
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=options.pop("seed")),
            max_tokens=max_tokens,
            **options,
        )
        if self.scheduler.add(request, self.now_s) is None:
            self.accepted[request.request_id] = request
        return request

    @rule(request=requests)
    def abort(self, request: AddRequest) -> None:
        self.scheduler.abort(request.request_id)
        self.aborted.add(request.request_id)

    @rule(seconds=st.floats(0, 80))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self) -> None:
        self.in_flight = self.scheduler.schedule(self.now_s)

    @precondition(lambda self: self.in_flight is not None)
    @rule(failing=st.sampled_from([None, None, None, 0, 1]), step_s=st.floats(0, 1))
    def update(self, failing: int | None, step_s: float = 0.5) -> None:
        if failing is not None:
            self.executor.failing_slots = {failing}
        self.outputs += self.scheduler.update(self.executor.execute(self.in_flight), step_s)
        self.in_flight = None

    @precondition(lambda self: self.in_flight is None)
    @rule(count=st.integers(1, 10))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.schedule()
            if self.in_flight is not None:
                self.update(None)
                self.scheduler.check_integrity()

    @invariant()
    def accounting_is_exact(self) -> None:
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        if self.in_flight is not None:
            self.update(None)
        # Each admission may throw one request before it back.
        bound = sum(max_steps(request, self.limits) for request in self.accepted.values())
        bound *= 1 + len(self.accepted)
        self.outputs += drain(self.scheduler, self.executor, bound + MAX_PROBES + 1)
        assert self.scheduler.num_free_blocks == self.limits["num_blocks"] - 1
        for request in self.accepted.values():
            self.check_news(request)

    def check_news(self, request: AddRequest) -> None:
        news = news_of(request, self.outputs)
        tokens, expected = output_tokens(news, request), solo_tokens(request, self.limits["max_model_len"])
        assert tokens == expected[: len(tokens)]
        ends = [output.finish_reason for output in news if output.finish_reason is not None]
        if ends in (["stop"], ["length"]):
            assert tokens == expected
        else:
            assert ends == ["error"] or (ends == [] and request.request_id in self.aborted)


TestAnyTrafficGivesEveryRequestItsSoloTokensAndLeaksNothing = AnyTraffic.TestCase
TestAnyTrafficGivesEveryRequestItsSoloTokensAndLeaksNothing.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None
)


@settings(max_examples=60, deadline=None)
@given(limits=LIMITS, lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=10))
def test_every_request_finishes_within_the_steps_it_needs_as_the_oldest(
    limits: dict[str, int], lengths: list[tuple[int, int]]
):
    scheduler, executor = create(**limits | {"max_waiting_requests": 100})
    requests = [
        create_request(min(prompt, limits["max_model_len"] - 1), max_tokens=max_tokens)
        for prompt, max_tokens in lengths
    ]
    add_all(scheduler, requests)
    bound = 1 + MAX_PROBES + sum(max_steps(request, limits) for request in requests)
    outputs = drain(scheduler, executor, bound)
    for request in requests:
        assert output_tokens(outputs, request) == solo_tokens(request, limits["max_model_len"])


def batch_request(prompt: int = 3, **changes: object) -> AddRequest:
    return create_request(prompt, priority="batch", **changes)


def test_interactive_requests_are_admitted_before_batch_requests_that_came_earlier():
    scheduler, executor = create(max_num_seqs=1)
    batch, interactive = batch_request(max_tokens=1), create_request(max_tokens=1)
    add_all(scheduler, [batch, interactive])
    finished = [output.request_id for output in drain(scheduler, executor)]
    assert finished == [interactive.request_id, batch.request_id]
    assert scheduler.num_preemptions == 0


def test_batch_work_fills_the_rows_that_interactive_work_leaves():
    scheduler, executor = create(max_num_batched_tokens=8)
    add_all(scheduler, [batch_request(20), create_request(5)])
    assert rows(scheduler.schedule(0.0)) == [5, 3]


def test_a_batch_request_without_rows_keeps_its_memory_and_goes_on_where_it_was():
    scheduler, executor = create(max_num_batched_tokens=4)
    batch = batch_request(3, max_tokens=9)
    scheduler.add(batch, 0.0)
    outputs = step(scheduler, executor)
    scheduler.add(create_request(8, max_tokens=1), 0.0)
    outputs += step(scheduler, executor)
    outputs += step(scheduler, executor)
    assert [rows(step_input) for step_input in executor.steps] == [[3], [4], [4]]
    outputs += drain(scheduler, executor)
    assert scheduler.num_preemptions == 0
    assert output_tokens(outputs, batch) == solo_tokens(batch)


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"num_blocks": 17}], ids=["slots", "blocks"])
def test_a_batch_request_yields_its_memory_at_once_and_loses_no_token(limits: dict[str, int]):
    scheduler, executor = create(**limits)
    batch, interactive = batch_request(10, max_tokens=20), create_request(10, max_tokens=20)
    if "num_blocks" in limits:
        interactive = create_request(56, max_tokens=2)
    scheduler.add(batch, 0.0)
    outputs = step(scheduler, executor) + step(scheduler, executor)
    scheduler.add(interactive, 0.0)
    outputs += step(scheduler, executor)
    assert scheduler.num_preemptions == 1
    assert executor.steps[-1].sequences[0].token_ids == interactive.prompt_token_ids[:16]
    outputs += drain(scheduler, executor)
    for request in (batch, interactive):
        assert output_tokens(outputs, request) == solo_tokens(request)


def test_batch_requests_keep_their_memory_if_all_of_it_would_not_let_the_interactive_one_in():
    scheduler, executor = create(max_num_batched_tokens=64, num_blocks=20)
    add_all(scheduler, [create_request(36, max_tokens=9), batch_request(4, max_tokens=9)])
    step(scheduler, executor)
    scheduler.add(create_request(40), 0.0)
    step(scheduler, executor)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_preemptions) == (2, 1, 0)


def test_no_batch_request_is_admitted_while_an_interactive_one_waits():
    scheduler, executor = create(max_num_batched_tokens=64, num_blocks=20)
    scheduler.add(create_request(36, max_tokens=9), 0.0)
    step(scheduler, executor)
    add_all(scheduler, [create_request(40), batch_request(1)])
    step(scheduler, executor)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_when_blocks_run_out_batch_requests_are_preempted_before_newer_interactive_ones():
    scheduler, executor = create(max_num_seqs=2, block_size=4, num_blocks=7, max_model_len=21)
    batch, interactive = batch_request(4, max_tokens=14), create_request(4, max_tokens=14)
    add_all(scheduler, [batch, interactive])
    outputs = drain(scheduler, executor)
    assert scheduler.num_preemptions >= 1
    finished = [output.request_id for output in outputs if output.finish_reason]
    assert finished == [interactive.request_id, batch.request_id]


def feed(scheduler: Scheduler, executor: FakeExecutor, seconds: range) -> list[RequestOutput]:
    """Steps a second apart, with an interactive request before each that takes all slots and most rows."""
    outputs = []
    for second in seconds:
        scheduler.add(create_request(16, max_tokens=1), second)
        step_input = scheduler.schedule(second)
        assert step_input is not None
        outputs += scheduler.update(executor.execute(step_input), 0.0)
        scheduler.check_integrity()
    return outputs


@pytest.mark.parametrize("wait_s", [5, 20])
def test_a_batch_request_waits_no_longer_than_it_may(wait_s: int):
    scheduler, executor = create(max_num_seqs=1, max_batch_wait_s=wait_s)
    batch = batch_request(max_tokens=1)
    scheduler.add(batch, 0.0)
    assert output_tokens(feed(scheduler, executor, range(wait_s)), batch) == []
    assert output_tokens(feed(scheduler, executor, range(wait_s, wait_s + 3)), batch) == solo_tokens(batch)


def test_a_running_batch_request_that_gets_no_rows_grows_old_too():
    scheduler, executor = create(max_batch_wait_s=5.0)
    batch = batch_request(3, max_tokens=30)
    scheduler.add(batch, 0.0)
    outputs = scheduler.update(executor.execute(scheduler.schedule(0.0)), 0.0)
    outputs += feed(scheduler, executor, range(5))
    assert len(output_tokens(outputs, batch)) == 1
    outputs += feed(scheduler, executor, range(5, 8))
    assert len(output_tokens(outputs, batch)) == 4
    outputs += drain(scheduler, executor)
    assert output_tokens(outputs, batch) == solo_tokens(batch)


def test_waiting_batch_requests_keep_no_interactive_one_out():
    scheduler, executor = create(max_num_seqs=2, max_waiting_requests=3)
    add_all(scheduler, [batch_request() for _ in range(5)])
    assert scheduler.add(batch_request(), 0.0) is not None
    step(scheduler, executor)
    add_all(scheduler, create_requests(5))
    for error in (scheduler.add(create_request(), 0.0), scheduler.add(batch_request(), 0.0)):
        assert error is not None
        assert error.kind == "overloaded"


def test_a_paused_request_that_is_aborted_in_flight_frees_its_memory_at_once():
    scheduler, executor = create(max_num_batched_tokens=4)
    batch = batch_request(3, max_tokens=9)
    scheduler.add(batch, 0.0)
    step(scheduler, executor)
    scheduler.add(create_request(8, max_tokens=1), 0.0)
    step_input = scheduler.schedule(0.0)
    scheduler.abort(batch.request_id)
    scheduler.check_integrity()
    assert scheduler.num_running == 1
    assert step_input is not None
    scheduler.update(executor.execute(step_input), 0.0)
    drain(scheduler, executor)
    assert scheduler.num_free_blocks == scheduler.limits.num_blocks - 1


MACHINE = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 256,
    "max_model_len": 4096,
    "num_blocks": 6 * 1024 + 1,
    "max_itl_factor": 2.0,
    "min_chunk_tokens": 4,
}
DECODE_S, ROW_S = 0.01, 0.0002
"""Of a machine that computes 50 prompt rows in the time of a step without any."""


def timed_step(scheduler: Scheduler, executor: FakeExecutor) -> tuple[float, list[RequestOutput]]:
    """What a step takes on that machine, and its news."""
    step_input = scheduler.schedule(0.0)
    assert step_input is not None
    step_s = DECODE_S + ROW_S * sum(num_rows for num_rows in rows(step_input) if num_rows > 1)
    return step_s, scheduler.update(executor.execute(step_input), step_s)


def decoding(priority: str, **limits: object) -> tuple[Scheduler, FakeExecutor]:
    """Two requests that decode for a long time, and steps that were measured."""
    scheduler, executor = create(**MACHINE | limits)
    add_all(scheduler, create_requests(2, max_tokens=4000, priority=priority))
    for _ in range(20):
        timed_step(scheduler, executor)
    return scheduler, executor


def test_a_long_prompt_delays_streams_no_more_than_it_may_and_no_less_than_needed():
    scheduler, executor = decoding("interactive")
    prompt = create_request(1000, max_tokens=1)
    scheduler.add(prompt, 0.0)
    times_s = []
    while scheduler.num_running + scheduler.num_waiting > 2:
        step_s, outputs = timed_step(scheduler, executor)
        assert len(outputs) >= 2
        times_s.append(step_s)
    assert max(times_s) <= 2 * DECODE_S * 1.0001
    assert [rows(step_input)[2:] for step_input in executor.steps[20:24]] == [[4], [8], [16], [32]]
    assert max(
        len(sequence.token_ids) for step_input in executor.steps[20:] for sequence in step_input.sequences
    ) in (49, 50)
    assert output_tokens(outputs, prompt) == solo_tokens(prompt, 4096)


def test_fixed_chunks_take_all_rows_that_are_left():
    scheduler, _ = decoding("interactive", max_itl_factor=None)
    scheduler.add(create_request(1000), 0.0)
    assert rows(scheduler.schedule(0.0)) == [1, 1, 254]


def test_nobody_waits_for_batch_streams_to_go_on():
    scheduler, _ = decoding("batch")
    scheduler.add(create_request(1000), 0.0)
    assert rows(scheduler.schedule(0.0)) == [256]


def test_without_streams_a_prompt_takes_the_whole_step():
    scheduler, _ = create(**MACHINE)
    add_all(scheduler, create_requests(2, prompt=200))
    assert rows(scheduler.schedule(0.0)) == [200, 56]


def test_batch_prompts_do_not_delay_interactive_streams_either():
    scheduler, executor = decoding("interactive")
    add_all(scheduler, [batch_request(200, max_tokens=9) for _ in range(3)])
    for _ in range(30):
        assert timed_step(scheduler, executor)[0] <= 2 * DECODE_S * 1.0001
    assert scheduler.num_waiting == 0
