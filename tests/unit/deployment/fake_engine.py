"""An engine that answers from a script, and the API in front of it, in this process."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import httpx
import msgspec
from starlette.applications import Starlette

from actors.messages import (
    AdaptationNews,
    AddRequest,
    EngineHealth,
    EnginePlacement,
    FinishReason,
    RankPlacement,
    RequestError,
    RequestOutput,
    SampledToken,
    TokenLogprob,
)
from deployment.api import build_api
from deployment.api_keys import load_api_keys
from deployment.config import ApiConfig
from deployment.errors import EngineDeadError
from deployment.request_reader import ModelFacts
from deployment.tokenizer import Tokenizer
from placement.profile import VERSION, PhaseProfile, Profile
from tests.unit.deployment.tokenizers_for_tests import EOS_ID, TINY_VOCAB_SIZE, tiny_tokenizer

MAX_MODEL_LEN = 256
MODEL = "test-model"
NOW = 1_700_000_000.5
SEED = 12345
FINGERPRINT = "fp_0123456789ab"

Step = RequestOutput | Exception
HANG = RequestOutput("", tokens=[SampledToken(-1)])
"""A step that never comes."""


class FakeEngine:
    """Plays `script` for every request, and keeps book of what it was asked."""

    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.script = list(script)
        self.is_alive = True
        self.is_paused = False
        self.warnings: list[str] = []
        self.requests: list[AddRequest] = []
        self.num_played = 0
        """Steps played, over all requests."""
        self.closed = asyncio.Event()
        """Set when a request has ended here, for whatever reason."""

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        try:
            for step in self.script:
                self.num_played += 1
                if step is HANG:
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    raise step
                yield address(step, request.request_id, request.sampling.num_logprobs)
        finally:
            self.closed.set()

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("The engine is not running.")

    async def profile(self, label: str) -> Profile:
        self._check_alive()
        phase = PhaseProfile(num_tokens=3, counts=((2, 1), (0, 3)))
        return Profile(VERSION, "model", {label: 6}, phase, phase)

    async def placement(self) -> EnginePlacement:
        self._check_alive()
        news = AdaptationNews(self.is_paused, 12, 3, 1, 4096, 0.75)
        return EnginePlacement("adaptive", [RankPlacement(0, (2, 1), news)])

    async def pause_adaptation(self, is_paused: bool) -> None:
        self._check_alive()
        self.is_paused = is_paused

    async def health(self) -> EngineHealth:
        return EngineHealth(self.is_alive, self.warnings)


def create_script(
    *steps: Sequence[int], finish_reason: FinishReason = "length", stop_token_id: int | None = None
) -> list[RequestOutput]:
    """Outputs with these token ids; the last one ends the request.

    The log-probability of a token is minus its id; its rivals are itself and the ids above it.
    """
    outputs = list(map(create_output, steps))
    last = msgspec.structs.replace(outputs[-1], finish_reason=finish_reason, stop_token_id=stop_token_id)
    return [*outputs[:-1], last]


def create_output(token_ids: Sequence[int]) -> RequestOutput:
    return RequestOutput("", tokens=list(map(SampledToken, token_ids)))


def address(output: RequestOutput, request_id: str, num_logprobs: int | None) -> RequestOutput:
    """A step of a script as the output that answers a request."""
    tokens = [_with_logprobs(token.token_id, num_logprobs) for token in output.tokens]
    return msgspec.structs.replace(output, request_id=request_id, tokens=tokens)


def _with_logprobs(token_id: int, num_logprobs: int | None) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token_id)
    rivals = [TokenLogprob(token_id + n, -float(token_id + n)) for n in range(num_logprobs)]
    return SampledToken(token_id, logprob=-float(token_id), top_logprobs=rivals)


def end_of_turn(*steps: Sequence[int]) -> list[RequestOutput]:
    """A reply that the model ends itself."""
    return create_script(*steps, [EOS_ID], finish_reason="stop", stop_token_id=EOS_ID)


def refusal(error: RequestError) -> list[RequestOutput]:
    return [RequestOutput("", finish_reason="error", error=error)]


def create_app(
    engine: FakeEngine,
    *,
    tokenizer: Tokenizer | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    monotonic: Callable[[], float] = time.monotonic,
    **settings: object,
) -> Starlette:
    config = ApiConfig.model_validate({"model_name": MODEL, "thinks_by_default": False, **settings})
    return build_api(
        engine,
        tokenizer or tiny_tokenizer(),
        config,
        ModelFacts(max_model_len=max_model_len, vocab_size=TINY_VOCAB_SIZE, system_fingerprint=FINGERPRINT),
        keys=load_api_keys(config),
        now=lambda: NOW,
        monotonic=monotonic,
        draw_seed=lambda: SEED,
    )


def create_http_client(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
