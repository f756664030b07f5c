"""One request: its tokens, how far they are computed, its status, and when it ends."""

from __future__ import annotations

import enum

from actors.messages import AddRequest, FinishReason


class RequestStatus(enum.Enum):
    """Where a request stands; `MOVES` has the allowed changes."""

    WAITING = "waiting"
    """Holds no memory: new, or preempted."""
    RUNNING = "running"
    """Holds a state slot and KV blocks, and has rows in every step that has room for them."""
    ABORTING = "aborting"
    """Nobody wants it any more, but the step in flight still writes to its slot and blocks."""
    FINISHED = "finished"
    """Holds no memory and never will again."""


MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset(
        {
            RequestStatus.RUNNING,  # admitted
            RequestStatus.FINISHED,  # aborted
        }
    ),
    RequestStatus.RUNNING: frozenset(
        {
            RequestStatus.WAITING,  # preempted
            RequestStatus.ABORTING,  # aborted with a step in flight
            RequestStatus.FINISHED,  # ended, failed, or aborted between steps
        }
    ),
    RequestStatus.ABORTING: frozenset({RequestStatus.FINISHED}),  # the step came back
    RequestStatus.FINISHED: frozenset(),
}


class Request:
    """A request as the scheduler keeps it.

        token_ids  |<---- prompt_token_ids ---->|<---- output_token_ids ---->|
                   0                            num_prompt_tokens            num_tokens
                   |<---- computed ---->|<---- to compute ------------------>|
                   0                    num_computed_tokens

    A computed token has its KV in the request's blocks. The newest token is never computed: the step that
    computes it samples its successor.

    Invariants, until the request finishes:
    - `0 <= num_computed_tokens < num_tokens`;
    - there is room for another token: `num_tokens < max_num_tokens`;
    - a waiting request has nothing computed.

    A batch request may become interactive, never the other way.
    """

    __slots__ = (
        "is_batch",
        "last_token_s",
        "max_num_tokens",
        "number",
        "num_computed_tokens",
        "num_prompt_tokens",
        "request_id",
        "sampling",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        message: AddRequest,
        *,
        eos_token_id: int,
        max_model_len: int,
        number: int,
        arrival_s: float,
    ) -> None:
        self.request_id = message.request_id
        self.is_batch = message.priority == "batch"
        self.number = number
        self.last_token_s = arrival_s
        self.sampling = message.sampling
        self.status = RequestStatus.WAITING
        self.token_ids = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_computed_tokens = 0
        self.max_num_tokens = min(self.num_prompt_tokens + message.max_tokens, max_model_len)
        end_of_text = () if message.ignore_eos else (eos_token_id,)
        self.stop_token_ids = frozenset((*message.stop_token_ids, *end_of_text))

    def __repr__(self) -> str:
        computed = f"{self.num_computed_tokens}/{self.num_tokens}"
        return f"Request({self.request_id!r}, {self.status.value}, computed {computed})"

    @property
    def rank(self) -> tuple[bool, int]:
        """The smaller, the sooner it is served."""
        return self.is_batch, self.number

    @property
    def is_decoding(self) -> bool:
        """Whether one token is to be computed; otherwise the request is in its prompt."""
        return len(self.token_ids) - self.num_computed_tokens == 1

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and what was sampled."""
        return len(self.token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, as it came."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; back to waiting also forgets what was computed."""
        assert status in MOVES[self.status], f"{self!r} cannot move to {status}"
        self.status = status
        if status is RequestStatus.WAITING:
            self.num_computed_tokens = 0

    def make_interactive(self, number: int) -> None:
        """Let a batch request stand behind the interactive ones that there are, under a number of its own."""
        assert self.is_batch, f"{self!r} is interactive already"
        self.is_batch = False
        self.number = number

    def append(self, token_id: int) -> FinishReason | None:
        """Take a sampled token and say whether the request ends with it.

        "length" means `max_tokens` or the context length; a stop token at that very place is a "stop".
        """
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return "stop"
        if self.num_tokens >= self.max_num_tokens:
            return "length"
        return None

    def check_integrity(self) -> None:
        """Assert the invariants."""
        assert 0 <= self.num_computed_tokens < self.num_tokens < self.max_num_tokens, (
            f"{self!r}: {self.max_num_tokens=}"
        )
        assert self.status is not RequestStatus.WAITING or self.num_computed_tokens == 0, f"{self!r}"
