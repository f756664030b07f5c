"""Every message that crosses a process boundary, in one place; encoded with msgpack by `msgspec`.

Three channels (design: "Processes"):
- request channel, Engine replica <-> engine core: `AddRequest`, `AbortRequest`, `StopCore` in; back come
  `RequestOutputs`, one message per step with the news of every request, or at last `EngineDead`;
- step channel, engine core -> all shards by one broadcast ring: `StepInput` or `StopShards`;
- reply channel, rank 0 -> engine core: `StepOutput`, in the order of the steps.

Ray carries the rest, which is rare: `ShardStart` to a shard, `ShardFailure` back as the result of its
`run()`, `PoolRegion` and statistics.

Field types are the plain ones msgpack has (`msgspec.Struct`, since it decodes unions of messages by tag and
checks types on the way in). Token ids are lists of int; block tables, which are as long as the context and in every
step, are the bytes of an int32 array, since making a Python object of every block takes milliseconds.
"""

from __future__ import annotations

import operator
from typing import Literal

import msgspec

from placement.adaptation import AdaptationSettings

FinishReason = Literal["stop", "length", "abort", "error"]
Priority = Literal["interactive", "batch"]
"""Batch work takes what interactive work leaves, and gives it back when asked."""


class Message(msgspec.Struct, frozen=True):
    """Base of all messages: an immutable, typed struct; the tagged ones are what a channel sends."""


class SamplingParams(Message, frozen=True):
    """How one request's next tokens are chosen. Validated at the API; the shard trusts the ranges."""

    temperature: float = 1.0
    """0 means greedy: the lowest token id among the largest logits."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]; 1 keeps everything."""
    top_k: int = 0
    """Number of candidates kept; 0 keeps everything."""
    min_p: float = 0.0
    """Smallest probability kept, relative to the largest one."""
    seed: int = 0
    """Random draws depend on (seed, position) only, never on the batch."""
    num_logprobs: int | None = None
    """None: no log-probabilities; n: the chosen token's and the n largest (n may be 0)."""


class ScheduledSequence(Message, frozen=True):
    """One sequence's rows in a step: `token_ids` at positions `start_position ..`.

    Everything a shard needs to know of the sequence is here; shards keep caches, not requests.
    """

    state_slot: int
    """Index of the sequence's window rings and half-group state; owned by the scheduler."""
    start_position: int
    """Absolute position of the first token = number of tokens computed before."""
    token_ids: list[int]
    history: list[int]
    """The true tokens just before `start_position`, oldest first: as many as there are, at most the longest Engram
    n-gram less one."""
    block_table: bytes
    """Physical block of each logical block of `block_size` tokens, at least as many as cover the last row; int32
    each, in the machine's byte order."""
    decoder_start: int = 0
    """First position that the decoder layers were evaluated at; earlier rows of theirs do not exist."""
    sampling: SamplingParams | None = None
    """Sample one token from the last row's logits; None for a chunk in the middle of a prompt."""


class StepInput(Message, frozen=True, tag=True):
    """One step of the engine, the same for all shards."""

    step_id: int
    sequences: list[ScheduledSequence]


class StopShards(Message, frozen=True, tag=True):
    """Ends every shard's `run()`."""


class TokenLogprob(Message, frozen=True):
    """Natural log-probability of one token under the model's softmax at temperature 1."""

    token_id: int
    logprob: float


class SampledToken(Message, frozen=True):
    """One new token of a sequence."""

    token_id: int
    logprob: float | None = None
    """Set when log-probabilities were asked for."""
    top_logprobs: list[TokenLogprob] = []
    """Largest first; ties by token id."""


class SequenceOutput(Message, frozen=True):
    """What a step gave one scheduled sequence: a token, nothing (mid-prompt), or an error of its own."""

    token: SampledToken | None = None
    error: str | None = None
    """This sequence cannot go on (non-finite logits, an expert page that failed its checksum); others do."""


