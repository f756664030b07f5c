"""EngineConfig: the whole configuration, the `args:` of `serve_config.yaml`.

Each part is defined beside the code that reads it; defaults live in these models only.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.config import ExpertCacheConfig, ShardConfig


class SchedulerConfig(BaseModel):
    """Batch limits, KV memory and admission."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_num_seqs: int = Field(default=16, ge=1)
    """Sequences running at once; also the number of window-ring slots on every shard."""
    max_num_batched_tokens: int = Field(default=256, ge=1)
    """Rows of one step over all sequences; a longer prompt is prefilled in chunks."""
    max_itl_factor: float | None = Field(default=2.0, gt=1)
    """While a prompt is prefilled beside interactive requests that decode, a step takes at most so many times what it
    would take without the prompt: chunks are made as small as that asks for, from what steps took. Unset: chunks
    always take all rows that are left."""
    min_chunk_tokens: int = Field(default=128, ge=1)
    """Chunks are not made smaller for `max_itl_factor`. Every chunk brings the cold pages of a layer across the link
    again, so small ones make prompts slow."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus output, in tokens. Unset: the checkpoint's `max_position_embeddings`."""
    block_size: int = Field(default=32, ge=2, multiple_of=2)
    """Tokens per KV block."""
    num_blocks: int | None = Field(default=None, ge=2)
    """KV blocks on every shard. Unset: enough for `max_num_seqs` sequences of `max_model_len` tokens; on GPUs no more
    than one such sequence, or an eighth of the memory that weights and workspace leave, or what resident pages leave,
    whichever is most (`python -m placement.memory` tells)."""
    max_waiting_requests: int = Field(default=256, ge=0)
    """Requests that may wait for admission; more are refused at once with 429 and Retry-After. Batch requests that
    wait keep no interactive one out."""
    max_batch_wait_s: float = Field(default=600.0, gt=0)
    """A batch request that has got no token for so many seconds becomes interactive."""


class ApiConfig(BaseModel):
    """HTTP ingress."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model_name: str = Field(default="deepseek-v4.1-flash", min_length=1)
    """Name that requests and `/v1/models` use."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Larger request bodies are refused with 413."""
    api_keys_env: str | None = Field(default=None, min_length=1)
    """Environment variable of the ingress processes that has the API keys, separated by commas or white space. With
    this or `api_keys_file`, requests need `Authorization: Bearer KEY`, all but those to `/health`."""
    api_keys_file: Path | None = None
    """File that has API keys, one a line; `#` begins a comment. Read once, at start. Both places add up."""
    max_requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests that one API key may send a minute, counted by each ingress replica for itself; more are refused with
    429 and Retry-After. Up to a minute's worth may come at once. Unset: any number."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call this server from a browser, as in `https://page.example`; `*` is any."""
    max_ongoing_requests: int = Field(default=512, ge=1)
    """Requests one ingress replica works on at once."""
    num_replicas: int = Field(default=1, ge=1)
    """Ingress replicas."""
    num_tokenizer_threads: int = Field(default=2, ge=1)
    """Prompts one ingress replica encodes at once, beside its event loop."""
    unknown_parameters: Literal["ignore", "refuse"] = "ignore"
    """What becomes of a request with a parameter that this server does not know: `ignore` serves it and names the
    parameter in a debug log, `refuse` answers 400 with its name. Known ones that are not supported are refused."""
    thinks_by_default: bool = True
    """Whether a chat request that says nothing about thinking gets it, as the vendor's API does."""

    @model_validator(mode="after")
    def _check_limit_has_keys(self) -> Self:
        has_keys = self.api_keys_env is not None or self.api_keys_file is not None
        if self.max_requests_per_minute is not None and not has_keys:
            raise ValueError(
                f"max_requests_per_minute = {self.max_requests_per_minute} is for each API key: set api_keys_env or "
                "api_keys_file, too"
            )
        return self


class EngineConfig(BaseModel):
    """Everything a user may set; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    checkpoint: Path | None = None
    """Folder of the checkpoint (config.json, tokenizer.json, safetensors shards and index). Unset: the embedded
    tiny checkpoint, written once under the user cache directory."""
    shard: ShardConfig = ShardConfig()
    """GPU shards: number, layout, precision, resident pages."""
    expert_cache: ExpertCacheConfig = ExpertCacheConfig()
    """The host pool of expert pages."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Batching, KV memory, admission."""
    api: ApiConfig = ApiConfig()
    """HTTP."""
