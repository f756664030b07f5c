"""Expert products for many rows an expert: a weight is dequantised once for a tile of rows. Gluon.

Weights are the left operand and go from memory into registers, as in `kernels.expert_decode`; the rows, which all warps
of a program share, pass through shared memory. On compute capability 9.0 the product is `wgmma`, elsewhere `mma`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.expert_rows import GroupedRows, RowTiles
from kernels.expert_tiles import (
    UNSCALE,
    code_offsets,
    code_pointer,
    column_in_k_order,
    dequantize,
    in_row_order,
    index,
    load_codes,
    load_scales,
    scale_offsets,
    scale_pointer,
    slices,
    swiglu,
    tile_layout,
    to_bf16,
)
from kernels.formats import PageLayout

# Triton 3.9 renamed it.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class PrefillConfig(NamedTuple):
    """How the work is cut. A row's bits depend on `use_wgmma` only."""

    rows: int
    """Rows of one tile: a power of two."""
    warps: int
    """Warps of a program, each with 32 rows of weights: 4 or 8."""
    stages: int
    """Tiles of K of which a program's rows are in shared memory at a time."""
    resident_bytes: int
    """Rows of the down product that take no more shared memory stay there for `down_parts` parts of the output."""
    down_parts: int
    """Parts of `32 * warps` columns."""
    registers: int | None
    """Registers a thread; None leaves it to the compiler."""
    use_wgmma: bool
    """Whether the product is `wgmma`, which compute capability 9.0 has, or `mma`."""
    measured_on: str | None
    """Where these numbers were found to be the best; None if they have only been compiled."""


def prefill_config(mean_rows: float, capability: tuple[int, int]) -> PrefillConfig:
    """The configuration for a mean number of rows an expert."""
    rows = 32 if mean_rows < 24 else 64 if mean_rows < 256 else 128
    if capability[0] != 9:  # 99 KiB of shared memory a program
        return PrefillConfig(
            rows=min(rows, 64),
            warps=4,
            stages=3,
            resident_bytes=48 * 1024,
            down_parts=8,
            registers=None,
            use_wgmma=False,
            measured_on=None,
        )
    return PrefillConfig(
        rows=rows,
        warps=4 if rows < 128 else 8,
        stages=3,
        resident_bytes=100 * 1024,
        down_parts=8,
        registers=168 if rows == 64 else None,  # three programs a multiprocessor
        use_wgmma=True,
        measured_on="H200 (compute capability 9.0), 2026-12",
    )


