"""Expert products for few rows an expert: every weight is used once, so all that counts is how fast it is read. Gluon.

Weights go from memory straight into the registers that `mma` reads, and activations likewise; shared memory only serves
the sums of warps that share a row. Runs on every NVIDIA GPU since compute capability 8.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.expert_rows import GroupedRows
from kernels.expert_tiles import (
    UNSCALE,
    activation_layout,
    activation_offsets,
    code_offsets,
    code_pointer,
    column_for_registers,
    dequantize,
    in_row_order,
    index,
    load_activations,
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


class DecodeConfig(NamedTuple):
    """How the work is cut. A row's bits depend on `gate_up_split` only."""

    rows: int
    """Rows of one product: 8 or 16. More cost registers, fewer read a page again; the bits are the same."""
    gate_up_split: int
    """Warps that split K of a gate and up tile. It is an order of additions: only the page may decide it."""
    gate_up_registers: int | None
    """Registers a thread; None leaves it to the compiler."""
    down_warps: int
    """Blocks of 16 columns side by side in one program."""
    down_blocks: int
    """Such blocks one after the other in one program."""
    down_registers: int | None
    """Registers a thread; None leaves it to the compiler."""
    overlap_launches: bool
    """Whether a kernel may start, and read weights, while the one before it ends (compute capability 9.0)."""
    measured_on: str = "H200 (compute capability 9.0), 2026-12"
    """Where these numbers were found to be the best."""


def decode_config(layout: PageLayout, mean_rows: float, capability: tuple[int, int]) -> DecodeConfig:
    """The configuration for a page layout and a mean number of rows an expert."""
    rows = 8 if mean_rows <= 7 else 16
    is_slice = layout.intermediate_size <= 512
    return DecodeConfig(
        rows=rows,
        gate_up_split=4 if layout.intermediate_size <= 1152 else 2,
        gate_up_registers=128 if rows == 8 else None,
        down_warps=4 if is_slice else 2,
        down_blocks=1,
        down_registers=None,
        overlap_launches=capability >= (9, 0),
    )


