"""Ranks and shards: how tensor, expert and vocabulary dimensions are cut over `world_size` ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Which part of the model `rank` holds.

    Experts are cut twice: `ep_size` groups hold `num_experts / ep_size` whole experts each, and inside a group
    `world_size / ep_size` ranks hold a slice of the intermediate dimension (design: "Expert layout"). Ranks of
    one expert group are consecutive: `ep_rank = rank // num_slices`, `slice_rank = rank % num_slices`.
    """

    rank: int = 0
    world_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.ep_size:
            raise ValueError(f"ep_size {self.ep_size} does not divide world_size {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside world_size {self.world_size}")

    @property
    def num_slices(self) -> int:
        """Ranks that share one expert."""
        return self.world_size // self.ep_size

    @property
    def ep_rank(self) -> int:
        """Expert group of this rank."""
        return self.rank // self.num_slices

    @property
    def slice_rank(self) -> int:
        """Slice of each local expert that this rank holds."""
        return self.rank % self.num_slices

    def shard(self, size: int) -> slice:
        """This rank's part of a dimension of `size` that is cut over all ranks."""
        return _part(size, self.rank, self.world_size)

    def local_experts(self, num_experts: int) -> range:
        """Global ids of the experts this rank holds (whole or as slices)."""
        part = _part(num_experts, self.ep_rank, self.ep_size)
        return range(part.start, part.stop)

    def expert_slice(self, intermediate_size: int) -> slice:
        """This rank's part of an expert's intermediate dimension."""
        return _part(intermediate_size, self.slice_rank, self.num_slices)

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError if `config` cannot be cut this way; the message names the dimension."""
        world, slices = self.world_size, self.num_slices
        for name, size, parts, unit in (
            ("num_attention_heads", config.num_attention_heads, world, 1),
            ("o_groups", config.o_groups, world, 1),
            ("vocab_size", config.vocab_size, world, 1),
            ("moe_intermediate_size", config.moe_intermediate_size, world, 32),
            ("moe_intermediate_size", config.moe_intermediate_size, slices, 32),
            ("n_routed_experts", config.n_routed_experts, self.ep_size, 1),
            ("Engram look-ups", (config.engram_max_ngram_size - 1) * config.engram_n_heads, world, 1),
            ("dspark_n_routed_experts", config.dspark_n_routed_experts, self.ep_size, 1),
        ):
            if size % (parts * unit):
                raise ValueError(
                    f"{name} = {size} cannot be cut into {parts} parts"
                    + (f" of a multiple of {unit}" if unit > 1 else "")
                    + f" (world_size {world}, ep_size {self.ep_size})"
                )


def _part(size: int, index: int, parts: int) -> slice:
    width, rest = divmod(size, parts)
    if rest:
        raise ValueError(f"{size} cannot be cut into {parts} equal parts")
    return slice(index * width, (index + 1) * width)