def gate_up(
    x: Tensor,
    grouped: GroupedRows,
    tiles: RowTiles,
    addresses: Tensor,
    topk_weights: Tensor,
    h: Tensor,
    layout: PageLayout,
    limit: float,
    config: PrefillConfig,
) -> None:
    """`h[place] = silu(gate) * up * weight` for every place of `grouped.pairs`, in the order of K.

    Args: see `kernels.experts.expert_mlp`; `x` in the order of K (`kernels.expert_rows`).
    """
    grid = (-(-layout.intermediate_size // (16 * config.warps)), tiles.experts.numel())
    _gate_up_kernel[grid](
        *(x, grouped.pairs, grouped.offsets, grouped.counts, *tiles, addresses, topk_weights, h, limit),
        **gate_up_options(layout, topk_weights.shape[1], config),
    )


def down(
    h: Tensor,
    grouped: GroupedRows,
    tiles: RowTiles,
    addresses: Tensor,
    out: Tensor,
    layout: PageLayout,
    config: PrefillConfig,
) -> None:
    """`out[pair] = h @ down.T` for every place of `grouped.pairs`."""
    options = down_options(layout, config)
    grid = (-(-layout.hidden_size // (32 * config.warps * options["PARTS"])), tiles.experts.numel())
    _down_kernel[grid](
        *(h, grouped.pairs, grouped.offsets, grouped.counts, *tiles, addresses, out), **options
    )


def gate_up_options(layout: PageLayout, num_topk: int, config: PrefillConfig) -> dict[str, Any]:
    """What `_gate_up_kernel` is compiled for."""
    return {
        "HIDDEN": layout.hidden_size,
        "INTER": layout.intermediate_size,
        "NUM_TOPK": num_topk,
        "ROWS": config.rows,
        "WARPS": config.warps,
        "STAGES": config.stages,
        "WGMMA": config.use_wgmma,
        "num_warps": config.warps,
        "maxnreg": config.registers,
    }


def down_options(layout: PageLayout, config: PrefillConfig) -> dict[str, Any]:
    """What `_down_kernel` is compiled for."""
    inter = layout.intermediate_size
    num_tiles = inter // 128 + inter % 128 // 32
    # Rows that shared memory holds whole are loaded once for several parts of the output.
    is_resident = 256 * num_tiles * config.rows <= config.resident_bytes
    return {
        "HIDDEN": layout.hidden_size,
        "INTER": inter,
        "ROWS": config.rows,
        "WARPS": config.warps,
        "STAGES": num_tiles if is_resident else config.stages,
        "PARTS": config.down_parts if is_resident else 1,
        "WGMMA": config.use_wgmma,
        "num_warps": config.warps,
        "maxnreg": config.registers,
    }


@gluon.constexpr_function
def _mma_layout(warps: int, rows: int, use_wgmma: bool) -> gl.NVMMADistributedLayout:
    if use_wgmma:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def _multiply(weights, rows, acc, WGMMA: gl.constexpr):
    """Start `acc + weights @ rows.T`."""
    LAYOUT: gl.constexpr = acc.type.layout
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True)
    if WGMMA:
        return warpgroup_mma(weights, rows.permute((1, 0)), acc, is_async=True)
    else:
        return mma_v2(weights, rows.permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, 2)), acc)


@gluon.jit
def _wait(acc, WGMMA: gl.constexpr):
    if WGMMA:
        return warpgroup_mma_wait(0, deps=[acc])
    else:
        return acc


@gluon.jit
def _split_words(words, BLOCKS: gl.constexpr):
    """Words 0 and 1, and 2 and 3, of every lane."""
    words = gl.reshape(words, [BLOCKS, 2, 8, 4, 2, 2])
    return gl.split(gl.permute(words, (0, 1, 2, 3, 5, 4)))


@gluon.jit
def _row_offsets(
    pairs,
    first_row,
    num_rows,
    ROWS: gl.constexpr,
    NUM_TOPK: gl.constexpr,
    K: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Where a tile's rows stand in `x`, `[ROWS, 64]`, and which of them exist, `[ROWS, 1]`.

    The tile has places `first_row` to `first_row + num_rows`, at most ROWS; the row of a place is row
    `pairs[place] // NUM_TOPK` of `x`, or row `place` if NUM_TOPK is 0.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    is_row = row < num_rows
    source = first_row + row
    if NUM_TOPK > 0:
        source = gl.load(pairs + source, mask=is_row, other=0) // NUM_TOPK
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)
    return gl.expand_dims(source * K, 1) + column, gl.expand_dims(is_row, 1)


@gluon.jit
def _copy(buffers, tile, x, at, mask, WIDE: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr):
    """Start copying the columns of tile `tile` of K, if there is one, to its stage."""
    if tile < WIDE:
        _copy_wide(buffers, tile, x, at + tile * 128, mask, STAGES)
    elif tile < TILES:
        _copy_narrow(buffers, tile, x, at + WIDE * 128 + (tile - WIDE) * 32, mask, STAGES)


@gluon.jit
def _copy_wide(buffers, tile, x, at, mask, STAGES: gl.constexpr):
    for half in gl.static_range(2):
        pointers = x + gl.max_contiguous(gl.multiple_of(at + half * 64, [1, 8]), [1, 8])
        _async_load(buffers.index(tile % STAGES * 2 + half), pointers, mask=mask)


@gluon.jit
def _copy_narrow(buffers, tile, x, at, mask, STAGES: gl.constexpr):
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, at.type.layout)), 0)
    pointers = x + gl.max_contiguous(gl.multiple_of(at, [1, 8]), [1, 8])
    _async_load(buffers.index(tile % STAGES * 2), pointers, mask=mask & (column < 32))


