"""The published workloads: their figures, and what is known or assumed of their conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from placement.trace_generator import FOUR_DOMAINS, RANDOM_TOKENS, Traffic

INTERACTIVE_OFFLOAD_GIB: Final = 9.75
WIDE_OFFLOAD_GIB: Final = 12.0
"""More sequences need more room for their caches, so more experts go."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the published campaign (design section 1). Output tokens a second."""

    name: str
    title: str
    traffic: Traffic
    num_requests: int
    """In flight at once."""
    prompt_tokens: int
    output_tokens: int
    """Of each request."""
    offload_gib: float
    published_layer_offload: float | None
    """Calibrates the model; None if it was not published."""
    published_placed: float
    """Held out: nothing is ever fitted to it."""
    aim: float | None
    """Of this project, for its best configuration."""
    assumptions: str
    num_contexts: int = 1
    """Passages that are decoded at once in the interactive workloads; requests share them evenly."""

    @property
    def is_wide(self) -> bool:
        """Whether prompts and decoding fill the same steps, as a batch job's do."""
        return self.num_requests > 8


_INTERACTIVE = "prompt and output length (1000 and 256, as in the held-out row)"

WORKLOADS: Final = (
    Workload("C1", "interactive, 1 request, mixed real text", FOUR_DOMAINS, 1, 1000, 256,
             INTERACTIVE_OFFLOAD_GIB, 75.37, 97.23, 195.0, _INTERACTIVE),
    Workload("C8", "interactive, 8 requests, mixed real text", FOUR_DOMAINS, 8, 1000, 256,
             INTERACTIVE_OFFLOAD_GIB, 166.55, 247.77, 500.0,
             _INTERACTIVE + "; requests alike enough for the documented 90 ms of cold reads", 3),
    Workload("random", "uniform random token ids, 1 request", RANDOM_TOKENS, 1, 1000, 256,
             INTERACTIVE_OFFLOAD_GIB, 67.46, 63.00, 75.0, _INTERACTIVE + "; every topic alike"),
    Workload("C256", "wide batch, synthetic 1024 in / 128 out, 256 users", RANDOM_TOKENS, 256, 1024, 128,
             WIDE_OFFLOAD_GIB, None, 337.45, None, "synthetic means uniform token ids; drafts; 2048 rows a step"),
    Workload("C128", "held-out text, 1000 in / 256 out, 128 requests", FOUR_DOMAINS, 128, 1000, 256,
             WIDE_OFFLOAD_GIB, None, 368.55, 740.0, "text of the profile's domains; drafts; 2048 rows a step"),
)  # fmt: skip


def workload(name: str) -> Workload:
    """The published workload called `name`."""
    return next(row for row in WORKLOADS if row.name == name)
