"""From step times to output tokens a second: interactive requests, and batches whose prompts share steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placement.constants import NUM_ENCODER_LAYERS, REPLAY_ROWS, Machine
from placement.cost_model import BASE_ROWS, Floats, combine, hot_ms, link_ms, other_ms, wait_ms
from placement.hot_mask import Mask
from placement.replay import Arm, hot_mask, read_loads
from placement.trace import Trace
from placement.trace_generator import ROWS_PER_SEQUENCE, RoutingModel, Traffic
from placement.workloads import Workload

_GRID: Final = (6, 48, 192, 768, 2048)
"""Rows at which the pages of a step are counted; between them, linear."""
MAX_NUM_BATCHED_TOKENS: Final = 2048
"""Rows of a step: the default of the published engine's base for GPUs of this size."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine does, apart from where its experts are."""

    dense_ms: float
    """A step of six rows without routed products and collectives."""
    row_ms: float = 0.0
    """What a further row costs above the model's arithmetic and links."""
    charges_prompts: bool = True
    """Prompt rows cost `row_ms`, too, not decoding rows alone."""
    overlaps: bool = False
    """A routed product reads hot and cold pages at once, not one after the other."""
    stages: bool = False
    """Copies all cold pages ahead, during computation, in steps in which that is faster."""
    replays: bool = True
    """Bounded replay: prompts run through the decoder layers for their last 128 tokens only."""
    wide_rows: tuple[int, ...] = (ROWS_PER_SEQUENCE,)
    """Rows of a sequence in a wide batch: six with DSpark, one without; of several, the faster is taken."""

    def rest_ms(self, machine: Machine, decode_rows: float, prompt_rows: float) -> float:
        """A step without its routed products."""
        charged_rows = decode_rows + prompt_rows if self.charges_prompts else decode_rows
        extra_ms = max(0.0, charged_rows - BASE_ROWS) * self.row_ms
        return other_ms(machine, self.dense_ms, decode_rows + prompt_rows) + extra_ms


