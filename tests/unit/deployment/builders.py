"""Builders with a default for everything that a test does not care about."""

import itertools
from typing import Any

from actors.messages import AddRequest, RequestOutput, SamplingParams
from deployment.engine import Engine
from deployment.limits import SchedulerLimits
from deployment.scheduler import Scheduler
from tests.unit.deployment.fake_executor import FakeExecutor, next_token

EOS = 1
_ids = itertools.count()


def create_limits(**changes: Any) -> SchedulerLimits:
    values: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_itl_factor": None,
        "min_chunk_tokens": 2,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 65,
        "max_waiting_requests": 100,
        "max_batch_wait_s": 100.0,
        "history_len": 3,
    }
    return SchedulerLimits(**(values | changes))


def create_scheduler(**limits: Any) -> Scheduler:
    return Scheduler(create_limits(**limits), eos_token_id=EOS)


def create_engine(**limits: Any) -> Engine:
    scheduler = create_scheduler(**limits)
    return Engine(scheduler, FakeExecutor(scheduler.limits.block_size))


def create_request(prompt: int | list[int] = 3, **changes: Any) -> AddRequest:
    """A request with this prompt (a number: of that length) that runs to its `max_tokens` by default."""
    number = next(_ids)
    tokens = [(number + i) % 7 + 2 for i in range(prompt)] if isinstance(prompt, int) else prompt
    values: dict[str, Any] = {
        "request_id": f"request-{number}",
        "prompt_token_ids": tokens,
        "sampling": SamplingParams(seed=number),
        "max_tokens": 4,
        "ignore_eos": True,
    }
    return AddRequest(**(values | changes))


def create_requests(count: int, prompt: int = 3, **changes: Any) -> list[AddRequest]:
    return [create_request(prompt, **changes) for _ in range(count)]


def solo_tokens(request: AddRequest, max_model_len: int = 64) -> list[int]:
    """The tokens that the request gets when it is alone, without scheduler, blocks or chunks."""
    stops = {*request.stop_token_ids} | (set() if request.ignore_eos else {EOS})
    tokens = list(request.prompt_token_ids)
    end = min(len(tokens) + request.max_tokens, max_model_len)
    while len(tokens) < end:
        tokens.append(next_token(request.sampling.seed, tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(request.prompt_token_ids) :]


def output_tokens(outputs: list[RequestOutput], request: AddRequest) -> list[int]:
    """The tokens that `outputs` report for the request, in order."""
    mine = (output for output in outputs if output.request_id == request.request_id)
    return [token.token_id for output in mine for token in output.tokens]