def gate_up(
    x: Tensor,
    grouped: GroupedRows,
    addresses: Tensor,
    topk_weights: Tensor,
    h: Tensor,
    layout: PageLayout,
    limit: float,
    config: DecodeConfig,
) -> None:
    """`h[place] = silu(gate) * up * weight` for every place of `grouped.pairs`, permuted for `down`.

    Args: see `kernels.experts.expert_mlp`; `x` is permuted for loads into registers (`kernels.expert_rows`).
    """
    grid = (layout.intermediate_size // 16, grouped.active.numel())
    _gate_up_kernel[grid](
        *(x, *grouped, addresses, topk_weights, h, limit),
        **gate_up_options(layout, topk_weights.shape[1], config),
    )


def down(
    h: Tensor, grouped: GroupedRows, addresses: Tensor, out: Tensor, layout: PageLayout, config: DecodeConfig
) -> None:
    """`out[pair] = h @ down.T` for every place of `grouped.pairs`."""
    columns = 16 * config.down_warps * config.down_blocks
    grid = (-(-layout.hidden_size // columns), grouped.active.numel())
    _down_kernel[grid](*(h, *grouped, addresses, out), **down_options(layout, config))


def gate_up_options(layout: PageLayout, num_topk: int, config: DecodeConfig) -> dict[str, Any]:
    """What `_gate_up_kernel` is compiled for."""
    return {
        "HIDDEN": layout.hidden_size,
        "INTER": layout.intermediate_size,
        "NUM_TOPK": num_topk,
        "ROWS": config.rows,
        "SPLIT": config.gate_up_split,
        "OVERLAP": config.overlap_launches,
        "num_warps": config.gate_up_split,
        "maxnreg": config.gate_up_registers,
        "launch_pdl": config.overlap_launches,
    }


def down_options(layout: PageLayout, config: DecodeConfig) -> dict[str, Any]:
    """What `_down_kernel` is compiled for."""
    return {
        "HIDDEN": layout.hidden_size,
        "INTER": layout.intermediate_size,
        "ROWS": config.rows,
        "WARPS": config.down_warps,
        "BLOCKS": config.down_blocks,
        "OVERLAP": config.overlap_launches,
        "num_warps": config.down_warps,
        "maxnreg": config.down_registers,
        "launch_pdl": config.overlap_launches,
    }


@gluon.jit
def _gate_up_kernel(
    x,
    pairs,
    active,
    offsets,
    counts,
    addresses,
    topk_weights,
    h,
    limit,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    NUM_TOPK: gl.constexpr,
    ROWS: gl.constexpr,
    SPLIT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """16 columns of `h` of one expert, all its rows. The warps split K."""
    WIDE: gl.constexpr = HIDDEN // 128
    NARROW: gl.constexpr = HIDDEN % 128 // 32
    STEPS: gl.constexpr = (WIDE + 2 * SPLIT - 1) // (2 * SPLIT)  # of two wide tiles
    CODES: gl.constexpr = HIDDEN * INTER // 2
    SCALES: gl.constexpr = HIDDEN * INTER // 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLIT, 1, 1], [1, 16, 8])
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = gl.load(active + gl.program_id(1))
    if expert >= 0:
        block = gl.program_id(0)
        page = gl.multiple_of(gl.load(addresses + expert), 16)
        gate_codes = code_pointer(page + block * (HIDDEN * 8), 0)
        up_codes = code_pointer(page + block * (HIDDEN * 8), CODES)
        gate_scales = scale_pointer(page + block * (HIDDEN // 2), 2 * CODES)
        up_scales = scale_pointer(page + block * (HIDDEN // 2), 2 * CODES + SCALES)
        first = gl.load(offsets + expert)
        count = gl.load(counts + expert)
        for start in range(0, count, ROWS):
            gate = gl.zeros([SPLIT, 16, ROWS], gl.float32, MMA)
            up = gl.zeros([SPLIT, 16, ROWS], gl.float32, MMA)
            if WIDE > 0:
                TILE: gl.constexpr = tile_layout(SPLIT, 8, 4, SPLIT)
                X: gl.constexpr = activation_layout(SPLIT, ROWS, 8, 4, SPLIT)
                CODE: gl.constexpr = slices(TILE, 6, (5,))
                SCALE: gl.constexpr = slices(TILE, 6, (1, 4, 5))
                code_tile = index(SPLIT, 0, 5, CODE) * (2 * STEPS) + index(8, 3, 5, CODE) // 4
                scale_tile = index(SPLIT, 0, 3, SCALE) * (2 * STEPS) + index(8, 2, 3, SCALE) // 4
                x_tile = index(SPLIT, 0, 6, X) * (2 * STEPS) + index(2, 2, 6, X)
                code_at = index(SPLIT, 0, 5, CODE) * (512 * STEPS) + code_offsets(8, 4, TILE)
                scale_at = index(SPLIT, 0, 3, SCALE) * (64 * STEPS) + scale_offsets(8, 4, TILE)
                x_place = start + index(ROWS, 1, 6, X)
                x_mask = x_place < count
                x_row = gl.load(pairs + first + x_place, mask=x_mask, other=0) // NUM_TOPK * HIDDEN
                x_at = x_row + index(SPLIT, 0, 6, X) * (256 * STEPS) + activation_offsets(8, 4, X)
                next_gate = load_codes(gate_codes, code_at, code_tile < WIDE)
                next_up = load_codes(up_codes, code_at, code_tile < WIDE)
                next_gate_scales = load_scales(gate_scales, scale_at, scale_tile < WIDE)
                next_up_scales = load_scales(up_scales, scale_at, scale_tile < WIDE)
                for step in range(STEPS):
                    gate_words = next_gate
                    up_words = next_up
                    gate_pairs = next_gate_scales
                    up_pairs = next_up_scales
                    ahead = step + 1
                    code_mask = (code_tile + 2 * ahead < WIDE) & (ahead < STEPS)
                    scale_mask = (scale_tile + 2 * ahead < WIDE) & (ahead < STEPS)
                    next_gate = load_codes(gate_codes, code_at + ahead * 512, code_mask)
                    next_up = load_codes(up_codes, code_at + ahead * 512, code_mask)
                    next_gate_scales = load_scales(gate_scales, scale_at + ahead * 64, scale_mask)
                    next_up_scales = load_scales(up_scales, scale_at + ahead * 64, scale_mask)
                    values = load_activations(x, x_at + step * 256, x_mask & (x_tile + 2 * step < WIDE))
                    gate = multiply(gate, gate_words, gate_pairs, values, TILE, MMA)
                    up = multiply(up, up_words, up_pairs, values, TILE, MMA)
            if NARROW > 0:
                N_TILE: gl.constexpr = tile_layout(SPLIT, 4, 1, SPLIT)
                N_X: gl.constexpr = activation_layout(SPLIT, ROWS, 4, 1, SPLIT)
                N_CODE: gl.constexpr = slices(N_TILE, 6, (5,))
                N_SCALE: gl.constexpr = slices(N_TILE, 6, (1, 4, 5))
                n_place = start + index(ROWS, 1, 6, N_X)
                n_row = gl.load(pairs + first + n_place, mask=n_place < count, other=0) // NUM_TOPK * HIDDEN
                for turn in gl.static_range((NARROW + SPLIT - 1) // SPLIT):
                    n_code_tile = turn * SPLIT + index(SPLIT, 0, 5, N_CODE)
                    n_scale_tile = turn * SPLIT + index(SPLIT, 0, 3, N_SCALE)
                    n_x_tile = turn * SPLIT + index(SPLIT, 0, 6, N_X)
                    n_code_at = WIDE * 256 + n_code_tile * 64 + code_offsets(4, 1, N_TILE)
                    n_scale_at = WIDE * 32 + n_scale_tile * 8 + scale_offsets(4, 1, N_TILE)
                    n_x_at = n_row + WIDE * 128 + n_x_tile * 32 + activation_offsets(4, 1, N_X)
                    n_values = load_activations(x, n_x_at, (n_place < count) & (n_x_tile < NARROW))
                    n_words = load_codes(gate_codes, n_code_at, n_code_tile < NARROW)
                    n_pairs = load_scales(gate_scales, n_scale_at, n_scale_tile < NARROW)
                    gate = multiply(gate, n_words, n_pairs, n_values, N_TILE, MMA)
                    n_words = load_codes(up_codes, n_code_at, n_code_tile < NARROW)
                    n_pairs = load_scales(up_scales, n_scale_at, n_scale_tile < NARROW)
                    up = multiply(up, n_words, n_pairs, n_values, N_TILE, MMA)
            SUM: gl.constexpr = gl.SliceLayout(0, MMA)
            gate_sum = gl.sum(gate, axis=0) * UNSCALE
            up_sum = gl.sum(up, axis=0) * UNSCALE
            row = index(16, 0, 2, SUM)
            column = block * 16 + row % 8 * 2 + row // 8
            place = start + index(ROWS, 1, 2, SUM)
            mask = place < count
            pair = gl.load(pairs + first + place, mask=mask, other=0)
            value = swiglu(gate_sum, up_sum, limit) * gl.load(topk_weights + pair, mask=mask, other=0.0)
            to = (first + place) * INTER + column_for_registers(column, INTER)
            gl.store(h + to, to_bf16(value), mask=mask)


@gluon.jit
def multiply(acc, words, scales, values, TILE: gl.constexpr, MMA: gl.constexpr):
    """`acc` plus the product of tiles and activations."""
    weights = gl.convert_layout(
        dequantize(words, scales, TILE), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True
    )
    values = gl.convert_layout(values, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)
    return mma_v2(weights, values, acc)


@gluon.jit
def _down_kernel(
    h,
    pairs,
    active,
    offsets,
    counts,
    addresses,
    out,
    HIDDEN: gl.constexpr,
    INTER: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """`16 * WARPS * BLOCKS` columns of the output of one expert, all its rows; a warp has all of K."""
    WIDE: gl.constexpr = INTER // 128
    NARROW: gl.constexpr = INTER % 128 // 32
    STEPS: gl.constexpr = (WIDE + 1) // 2  # of two wide tiles
    CODES: gl.constexpr = HIDDEN * INTER // 2
    SCALES: gl.constexpr = HIDDEN * INTER // 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    TILE: gl.constexpr = tile_layout(WARPS, 8, 4, WARPS)
    X: gl.constexpr = activation_layout(WARPS, ROWS, 8, 4, WARPS)
    CODE: gl.constexpr = slices(TILE, 6, (5,))
    SCALE: gl.constexpr = slices(TILE, 6, (1, 4, 5))
    N_TILE: gl.constexpr = tile_layout(WARPS, 4, 1, WARPS)
    N_X: gl.constexpr = activation_layout(WARPS, ROWS, 4, 1, WARPS)
    N_CODE: gl.constexpr = slices(N_TILE, 6, (5,))
    N_SCALE: gl.constexpr = slices(N_TILE, 6, (1, 4, 5))
    if OVERLAP:
        gdc_launch_dependents()
    # The groups were complete before the gate and up product, on which this one waits, began.
    expert = gl.load(active + gl.program_id(1))
    if OVERLAP and expert < 0:
        gdc_wait()
    if expert >= 0:
        # A warp's blocks follow each other, so that it reads on where it was.
        first_block = gl.program_id(0) * (WARPS * BLOCKS)
        page = gl.multiple_of(gl.load(addresses + expert), 16)
        codes = code_pointer(page, 2 * (CODES + SCALES))
        scales = scale_pointer(page, 3 * CODES + 2 * SCALES)
        first = gl.load(offsets + expert)
        count = gl.load(counts + expert)
        code_block = first_block + index(WARPS, 0, 5, CODE) * BLOCKS
        scale_block = first_block + index(WARPS, 0, 3, SCALE) * BLOCKS
        code_tile = index(8, 3, 5, CODE) // 4
        scale_tile = index(8, 2, 3, SCALE) // 4
        code_at = code_block * (INTER * 2) + code_offsets(8, 4, TILE)
        scale_at = scale_block * (INTER // 4) + scale_offsets(8, 4, TILE)
        n_code_block = first_block + index(WARPS, 0, 5, N_CODE) * BLOCKS
        n_scale_block = first_block + index(WARPS, 0, 3, N_SCALE) * BLOCKS
        n_code_at = n_code_block * (INTER * 2) + WIDE * 256 + code_offsets(4, 1, N_TILE)
        n_scale_at = n_scale_block * (INTER // 4) + WIDE * 32 + scale_offsets(4, 1, N_TILE)
        for start in range(0, count, ROWS):
            x_place = start + index(ROWS, 1, 6, X)
            x_at = (first + x_place) * INTER + activation_offsets(8, 4, X) + index(WARPS, 0, 6, X) * 0
            n_place = start + index(ROWS, 1, 6, N_X)
            n_at = (first + n_place) * INTER + WIDE * 128 + activation_offsets(4, 1, N_X)
            n_at += index(WARPS, 0, 6, N_X) * 0
            next_words = load_codes(codes, code_at, (code_block < HIDDEN // 16) & (code_tile < WIDE))
            next_pairs = load_scales(scales, scale_at, (scale_block < HIDDEN // 16) & (scale_tile < WIDE))
            if OVERLAP:
                gdc_wait()  # for `h`; the first weights are on their way
            for block in range(BLOCKS):
                acc = gl.zeros([WARPS, 16, ROWS], gl.float32, MMA)
                for narrow in gl.static_range(NARROW):
                    n_at_code = n_code_at + block * (INTER * 2) + narrow * 64
                    n_words = load_codes(codes, n_at_code, n_code_block + block < HIDDEN // 16)
                    n_at_scale = n_scale_at + block * (INTER // 4) + narrow * 8
                    n_pairs = load_scales(scales, n_at_scale, n_scale_block + block < HIDDEN // 16)
                    n_values = load_activations(h, n_at + narrow * 32, n_place < count)
                    acc = multiply(acc, n_words, n_pairs, n_values, N_TILE, MMA)
                for step in range(STEPS):
                    words = next_words
                    scale_pairs = next_pairs
                    ahead = step + 1
                    ahead_block = block + ahead // STEPS
                    ahead = ahead % STEPS
                    code_mask = (code_block + ahead_block < HIDDEN // 16) & (code_tile + 2 * ahead < WIDE)
                    scale_mask = (scale_block + ahead_block < HIDDEN // 16) & (scale_tile + 2 * ahead < WIDE)
                    code_mask = code_mask & (ahead_block < BLOCKS)
                    scale_mask = scale_mask & (ahead_block < BLOCKS)
                    code_to = code_at + ahead_block * (INTER * 2) + ahead * 512
                    next_words = load_codes(codes, code_to, code_mask)
                    scale_to = scale_at + ahead_block * (INTER // 4) + ahead * 64
                    next_pairs = load_scales(scales, scale_to, scale_mask)
                    values_mask = (x_place < count) & (index(2, 2, 6, X) + 2 * step < WIDE)
                    values = load_activations(h, x_at + step * 256, values_mask)
                    acc = multiply(acc, words, scale_pairs, values, TILE, MMA)
                product = in_row_order(gl.reshape(acc * UNSCALE, [WARPS * 16, ROWS]), WARPS)
                SUM: gl.constexpr = product.type.layout
                row = index(WARPS * 16, 0, 2, SUM)
                column = (first_block + row // 16 * BLOCKS + block) * 16 + row % 16
                place = start + index(ROWS, 1, 2, SUM)
                mask = (place < count) & (column < HIDDEN)
                pair = gl.load(pairs + first + place, mask=place < count, other=0)
                gl.store(out + pair * HIDDEN + column, to_bf16(product), mask=mask)