class ExpertTraffic(Message, frozen=True):
    """Expert pages read by one rank."""

    num_hot: int = 0
    """Page uses served from a resident slot."""
    num_cold: int = 0
    """Page uses served from the host pool or the checkpoint, staged or direct."""
    staged_bytes: int = 0
    """Bytes copied into staging slots."""
    direct_bytes: int = 0
    """Bytes of cold pages that were read in place; a page that many rows chose may cross the link more than once."""
    num_evictions: int = 0
    """Cold pages that lost their staging slot to another one."""
    num_prefetched_useful: int = 0
    """Cold page uses served from a page that was brought on a prediction."""
    num_prefetched_wasted: int = 0
    """Pages brought on a prediction that was wrong."""
    stall_s: float = 0.0
    """Time the computation waited for copies."""
    num_disk_reads: int = 0
    """Pages read from the checkpoint, since the host pool does not hold them or holds them damaged."""

    def __add__(self, other: ExpertTraffic) -> ExpertTraffic:
        """Both together."""
        return ExpertTraffic(
            *map(operator.add, msgspec.structs.astuple(self), msgspec.structs.astuple(other))
        )

    def __sub__(self, other: ExpertTraffic) -> ExpertTraffic:
        """What is new since `other`."""
        return ExpertTraffic(
            *map(operator.sub, msgspec.structs.astuple(self), msgspec.structs.astuple(other))
        )


class StepOutput(Message, frozen=True, tag=True):
    """Rank 0's reply to `StepInput`: `sequences[i]` answers `StepInput.sequences[i]`."""

    step_id: int
    sequences: list[SequenceOutput]
    traffic: ExpertTraffic = ExpertTraffic()


class ShardFailure(Message, frozen=True):
    """A rank cannot go on; the gang must be rebuilt."""

    rank: int
    step_id: int | None
    """The step that failed; None before the first one."""
    error: str
    """Exception with traceback."""


class AddRequest(Message, frozen=True, tag=True):
    """A request as the engine sees it: token ids in, token ids out."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """Largest number of new tokens, at least 1."""
    stop_token_ids: list[int] = []
    """Generation ends when one of these is sampled; the token itself is reported."""
    ignore_eos: bool = False
    priority: Priority = "interactive"


class AbortRequest(Message, frozen=True, tag=True):
    """The caller is gone: free what the request holds. Unknown ids are ignored."""

    request_id: str


class StopCore(Message, frozen=True, tag=True):
    """Ends the engine core's loop; what is still open gets no more news."""


class RequestError(Message, frozen=True):
    """Why a request ended with `finish_reason == "error"`."""

    kind: Literal["overloaded", "invalid", "unavailable", "internal"]
    """`overloaded`: try later; `invalid`: can never be served here; `unavailable`: there is no engine now;
    `internal`: failed while running."""
    message: str
    retry_after_s: float | None = None


class RequestOutput(Message, frozen=True):
    """News of one request: tokens since the last message, and the end when it came."""

    request_id: str
    tokens: list[SampledToken] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request, when `finish_reason == "stop"`."""
    error: RequestError | None = None


class EngineStats(Message, frozen=True):
    """A snapshot of the engine core, sent along with the outputs of a step."""

    step_id: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_generated_tokens: int = 0
    """Since start."""
    num_prompt_tokens: int = 0
    """Computed since start; a prompt computed again after a preemption counts again."""
    num_preemptions: int = 0
    """Since start."""
    traffic: ExpertTraffic = ExpertTraffic()
    """Summed since start."""


class RequestOutputs(Message, frozen=True, tag=True):
    """One message per step from the engine core to the Engine replica."""

    outputs: list[RequestOutput]
    stats: EngineStats


class EngineDead(Message, frozen=True, tag=True):
    """The engine core has lost its shards; every open request fails with this."""

    error: str


class RequestChannel(Message, frozen=True):
    """ZeroMQ addresses of the request channel; each end binds the one that it reads."""

    requests: str
    """Bound by the engine core, takes `RequestMessage`."""
    outputs: str
    """Bound by the Engine replica, takes `CoreMessage`."""


class ShardPlace(Message, frozen=True):
    """Where a shard ended up."""

    rank: int
    node_id: str
    pid: int
    gpu_ids: list[str]
    """As the cluster names them; empty on a CPU. The process sees no other GPU, so its own is always
    `cuda:0`."""
    numa_node: int | None = None
    """Of its GPU; None on a CPU, or if the machine has but one node."""
    free_device_bytes: int | None = None
    """What it can take on its GPU before it has loaded anything, its CUDA context made; None on a CPU."""


class SharedSegment(Message, frozen=True):
    """Anonymous shared memory (memfd) of another process, opened through `/proc/<pid>/fd/<fd>`."""

    pid: int
    fd: int
    num_bytes: int


class RingHandle(Message, frozen=True):
    """A shared-memory ring, for those who attach to it."""

    segment: SharedSegment
    num_readers: int
    num_slots: int
    slot_bytes: int


class StepChannel(Message, frozen=True):
    """Shared memory through which the engine core and the shards talk."""

    steps: RingHandle
    """Read by all ranks."""
    replies: RingHandle
    """Written by rank 0."""
    heartbeats: SharedSegment


class PoolContents(Message, frozen=True):
    """What a region of the host pool holds; written into the region itself as well."""

    model_hash: str
    """Identifies the checkpoint."""
    rank: int
    world_size: int
    ep_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the rank's slice of every expert."""
    experts_per_layer: tuple[int, ...]
    """Local experts of each layer, drafts after the backbone."""
    max_host_pages: int | None = None
    """How many of the rank's pages the region holds; `placement.plan.host_experts` says which. None: all."""
    hot_pages: bytes = b""
    """Bit `i % 8` of byte `i // 8` says that a plan makes page i hot. Empty without a plan."""


