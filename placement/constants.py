"""The numbers that the cost model is made of, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

Origin = Literal["published", "measured here", "derived", "assumption", "aim"]

NUM_RANKS: Final = 8
NUM_LAYERS: Final = 40
NUM_EXPERTS: Final = 384
EXPERT_BYTES: Final = 18_800_640
"""One routed expert, codes and scales (spec section 11)."""
RANK_EXPERT_BYTES: Final = NUM_LAYERS * NUM_EXPERTS * EXPERT_BYTES // NUM_RANKS
LAYER_RANK_BYTES: Final = RANK_EXPERT_BYTES // NUM_LAYERS
NUM_ENCODER_LAYERS: Final = 20
"""The layers that run over every prompt token under bounded replay (spec section 5)."""
REPLAY_ROWS: Final = 128


@dataclass(frozen=True, slots=True)
class Constant:
    """A number and why it is this one."""

    value: float
    unit: str
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Eight RTX 5090 D behind PCIe 5.0, as published, and the published engine's step on it."""

    mapped_gb_per_s: Constant = Constant(
        51.3, "GB/s", "published", "one GPU's kernel reads host memory; design 9"
    )
    copied_gb_per_s: Constant = Constant(56.3, "GB/s", "published", "one GPU's copy engine; design 9")
    all_links_gb_per_s: Constant = Constant(260.0, "GB/s", "published", "all eight GPUs at once; design 9")
    cold_layer_us: Constant = Constant(
        30.0,
        "us",
        "measured here",
        "mapped read of a page at 46.5 and a slice at 33.1 GB/s against 51.0 for 1 GiB: 36 and 25 us; design 9",
    )
    expert_read_gb_per_s: Constant = Constant(
        1290.0,
        "GB/s",
        "derived",
        "experts_h200.json: 48 against 5 whole experts is 3.37 TB/s, 78 % of a streaming read; 5090: 1.79 TB/s "
        "nominal, of which 92 % assumed to be readable",
    )
    expert_launch_us: Constant = Constant(
        19.0, "us", "measured here", "experts_h200.json: what is left of a layer's product at 0 bytes"
    )
    dense_us_per_row: Constant = Constant(
        21.0,
        "us",
        "derived",
        "8.5 G dense parameters a token over 8 ranks at an assumed 100 TFLOP/s (spec section 11)",
    )
    expert_us_per_row: Constant = Constant(
        18.6,
        "us",
        "derived",
        "experts_h200.json: 0.119 us a row and layer between 2048 and 8192 rows, times 3.9 for 200 instead of "
        "786 TFLOP/s, times 40",
    )
    collective_us_per_row: Constant = Constant(
        44.0,
        "us",
        "derived",
        "80 all-reduces of 10,240 B, 7/8 of it sent twice, at an eighth of all links' 260 GB/s",
    )
    collectives_ms: Constant = Constant(
        2.0, "ms", "published", "45 ms step - 25 ms cold - 18 ms outside both; design 5 and 7, issue 6"
    )
    outside_ms: Constant = Constant(
        18.0,
        "ms",
        "published",
        "a step of six rows outside offloaded experts and collectives, resident experts included; issue 6",
    )

    def constants(self) -> dict[str, Constant]:
        """All of them by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


PUBLISHED_MACHINE: Final = Machine()
