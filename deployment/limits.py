"""SchedulerLimits: the scheduler's settings once checkpoint and machine are known."""

from __future__ import annotations

from dataclasses import dataclass

from deployment.config import SchedulerConfig
from deployment.errors import SettingsError
from deployment.kv_blocks import num_blocks_for
from model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`SchedulerConfig` with what it leaves to checkpoint and machine filled in.

    Raises: SettingsError if the blocks cannot hold one request of `max_model_len` tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_itl_factor: float | None
    min_chunk_tokens: int
    max_model_len: int
    """Longest prompt plus output; the newest token needs no KV."""
    block_size: int
    num_blocks: int
    """Blocks on every shard, the null block included."""
    max_waiting_requests: int
    max_batch_wait_s: float
    history_len: int
    """True tokens before a step's first row that a shard needs."""

    def __post_init__(self) -> None:
        needed = 1 + num_blocks_for(self.max_model_len - 1, self.block_size)
        if self.num_blocks < needed:
            raise SettingsError(
                f"num_blocks is {self.num_blocks}, but one request of max_model_len = {self.max_model_len} "
                f"tokens needs {needed} blocks of {self.block_size} tokens, the null block included: raise "
                f"num_blocks or lower max_model_len"
            )

    @classmethod
    def resolve(cls, config: SchedulerConfig, model: ModelConfig) -> SchedulerLimits:
        """Fill in what `config` leaves open for `model`.

        Raises: SettingsError if the model lacks the positions or the blocks are too few.
        """
        max_model_len = config.max_model_len or model.max_position_embeddings
        if max_model_len > model.max_position_embeddings:
            raise SettingsError(
                f"max_model_len is {max_model_len}, but the checkpoint has max_position_embeddings = "
                f"{model.max_position_embeddings}: lower max_model_len"
            )
        blocks_of_all = config.max_num_seqs * num_blocks_for(max_model_len - 1, config.block_size)
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_itl_factor=config.max_itl_factor,
            min_chunk_tokens=config.min_chunk_tokens,
            max_model_len=max_model_len,
            block_size=config.block_size,
            num_blocks=config.num_blocks or 1 + blocks_of_all,
            max_waiting_requests=config.max_waiting_requests,
            max_batch_wait_s=config.max_batch_wait_s,
            history_len=model.engram_max_ngram_size - 1,  # an n-gram ends at its row
        )