class PoolRegion(Message, frozen=True):
    """The part of the host pool that holds one rank's pages."""

    segment: SharedSegment
    contents: PoolContents


class ShardAdaptation(Message, frozen=True):
    """How a rank's hot set follows the traffic."""

    settings: AdaptationSettings
    rates: tuple[tuple[float, ...], ...]
    """Chance that a row chooses a local expert, by layer: what is believed at first."""


class ShardStart(Message, frozen=True):
    """What a shard needs to join the others, besides its configuration."""

    world_size: int
    ep_size: int
    device: Literal["cpu", "cuda"]
    checkpoint: str
    """Folder."""
    store_port: int | None
    """Of rank 0's store on the loopback interface; None if there is one rank."""
    region: PoolRegion
    verify_checksums: bool
    channel: StepChannel
    hot_experts: tuple[tuple[int, ...], ...] | None
    """Local experts that are hot, by layer; None: as `max_resident_pages` says."""
    adaptation: ShardAdaptation | None
    """None: the hot set never changes."""


class AdaptationNews(Message, frozen=True):
    """What the adaptation of one rank's hot set has seen and done."""

    is_paused: bool
    num_tokens: int
    """Rows whose routing was counted."""
    num_swaps: int
    num_swaps_under_way: int
    swapped_bytes: int
    hit_rate: float | None
    """Recency-weighted share of routed slots that the present hot set serves; None before anything was routed."""


class RankPlacement(Message, frozen=True):
    """Where one rank's pages are."""

    rank: int
    num_hot_pages: tuple[int, ...]
    """By layer, drafts after the backbone."""
    adaptation: AdaptationNews | None
    """None if the hot set never changes."""


class ShardStats(Message, frozen=True):
    """A shard's state, for operators."""

    rank: int
    num_steps: int
    num_pages: int
    """Expert pages of this rank."""
    num_hot_pages: int
    """Those in resident slots."""
    num_host_pages: int
    """Those in the host pool."""
    is_pool_pinned: bool | None
    """Whether the GPU has the pool registered; None on a CPU."""
    layers: tuple[ExpertTraffic, ...]
    """Since start, layer by layer, drafts after the backbone."""


class EnginePlacement(Message, frozen=True):
    """Which expert pages are hot, on all ranks."""

    arm: str | None
    """Of the plan that the engine started with; None without one."""
    ranks: list[RankPlacement]


class EngineHealth(Message, frozen=True):
    """Whether an engine takes requests, and what its operator should know about it."""

    is_alive: bool
    warnings: list[str] = []


class CacheStats(Message, frozen=True):
    """The expert cache's state, for operators."""

    is_loaded: bool = False
    """Whether shards can get regions; not so after a restart, until it has adopted those that live."""
    num_pages: int = 0
    """Of the pool, over all ranks."""
    num_filled_pages: int = 0
    num_bytes: int = 0
    """Of the whole pool."""
    load_bytes_per_s: float | None = None
    """At which it was filled, checksums included; None if it was not, or by another cache."""
    disk_bytes_per_s: float | None = None
    """At which the checkpoint's disk reads by itself, measured just before; None if that is not known."""


RequestMessage = AddRequest | AbortRequest | StopCore
"""Engine replica to engine core."""
CoreMessage = RequestOutputs | EngineDead
"""Engine core to Engine replica."""
StepMessage = StepInput | StopShards
"""Engine core to shards."""
