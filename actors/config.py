"""ShardConfig and ExpertCacheConfig: what a user may set about the GPU shards and the expert pool."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ShardConfig(BaseModel):
    """Settings of every GPUShard."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    world_size: int = Field(default=2, ge=1, le=8)
    """Number of shards: one Ray actor and one GPU each (CPU processes with `device: cpu`). 1, 2, 4 or 8."""
    ep_size: int | None = Field(default=None, ge=1, le=8)
    """Expert groups: `world_size` gives every rank whole experts, 1 gives every rank a slice of each expert.
    Unset means `world_size`. Must divide `world_size`. Changes rounding, never correctness."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs if the Ray cluster has `world_size` of them, else CPU; the choice is logged."""
    precision: Literal["fp32", "fp64"] = "fp32"
    """Accumulation of every operator. `fp64` is the reference mode that golden tests compare exactly; slow."""
    expert_activations: Literal["bf16", "fp8"] = "bf16"
    """Activations that enter the expert products. `fp8` rounds them as the reference implementation does."""
    max_resident_pages: int | None = Field(default=None, ge=0)
    """Expert pages kept in device slots per rank, the same share of every layer; the rest are cold and stream from
    the host pool. Unset: what `placement_plan` says, or all that fit on the GPU (CPU: all)."""
    placement_plan: Path | None = None
    """File of `python -m placement.plan` that says which expert pages are hot, in place of `max_resident_pages`. It
    must be made for the checkpoint, `world_size` and `ep_size`, with room for `num_staging_slots`."""
    staging: Literal["auto", "staged", "direct"] = "auto"
    """Cold pages: `staged` copies them into slots ahead of their use, `direct` reads them in the host pool. `auto`
    takes what is faster for the rows of a step, as measured at start (GPU), or `staged` (CPU)."""
    num_staging_slots: int | None = Field(default=None, ge=2)
    """Device slots of the staging ring, in pages per rank. More hide longer copies. Unset: as many as 256 MiB hold,
    at least 8."""
    prefetch_mib: float = Field(default=8.0, ge=0)
    """Bound of the cold pages that are brought to the device for the next layer of a decode step, as its router is
    predicted to choose, in MiB; twice that is kept for them. The default is what PCIe 5.0 x16 moves in 160 us, about
    what a layer computes besides experts; less than a page: never. Only steps that read cold pages in place prefetch,
    and only as long as that makes them shorter."""
    allow_unpinned: bool = False
    """GPU: go on if the host pool cannot be registered with CUDA, with copies at about an eighth of the speed and
    without direct reads; `/health` then says so."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of one shard's operators."""
    collective_timeout_s: float = Field(default=60.0, gt=0)
    """A collective that takes longer means a lost rank; the gang is then rebuilt."""
    step_timeout_s: float = Field(default=300.0, gt=0)
    """A step without a reply for this long declares the shards dead."""

    @model_validator(mode="after")
    def _check_hot_pages(self) -> ShardConfig:
        if self.placement_plan is not None and self.max_resident_pages is not None:
            raise ValueError(
                f"placement_plan = {self.placement_plan} and max_resident_pages = {self.max_resident_pages} both say "
                "which pages are hot: set one of them"
            )
        return self


class ExpertCacheConfig(BaseModel):
    """Settings of the ExpertCache and its shared host pool."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_host_pages: int | None = Field(default=None, ge=0)
    """Expert pages of each rank that the host pool holds; the others are read from the checkpoint's files whenever
    they are needed and not resident. Pages that `placement_plan` makes hot are the first that are left out. Unset:
    all, if host memory has room for them."""
    num_load_threads: int = Field(default=2, ge=1)
    """Threads that read expert pages from the checkpoint into the pool at start."""
    verify_checksums: bool = True
    """Check a page's checksum when a shard first reads it. Off saves one pass over the pool at start."""