@gluon.jit
def _allocate(ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for rows: `[2 * STAGES, ROWS, 64]`, two halves of a wide tile of K in a stage."""
    return gl.allocate_shared_memory(
        gl.bfloat16, [2 * STAGES, ROWS, 64], gl.NVMMASharedLayout(128, 16, rank=2)
    )


@gluon.jit
def _start_copies(buffers, x, at, mask, K: gl.constexpr, STAGES: gl.constexpr, WGMMA: gl.constexpr):
    """Copy all tiles of K and wait for them, or start with the first if there are more than stages."""
    WIDE: gl.constexpr = K // 128
    TILES: gl.constexpr = WIDE + K % 128 // 32
    STREAM: gl.constexpr = TILES > STAGES
    for tile in gl.static_range(STAGES - 1 if STREAM else TILES):
        _copy(buffers, tile, x, at, mask, WIDE, TILES, STAGES)
        async_copy.commit_group()
    if not STREAM:
        async_copy.wait_group(0)
        if WGMMA:
            fence_async_shared()


@gluon.jit
def _allocate(ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for rows: `[2 * STAGES, ROWS, 64]`, two halves of a wide tile of K in a stage."""
    return gl.allocate_shared_memory(
        gl.bfloat16, [2 * STAGES, ROWS, 64], gl.NVMMASharedLayout(128, 16, rank=2)
    )


@gluon.jit
def _product(
    codes,
    scales,
    code_at,
    scale_at,
    code_mask,
    scale_mask,
    x,
    x_at,
    x_mask,
    buffers,
    K: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    WGMMA: gl.constexpr,
):
    """Weights times rows.

    `codes` and `scales` point to sections, in which the blocks begin at `code_at`, `[2 * WARPS, 1, 1, 1, 1]`, and
    `scale_at`, `[2 * WARPS, 1, 1]`; the masks tell which blocks exist. `x` holds rows in the order of K, `x_at` and
    `x_mask` are those of `_row_offsets`. If `buffers` has as many stages as K has tiles, all rows have arrived
    there; else the first `STAGES - 1` tiles are on their way (`_start_copies`).

    Returns: `[32 * WARPS, ROWS]` float32, to be multiplied with UNSCALE.
    """
    BLOCKS: gl.constexpr = 2 * WARPS
    ROWS: gl.constexpr = buffers.shape[1]
    WIDE: gl.constexpr = K // 128
    NARROW: gl.constexpr = K % 128 // 32
    TILES: gl.constexpr = WIDE + NARROW
    STREAM: gl.constexpr = TILES > STAGES
    TILE: gl.constexpr = tile_layout(BLOCKS, 4, 4, WARPS)
    HALF: gl.constexpr = tile_layout(BLOCKS, 4, 2, WARPS)
    N_TILE: gl.constexpr = tile_layout(BLOCKS, 4, 1, WARPS)
    acc = gl.zeros([16 * BLOCKS, ROWS], gl.float32, _mma_layout(WARPS, ROWS, WGMMA))
    if WIDE > 0:
        w_code_at = code_at + code_offsets(4, 4, TILE)
        w_scale_at = scale_at + scale_offsets(4, 4, TILE)
        words = load_codes(codes, w_code_at, code_mask)
        scale_pairs = load_scales(scales, w_scale_at, scale_mask)
        next_words = load_codes(codes, w_code_at + 256, code_mask & (WIDE > 1))
        next_pairs = load_scales(scales, w_scale_at + 32, scale_mask & (WIDE > 1))
        low, high = _split_words(words, BLOCKS)
        weights = gl.reshape(dequantize(low, scale_pairs, HALF), [16 * BLOCKS, 64])
        for tile in range(WIDE):
            if STREAM:
                # Then every warp has finished with the tile before, whose stage takes the next copy.
                async_copy.wait_group(STAGES - 2)
                if WGMMA:
                    fence_async_shared()
            buffer = tile % STAGES * 2
            running = _multiply(weights, buffers.index(buffer), acc, WGMMA)
            high_weights = gl.reshape(dequantize(high, scale_pairs, HALF), [16 * BLOCKS, 64])
            words = next_words
            scale_pairs = next_pairs
            next_words = load_codes(codes, w_code_at + (tile + 2) * 256, code_mask & (tile + 2 < WIDE))
            next_pairs = load_scales(scales, w_scale_at + (tile + 2) * 32, scale_mask & (tile + 2 < WIDE))
            acc = _wait(running, WGMMA)
            running = _multiply(high_weights, buffers.index(buffer + 1), acc, WGMMA)
            low, high = _split_words(words, BLOCKS)
            weights = gl.reshape(dequantize(low, scale_pairs, HALF), [16 * BLOCKS, 64])
            acc = _wait(running, WGMMA)
            if STREAM:
                _copy(buffers, tile + STAGES - 1, x, x_at, x_mask, WIDE, TILES, STAGES)
                async_copy.commit_group()
    N_CODE: gl.constexpr = slices(N_TILE, 6, (5,))
    N_SCALE: gl.constexpr = slices(N_TILE, 6, (1, 4, 5))
    n_code_at = gl.convert_layout(code_at, N_CODE, assert_trivial=True) + code_offsets(4, 1, N_TILE)
    n_scale_at = gl.convert_layout(scale_at, N_SCALE, assert_trivial=True) + scale_offsets(4, 1, N_TILE)
    n_code_mask = gl.convert_layout(code_mask, N_CODE, assert_trivial=True)
    n_scale_mask = gl.convert_layout(scale_mask, N_SCALE, assert_trivial=True)
    for narrow in gl.static_range(NARROW):
        n_words = load_codes(codes, n_code_at + WIDE * 256 + narrow * 64, n_code_mask)
        n_pairs = load_scales(scales, n_scale_at + WIDE * 32 + narrow * 8, n_scale_mask)
        n_weights = gl.reshape(dequantize(n_words, n_pairs, N_TILE), [16 * BLOCKS, 32])
        if STREAM:
            async_copy.wait_group(STAGES - 2)
            if WGMMA:
                fence_async_shared()
        rows = buffers.index((WIDE + narrow) % STAGES * 2).slice(0, 32, dim=1)
        acc = _wait(_multiply(n_weights, rows, acc, WGMMA), WGMMA)
        if STREAM:
            _copy(buffers, WIDE + narrow + STAGES - 1, x, x_at, x_mask, WIDE, TILES, STAGES)
            async_copy.commit_group()
    return acc


@gluon.jit
def _gate_up_kernel(
    x,
    pairs,
    offsets,
    counts,
    tile_experts,
    tile_starts,
    addresses,
    topk_weights,
    h,
    limit,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    NUM_TOPK: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    WGMMA: gl.constexpr,
):
    """`16 * WARPS` columns of `h` for one tile of rows."""
    CODES: gl.constexpr = HIDDEN * INTER // 2
    SCALES: gl.constexpr = HIDDEN * INTER // 32
    TILE: gl.constexpr = tile_layout(2 * WARPS, 4, 4, WARPS)
    expert = gl.load(tile_experts + gl.program_id(1))
    if expert >= 0:
        start = gl.load(tile_starts + gl.program_id(1))
        page = gl.multiple_of(gl.load(addresses + expert), 16)
        first_row = gl.load(offsets + expert) + start
        num_rows = gl.load(counts + expert) - start
        x_at, x_mask = _row_offsets(pairs, first_row, num_rows, ROWS, NUM_TOPK, HIDDEN, WARPS)
        buffers = _allocate(ROWS, STAGES)
        _start_copies(buffers, x, x_at, x_mask, HIDDEN, STAGES, WGMMA)
        # The first half of the blocks are the gate's, the second half the same of up.
        first_block = gl.program_id(0) * WARPS
        code_block = index(2 * WARPS, 0, 5, slices(TILE, 6, (5,)))
        scale_block = index(2 * WARPS, 0, 3, slices(TILE, 6, (1, 4, 5)))
        code_at = (first_block + code_block % WARPS) * (HIDDEN * 2) + code_block // WARPS * (CODES // 4)
        scale_at = (first_block + scale_block % WARPS) * (HIDDEN // 4) + scale_block // WARPS * (SCALES // 2)
        acc = _product(
            code_pointer(page, 0),
            scale_pointer(page, 2 * CODES),
            code_at,
            scale_at,
            first_block + code_block % WARPS < INTER // 16,
            first_block + scale_block % WARPS < INTER // 16,
            x,
            x_at,
            x_mask,
            buffers,
            HIDDEN,
            WARPS,
            STAGES,
            WGMMA,
        )
        both = gl.reshape(in_row_order(acc * UNSCALE, WARPS), [2, 16 * WARPS, ROWS])
        gate, up = gl.split(gl.permute(both, (1, 2, 0)))
        LAYOUT: gl.constexpr = gate.type.layout
        column = first_block * 16 + index(16 * WARPS, 0, 2, LAYOUT)
        row = index(ROWS, 1, 2, LAYOUT)
        is_row = row < num_rows
        pair = gl.load(pairs + first_row + row, mask=is_row, other=0)
        value = swiglu(gate, up, limit) * gl.load(topk_weights + pair, mask=is_row, other=0.0)
        to = (first_row + row) * INTER + column_in_k_order(column, INTER)
        gl.store(h + to, to_bf16(value), mask=is_row & (column < INTER))


@gluon.jit
def _down_kernel(
    h,
    pairs,
    offsets,
    counts,
    tile_experts,
    tile_starts,
    addresses,
    out,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    WGMMA: gl.constexpr,
):
    """PARTS times `32 * WARPS` columns of the output for one tile of rows."""
    CODES: gl.constexpr = HIDDEN * INTER // 2
    SCALES: gl.constexpr = HIDDEN * INTER // 32
    TILES: gl.constexpr = INTER // 128 + INTER % 128 // 32
    TILE: gl.constexpr = tile_layout(2 * WARPS, 4, 4, WARPS)
    gl.static_assert(PARTS == 1 or TILES <= STAGES, "rows that stream through serve one part")
    expert = gl.load(tile_experts + gl.program_id(1))
    if expert >= 0:
        start = gl.load(tile_starts + gl.program_id(1))
        page = gl.multiple_of(gl.load(addresses + expert), 16)
        first_row = gl.load(offsets + expert) + start
        num_rows = gl.load(counts + expert) - start
        h_at, h_mask = _row_offsets(pairs, first_row, num_rows, ROWS, 0, INTER, WARPS)
        buffers = _allocate(ROWS, STAGES)
        _start_copies(buffers, h, h_at, h_mask, INTER, STAGES, WGMMA)
        for part in range(PARTS):
            first_block = (gl.program_id(0) * PARTS + part) * (2 * WARPS)
            code_block = first_block + index(2 * WARPS, 0, 5, slices(TILE, 6, (5,)))
            scale_block = first_block + index(2 * WARPS, 0, 3, slices(TILE, 6, (1, 4, 5)))
            acc = _product(
                code_pointer(page, 2 * (CODES + SCALES)),
                scale_pointer(page, 3 * CODES + 2 * SCALES),
                code_block * (INTER * 2),
                scale_block * (INTER // 4),
                code_block < HIDDEN // 16,
                scale_block < HIDDEN // 16,
                h,
                h_at,
                h_mask,
                buffers,
                INTER,
                WARPS,
                STAGES,
                WGMMA,
            )
            product = to_bf16(in_row_order(acc * UNSCALE, WARPS))
            SUM: gl.constexpr = product.type.layout
            row = index(ROWS, 1, 2, SUM)
            is_row = row < num_rows
            pair = gl.load(pairs + first_row + row, mask=is_row, other=0)
            column = first_block * 16 + index(32 * WARPS, 0, 2, SUM)
            mask = is_row & (column < HIDDEN)
            gl.store(out + pair * HIDDEN + column, product, mask=mask)
