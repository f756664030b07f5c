"""What does the scheduler cost per step when every request decodes?

    python -m benchmarks.scheduler [--num-seqs 128] [--context 1000] [--steps 300]

Prints one JSON line: microseconds per step of `schedule` plus `update`, and of encoding the step's message.
"""

import argparse
import json
import statistics
import time

import msgspec

from actors.messages import (
    AddRequest,
    SampledToken,
    SamplingParams,
    ScheduledSequence,
    SequenceOutput,
    StepInput,
    StepOutput,
)
from deployment.limits import SchedulerLimits
from deployment.scheduler import Scheduler

BLOCK_SIZE = 32


def create_scheduler(num_seqs: int, context: int, steps: int) -> Scheduler:
    """A scheduler whose requests have all got their first token and none their last."""
    max_model_len = context + steps + 2
    limits = SchedulerLimits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * context,
        max_itl_factor=2.0,
        min_chunk_tokens=128,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        num_blocks=1 + num_seqs * (max_model_len // BLOCK_SIZE + 2),
        max_waiting_requests=0,
        max_batch_wait_s=600.0,
        history_len=3,
    )
    scheduler = Scheduler(limits, eos_token_id=1)
    for number in range(num_seqs):
        sampling = SamplingParams(seed=number)
        error = scheduler.add(
            AddRequest(f"request-{number:032x}", [2] * context, sampling, max_model_len), 0.0
        )
        assert error is None, f"{error}"
    step = scheduler.schedule(0.0)
    assert step is not None, "no step"
    scheduler.update(reply(step), 0.0)
    return scheduler


def reply(step: StepInput) -> StepOutput:
    """A token for every sequence."""

    def answer(sequence: ScheduledSequence) -> SequenceOutput:
        return SequenceOutput(SampledToken(sequence.token_ids[-1]))

    return StepOutput(step.step_id, list(map(answer, step.sequences)))


def measure(num_seqs: int, context: int, steps: int) -> dict[str, float]:
    """Run `steps` decode steps."""
    scheduler = create_scheduler(num_seqs, context, steps)
    encoder = msgspec.msgpack.Encoder()
    scheduling_us, encoding_us = [], []
    for _ in range(steps):
        start = time.perf_counter()
        step = scheduler.schedule(0.0)
        scheduled = time.perf_counter()
        assert step is not None, "no step"
        encoder.encode(step)
        encoded = time.perf_counter()
        output = reply(step)
        replied = time.perf_counter()
        scheduler.update(output, 0.01)
        updated = time.perf_counter()
        scheduling_us.append((scheduled - start + updated - replied) * 1e6)
        encoding_us.append((encoded - scheduled) * 1e6)
    return {
        "num_seqs": num_seqs,
        "context": context,
        "steps": steps,
        "scheduling_us_min": round(min(scheduling_us), 1),
        "scheduling_us_p50": round(statistics.median(scheduling_us), 1),
        "scheduling_us_p99": round(statistics.quantiles(scheduling_us, n=100)[98], 1),
        "encoding_us_p50": round(statistics.median(encoding_us), 1),
    }


def main() -> None:
    """Parse the command line and print the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, default=128)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.num_seqs, arguments.context, arguments.steps)))


if __name__ == "__main__":
    main()