def curve_traces(model: RoutingModel, traffic: Traffic, rows_per_sequence: int) -> tuple[Trace, ...]:
    """Steps of more and more rows, for a `StepCurve`."""
    traces = []
    for num_rows in _GRID:
        rows = min(rows_per_sequence, num_rows)
        traces.append(
            model.generate(traffic, 2, num_sequences=num_rows // rows, rows_per_sequence=rows, seed=77)
        )
    return tuple(traces)


class StepCurve:
    """Mean time of a step by its rows, for one hot set and one kind of traffic."""

    def __init__(
        self, traces: Sequence[Trace], profile: NDArray[np.number], arm: Arm, machine: Machine
    ) -> None:
        mask = hot_mask(arm, profile)
        self._machine = machine
        self._staged = self._staged_ms(mask, arm.ep_size)
        points: dict[str, list[Floats]] = {"hot": [], "cold": [], "all": []}
        for trace in traces:
            loads, _ = read_loads(trace, slice(None), mask, arm)
            points["hot"].append(hot_ms(machine, loads.hot, arm.ep_size).mean(axis=0))
            points["all"].append(hot_ms(machine, loads.hot + loads.cold, arm.ep_size).mean(axis=0))
            points["cold"].append(wait_ms(machine, loads.cold, arm.ep_size).mean(axis=0))
        self._points = {name: np.array(rows) for name, rows in points.items()}
        self._grid = [trace.num_rows for trace in traces]

    def step_ms(self, engine: Engine, decode_rows: float, prompt_rows: float, last_rows: float) -> float:
        """A step.

        Args:
            engine: what runs it.
            decode_rows: of running requests.
            prompt_rows: of prompts.
            last_rows: of these, those that the decoder's layers compute, too.
        """
        rest_ms = engine.rest_ms(self._machine, decode_rows, (prompt_rows + last_rows) / 2)
        encoder_rows, decoder_rows = decode_rows + prompt_rows, decode_rows + last_rows
        encoder, decoder = self._shares(encoder_rows), self._shares(decoder_rows)
        hot, cold, every = (
            np.concatenate(
                [encoder @ points[:, :NUM_ENCODER_LAYERS], decoder @ points[:, NUM_ENCODER_LAYERS:]]
            )
            for points in (self._points["hot"], self._points["cold"], self._points["all"])
        )
        products = combine(hot, cold, overlaps=engine.overlaps)
        # Copies of whole layers hide behind everything else; a layer with few rows may rather read what it needs.
        staged_layers = (0, NUM_ENCODER_LAYERS, len(hot)) if engine.stages else (0,)
        return min(
            float(products[n:].sum() + max(self._staged[:n].sum(), every[:n].sum() + rest_ms))
            for n in staged_layers
        )

    def prefill_ms(self, engine: Engine, prompt_tokens: int) -> float:
        """One prompt alone."""
        total_ms = 0.0
        for start in range(0, prompt_tokens, MAX_NUM_BATCHED_TOKENS):
            rows = min(MAX_NUM_BATCHED_TOKENS, prompt_tokens - start)
            total_ms += self.step_ms(engine, 0, rows, min(rows, REPLAY_ROWS) if engine.replays else rows)
        return total_ms

    def _shares(self, num_rows: float) -> Floats:
        """What each point of the grid contributes to a step of `num_rows`; between two points, linear."""
        position = float(np.interp(num_rows, self._grid, np.arange(len(self._grid))))
        shares: Floats = np.maximum(0.0, 1.0 - np.abs(np.arange(len(self._grid)) - position))
        return shares

    def _staged_ms(self, mask: Mask, ep_size: int) -> Floats:
        cold = (~mask).reshape(len(mask), ep_size, -1).sum(axis=2).astype(np.float64)
        return link_ms(self._machine, cold, ep_size, copied=True)


def interactive_tokens_per_s(
    workload: Workload, step_ms: float, prefill_ms: float, tokens_per_step: float
) -> float:
    """Output tokens a second; prompts run one after the other and nothing decodes meanwhile.

    Args:
        workload: requests and lengths.
        step_ms: a decode step of all requests.
        prefill_ms: one prompt.
        tokens_per_step: of each request, from DSpark.
    """
    decode_ms = workload.output_tokens / tokens_per_step * step_ms
    total_ms = workload.num_requests * prefill_ms + decode_ms
    return workload.num_requests * workload.output_tokens / total_ms * 1e3


def tokens_per_step_of(workload: Workload, step_ms: float, prefill_ms: float, tokens_per_s: float) -> float:
    """The tokens per step at which `interactive_tokens_per_s` gives `tokens_per_s`."""
    total_ms = workload.num_requests * workload.output_tokens / tokens_per_s * 1e3
    return workload.output_tokens * step_ms / (total_ms - workload.num_requests * prefill_ms)


def wide_tokens_per_s(
    workload: Workload, engine: Engine, curve: StepCurve, tokens_per_step: Sequence[float]
) -> float:
    """Output tokens a second of a batch that arrives at once.

    Args:
        workload: requests and lengths.
        engine: its `wide_rows` are tried.
        curve: step times.
        tokens_per_step: of each request, for each entry of `engine.wide_rows`.
    """
    times = [
        _batch_ms(workload, rows, tokens, engine, curve)
        for rows, tokens in zip(engine.wide_rows, tokens_per_step, strict=True)
    ]
    return workload.num_requests * workload.output_tokens / min(times) * 1e3


def _batch_ms(
    workload: Workload,
    rows_per_sequence: int,
    tokens_per_step: float,
    engine: Engine,
    curve: StepCurve,
) -> float:
    """Run a batch: every step decodes what runs, and gives the rows that are left to prompts."""
    total_ms = 0.0
    prompt_tokens = workload.num_requests * workload.prompt_tokens
    running: list[float] = []
    num_started = 0
    while prompt_tokens or running:
        decode_rows = len(running) * rows_per_sequence
        chunk = max(0, min(MAX_NUM_BATCHED_TOKENS - decode_rows, prompt_tokens))
        prompt_tokens -= chunk
        num_prefilled = workload.num_requests - -(-prompt_tokens // workload.prompt_tokens)
        tail = min(chunk, REPLAY_ROWS * max(1, num_prefilled - num_started)) if engine.replays else chunk
        total_ms += curve.step_ms(engine, decode_rows, chunk, tail)
        running = [left - tokens_per_step for left in running if left > tokens_per_step]
        running += [float(workload.output_tokens)] * (num_prefilled - num_started)
        num_started = num_prefilled
    return total_ms


def prompt_traffic(workload: Workload) -> Traffic:
    """What one prompt is about: a single topic, or nothing."""
    return (
        Traffic("one prompt", workload.traffic.topics[1:2]) if workload.traffic.topics else workload.traffic
    )


PROMPT_PASSAGE_TOKENS: Final = 64
"""Rows that share a passage in a prompt."""
