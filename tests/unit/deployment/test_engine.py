import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import (
    AddRequest,
    ExpertTraffic,
    RequestOutput,
    SampledToken,
    SamplingParams,
    SequenceOutput,
    StepInput,
    StepOutput,
)
from deployment.engine import Engine
from deployment.errors import ShardsLostError
from tests.unit.deployment.builders import (
    create_engine,
    create_request,
    create_requests,
    create_scheduler,
    output_tokens,
    solo_tokens,
)
from tests.unit.deployment.fake_executor import FakeExecutor


def drain(engine: Engine, max_steps: int = 1000) -> list[RequestOutput]:
    outputs = []
    for _ in range(max_steps):
        if not engine.has_requests:
            return outputs
        outputs += engine.step()
    raise AssertionError(f"not done after {max_steps} steps: {engine.stats()}")


class FakeClock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class TrafficExecutor(FakeExecutor):
    def execute(self, step: StepInput) -> StepOutput:
        output = super().execute(step)
        return StepOutput(output.step_id, output.sequences, ExpertTraffic(1, 2, 3, 0.5))


def test_a_step_without_requests_does_not_reach_the_executor():
    executor = FakeExecutor(block_size=4)
    assert Engine(create_scheduler(), executor).step() == []
    assert executor.steps == []


def test_requests_give_their_solo_tokens_when_they_run_together():
    engine = create_engine()
    requests = create_requests(6, prompt=7, max_tokens=9)
    assert [engine.add(request) for request in requests] == [None] * 6
    outputs = drain(engine)
    for request in requests:
        assert output_tokens(outputs, request) == solo_tokens(request)


def test_a_refusal_is_returned_and_leaves_nothing_behind():
    engine = create_engine(max_model_len=8)
    error = engine.add(create_request(8))
    assert error is not None
    assert error.kind == "invalid"
    assert not engine.has_requests


def test_an_aborted_request_frees_its_blocks_before_the_next_step():
    engine = create_engine()
    request = create_request(max_tokens=50)
    engine.add(request)
    engine.step()
    engine.abort(request.request_id)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks - 1
    assert engine.step() == []


def test_lost_shards_end_the_step():
    executor = FakeExecutor(block_size=4)
    engine = Engine(create_scheduler(), executor)
    engine.add(create_request())
    executor.is_lost = True
    with pytest.raises(ShardsLostError):
        engine.step()


def test_shutdown_stops_the_executor():
    executor = FakeExecutor(block_size=4)
    Engine(create_scheduler(), executor).shutdown()
    assert executor.is_shut_down


def test_a_batch_request_grows_old_by_the_clock_of_the_engine():
    scheduler = create_scheduler(max_num_seqs=1, max_batch_wait_s=10.0)
    clock = FakeClock(5.0)
    engine = Engine(scheduler, FakeExecutor(block_size=4), clock=clock)
    batch = create_request(max_tokens=1, priority="batch")
    engine.add(batch)
    news = []
    for clock.now_s in (5.0, 14.0, 15.0, 16.0):
        engine.add(create_request(max_tokens=1))
        news.append(output_tokens(engine.step(), batch))
    assert news == [[], [], [], solo_tokens(batch)]


def test_chunks_follow_what_the_clock_says_of_steps():
    """A step of this executor takes ten seconds and one for each prompt row, so ten rows are allowed."""

    class SlowExecutor(FakeExecutor):
        def execute(self, step: StepInput) -> StepOutput:
            lengths = [len(sequence.token_ids) for sequence in step.sequences]
            clock.now_s += 10 + sum(length for length in lengths if length > 1)
            return super().execute(step)

    clock = FakeClock(0.0)
    executor = SlowExecutor(block_size=4)
    scheduler = create_scheduler(max_itl_factor=2.0, max_num_batched_tokens=60, max_model_len=256)
    engine = Engine(scheduler, executor, clock)
    engine.add(create_request(max_tokens=50))
    for _ in range(10):
        engine.step()
    engine.add(create_request(60, max_tokens=1))
    for _ in range(5):
        engine.step()
    chunks = [len(step.sequences[1].token_ids) for step in executor.steps[10:]]
    assert chunks == [2, 4, 8, 10, 10]


def test_log_probabilities_pass_through():
    class LogprobExecutor(FakeExecutor):
        def execute(self, step: StepInput) -> StepOutput:
            return StepOutput(step.step_id, [SequenceOutput(SampledToken(5, logprob=-0.25))])

    engine = Engine(create_scheduler(), LogprobExecutor(block_size=4))
    engine.add(create_request(max_tokens=1))
    [output] = engine.step()
    assert output.tokens == [SampledToken(5, logprob=-0.25)]


def test_the_stats_say_where_the_engine_stands():
    scheduler = create_scheduler(max_num_seqs=2, block_size=4, num_blocks=65)
    engine = Engine(scheduler, TrafficExecutor(block_size=4))
    for request in create_requests(3, prompt=5, max_tokens=2):
        engine.add(request)
    engine.step()
    stats = engine.stats()
    assert (stats.step_id, stats.num_running, stats.num_waiting) == (1, 2, 1)
    assert (stats.num_blocks, stats.num_free_blocks) == (65, 60)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_preemptions) == (10, 2, 0)
    drain(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 64)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (15, 6)
    assert stats.traffic == ExpertTraffic(
        stats.step_id, 2 * stats.step_id, 3 * stats.step_id, 0.5 * stats.step_id
    )


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, AddRequest]]:
    """Requests with the step before which each arrives."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 10)), max_size=8))
    return [
        (
            step,
            AddRequest(
                request_id=str(number),
                prompt_token_ids=[(number + i) % 11 + 2 for i in range(prompt)],
                sampling=SamplingParams(seed=number),
                max_tokens=max_tokens,
                priority="batch" if number % 3 == 1 else "interactive",
            ),
        )
        for number, (step, prompt, max_tokens) in enumerate(sorted(shapes))
    ]


@settings(max_examples=60, deadline=None)
@given(arrivals=arrivals(), chunk=st.integers(1, 40), spare_blocks=st.integers(0, 20))
def test_tokens_depend_neither_on_arrivals_nor_on_chunks_nor_on_memory(
    arrivals: list[tuple[int, AddRequest]], chunk: int, spare_blocks: int
):
    engine = create_engine(
        max_model_len=33, block_size=4, num_blocks=9 + spare_blocks, max_num_batched_tokens=chunk
    )
    outputs = []
    for step in range(31):
        for request in (request for at, request in arrivals if at == step):
            engine.add(request)
        outputs += engine.step()
    outputs += drain(engine)
    for _, request in arrivals:
        assert output_tokens(outputs, request) == solo_tokens(request, max_model_len=33)
