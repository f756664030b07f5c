"""Memory plan: what an engine takes of each GPU and of the host, what must be cold, and what helps if it does not fit.

    python -m placement.memory --config CHECKPOINT --world-size 8 --gpu-gib 32 --host-gib 503 [--ep-size 1]
        [--max-model-len N] [--max-num-seqs N] [--max-num-batched-tokens N] [--num-blocks N] [--num-staging-slots N]
        [--max-resident-pages N] [--max-host-pages N] [--cache-format packed] [--json]

Exit status: 0 if it fits, 3 if it does not, 1 or 2 if the arguments are wrong. Source: `spec/model.md` sections 10 and
11; design section 6.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from model.config import CheckpointConfig, ConfigError
from placement.components import (
    DRAFT_EXPERTS,
    ENGRAM_TABLES,
    ROUTED_EXPERTS,
    VISION,
    components,
)
from placement.device_memory import (
    MemoryPlanError,
    MemorySettings,
    Term,
    gib,
    resolve_settings,
)
from placement.memory_advice import device_advice, host_advice
from placement.memory_plan import VERSION, Advice, MemoryPlan, plan_device, plan_host

DOES_NOT_FIT: Final = 3
"""Exit status."""
PLACES: Final = {
    ROUTED_EXPERTS: "pages, see below",
    DRAFT_EXPERTS: "pages, see below",
    ENGRAM_TABLES: "on the host, see below",
    VISION: "nothing: not served",
}
"""Where components are that are not on every device, for people."""
_GIB: Final = 2**30


def create_memory_plan(
    config: CheckpointConfig, settings: MemorySettings, gpu_bytes: int, host_bytes: int
) -> MemoryPlan:
    """Plan an engine.

    Args:
        config: the whole `config.json`.
        settings: of the engine.
        gpu_bytes: memory that each GPU is sold with.
        host_bytes: memory of the host.
    """
    weights = components(config, settings.world_size)
    device = plan_device(config, weights, settings, gpu_bytes)
    host = plan_host(config, settings, device, host_bytes)
    advice: list[Advice] = []
    if device.missing_bytes:
        advice += device_advice(config, weights, settings, device)
    if host.missing_bytes:
        advice += host_advice(settings, device, host)
    return MemoryPlan(
        version=VERSION,
        settings=settings,
        components=weights,
        checkpoint_bytes=sum(component.num_bytes for component in weights),
        device=device,
        host=host,
        fits=not (device.missing_bytes or host.missing_bytes),
        advice=tuple(advice),
    )


def describe(plan: MemoryPlan) -> Iterator[str]:
    """The plan as a table, line by line."""
    settings, device, host = plan.settings, plan.device, plan.host
    yield f"checkpoint: {plan.checkpoint_bytes} bytes = {gib(plan.checkpoint_bytes)}"
    yield f"  {'':<28}{'':>8}{'bytes':>18}{'each rank keeps, in bytes':>32}"
    yield f"  {'component':<28}{'tensors':>8}{'in the files':>18}{'sharded':>16}{'replicated':>16}"
    for component in plan.components:
        kept = PLACES.get(component.name) or f"{component.sharded_bytes:>16}{component.replicated_bytes:>16}"
        yield f"  {component.name:<28}{component.num_tensors:>8}{component.num_bytes:>18}{kept:>32}"
    yield ""
    yield (
        f"each of {settings.world_size} GPUs, {gib(device.gpu_bytes)}: ep_size {settings.ep_size}, max_model_len "
        f"{settings.max_model_len}, max_num_seqs {settings.max_num_seqs}, max_num_batched_tokens "
        f"{settings.max_num_batched_tokens}"
    )
    yield from _describe_terms(device.terms)
    yield from _describe_rest(device.used_bytes, device.free_bytes, device.missing_bytes)
    yield (
        f"  hot: {device.num_hot_pages} of {device.num_pages} pages of {device.page_bytes} bytes; cold: "
        f"{device.num_cold_pages} pages, {gib(device.cold_bytes)} a rank, {device.cold_share:.1%}"
    )
    yield (
        f"  KV: {device.num_kv_tokens} tokens in all; {settings.max_num_seqs} sequences of "
        f"{settings.max_model_len} would take {gib(device.all_contexts_bytes)}"
    )
    caches = device.caches
    yield (
        f"  KV caches: {caches.token_bytes:g} bytes a token and {caches.sequence_bytes} a sequence, "
        f"{gib(caches.blocks_bytes + caches.slots_bytes)} here"
    )
    yield ""
    yield f"the host, {gib(host.host_bytes)}"
    yield from _describe_terms(host.terms)
    yield from _describe_rest(host.used_bytes, host.free_bytes, host.missing_bytes)
    for rank in host.ranks:
        disk = f", {rank.num_disk_pages} pages on disk only" if rank.num_disk_pages else ""
        yield f"  rank {rank.rank}: pool {gib(rank.pool_bytes)}, Engram {gib(rank.engram_bytes)}{disk}"
    yield ""
    yield from _describe_outcome(plan)


def _describe_terms(terms: Iterable[Term]) -> Iterator[str]:
    for term in _with_summed_weights(terms):
        yield f"  {term.group:<10} {term.name:<26}{term.num_bytes / _GIB:>10.3f} GiB  {term.basis:<11} {term.note}"


def _with_summed_weights(terms: Iterable[Term]) -> list[Term]:
    """The terms with one for all sharded weights and one for all replicated ones; the components are listed above."""
    summed: dict[tuple[str, str], Term] = {}
    for term in terms:
        if term.group == "weights":
            before = summed.get(("weights", term.note))
            num_bytes = term.num_bytes + (before.num_bytes if before else 0)
            summed["weights", term.note] = Term(
                "weights", term.note, num_bytes, term.basis, "components above"
            )
        else:
            summed[term.group, term.name] = term
    return list(summed.values())


def _describe_rest(used: int, free: int, missing: int) -> Iterator[str]:
    rest = f"MISSING {gib(missing)}" if missing else f"free {gib(free)}"
    yield f"  {'used':<37}{used / _GIB:>10.3f} GiB  {rest}"


def _describe_outcome(plan: MemoryPlan) -> Iterator[str]:
    if plan.fits:
        yield "it fits"
        return
    for where, missing in (("each GPU", plan.device.missing_bytes), ("the host", plan.host.missing_bytes)):
        if missing:
            yield f"it does not fit: {where} lacks {gib(missing)}"
    for advice in plan.advice:
        enough = "enough" if advice.is_enough else "not enough by itself"
        yield (
            f"  {advice.setting} = {advice.value} frees {gib(advice.freed_bytes)} ({advice.where}), {enough}: "
            f"{advice.note}"
        )
    if not plan.advice:
        yield "  no setting helps"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--config", type=Path, required=True, help="the checkpoint's folder or its config.json"
    )
    parser.add_argument("--gpu-gib", type=float, required=True, help="memory that each GPU is sold with")
    parser.add_argument("--host-gib", type=float, required=True, help="memory of the host")
    parser.add_argument("--world-size", type=int, required=True, help="ranks, as shard.world_size")
    parser.add_argument("--ep-size", type=int, help="as shard.ep_size; by default the world size")
    for option, help_text in (
        ("--max-model-len", "as scheduler.max_model_len; by default all positions of the checkpoint"),
        ("--max-num-seqs", "as scheduler.max_num_seqs"),
        ("--max-num-batched-tokens", "as scheduler.max_num_batched_tokens"),
        ("--block-size", "as scheduler.block_size"),
        ("--num-blocks", "as scheduler.num_blocks; by default what fits"),
        ("--num-staging-slots", "as shard.num_staging_slots"),
        ("--max-resident-pages", "as shard.max_resident_pages; by default what fits"),
        ("--max-host-pages", "as expert_cache.max_host_pages; by default all"),
    ):
        parser.add_argument(option, type=int, default=argparse.SUPPRESS, help=help_text)
    parser.add_argument("--prefetch-mib", type=float, default=argparse.SUPPRESS, help="as shard.prefetch_mib")
    parser.add_argument("--json", action="store_true", help="write the plan as JSON")
    options = vars(parser.parse_args(arguments))
    path, as_json = options.pop("config"), options.pop("json")
    try:
        gpu_bytes, host_bytes = (_bytes_of(name, options.pop(name)) for name in ("gpu_gib", "host_gib"))
        config = CheckpointConfig.load(path / "config.json" if path.is_dir() else path)
        settings = resolve_settings(config.text_config, **options)
        plan = create_memory_plan(config, settings, gpu_bytes, host_bytes)
    except (ConfigError, MemoryPlanError) as error:
        sys.exit(f"placement.memory: {error}")
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in describe(plan))
    if not plan.fits:
        sys.exit(DOES_NOT_FIT)


def _bytes_of(option: str, gib_count: float) -> int:
    if not (math.isfinite(gib_count) and gib_count > 0):
        raise MemoryPlanError(f"--{option.replace('_', '-')} must be a number above 0, got {gib_count}")
    return int(gib_count * _GIB)


if __name__ == "__main__":
    main()
