"""Dense products of BF16 rows with FP8 or BF16 weights. Source: `spec/model.md` section 0 (L8, L16, L32).

Up to MAX_ROWS_OF_KERNEL rows a product takes as long as reading its weights: one kernel streams them, with the rows as
the narrow operand. Each program has a tile of outputs and a part of the inputs; the last one of a tile that finishes
adds the parts in order. For more rows the weights become BF16 in memory that cuBLAS reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.activation import fake_quantize_q8, overlaps_launches, round_to_bf16
from kernels.formats import FP8_TILE, MXFP4_GROUP
from kernels.tensors import Fp8Matrix, Matrix

MAX_ROWS_OF_KERNEL = 64
MAX_TILES = 4096
"""Tiles of outputs whose parts one product may add: counters of a device."""
_PROGRAMS = 192
"""Programs that a product aims at: about three for two multiprocessors of an H200."""
_NARROW_OUT = 1056
_NARROW_IN = 512
_ROUNDED_BLOCK = 4096
"""Values of a program that only dequantises or rounds."""

_arrivals: dict[torch.device, Tensor] = {}


class LinearConfig(NamedTuple):
    """How a product is cut into programs. The first three decide the order of additions."""

    block_out: int
    """Outputs of a program, a multiple of 32."""
    block_in: int
    """Inputs of one step of its loop, a multiple of 32."""
    num_splits: int
    """Programs that share the inputs of a tile of outputs."""
    num_stages: int
    num_warps: int


def linear_config(size_out: int, size_in: int, num_rows: int, capability: tuple[int, int]) -> LinearConfig:
    """Tile sizes for a shape.

    Not measured yet: `python -m benchmarks.dense` is to say. What decides the order of additions must depend on the
    weight's shape alone, so that a row has the same bits in every batch; the other arguments may choose the rest.
    """
    block_out = 32 if size_out <= _NARROW_OUT or size_in <= _NARROW_IN else 64
    block_in = 128
    steps = triton.cdiv(size_in, block_in)
    tiles = triton.cdiv(size_out, block_out)
    # Parts of equal length, as near as they come to the wanted number of programs.
    divisors = [n for n in range(1, steps + 1) if steps % n == 0]
    num_splits = min(divisors, key=lambda n: abs(_PROGRAMS - tiles * n) / (tiles * n))
    # Stages beyond the steps of a program are memory for nothing; 99 KB of compute capability 12.0 hold four.
    num_stages = min(max(2, steps // num_splits), 4)
    return LinearConfig(block_out, block_in, num_splits, num_stages, 4)


def linear(
    x: Tensor,
    w: Matrix,
    *,
    out_dtype: torch.dtype = torch.float32,
    quantize: bool = False,
    config: LinearConfig | None = None,
) -> Tensor:
    """`x @ w.T`, accumulated in fp32.

    Args:
        x: `[num_rows, in]` bf16, last dimension contiguous; fake-quantised by the caller where the spec says so.
        w: bf16 `[out, in]`, contiguous, or FP8 codes with scales; every value of these is exact in BF16.
        out_dtype: float32, or bfloat16 for one rounding.
        quantize: round to BF16, then Q8 in groups of 32 columns; `out` a multiple of 32, the result bf16.
        config: tile sizes of the kernel for few rows; `linear_config` chooses them if None.
    Returns: `[num_rows, out]`; of up to MAX_ROWS_OF_KERNEL rows, row `i` depends on `x[i]` and `w` only.
    Raises: ValueError if a dtype, shape or stride differs from the above.
    Notes: products of a device must run one after the other, since they count arrivals in the same memory. A product
        must have run once before a graph captures one. BF16 results of many rows are rounded once if
        `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is off.
    """
    codes, scales = w if isinstance(w, Fp8Matrix) else (w, None)
    _check(x, codes, scales, out_dtype, quantize)
    num_rows, size_out = x.shape[0], codes.shape[0]
    rounds = quantize or out_dtype == torch.bfloat16
    out = x.new_empty(num_rows, size_out, dtype=torch.bfloat16 if rounds else torch.float32)
    if num_rows == 0:
        return out
    if num_rows <= MAX_ROWS_OF_KERNEL:
        _multiply_few(x, codes, scales, out, quantize, config)
        return out
    weight = codes if scales is None else dequantize(codes, scales)
    if x.device.type == "cpu":
        product = x.to(torch.float32) @ weight.to(torch.float32).T
    elif rounds and not quantize:
        return torch.mm(x, weight.T)
    else:
        product = torch.mm(x, weight.T, out_dtype=torch.float32)
    if not rounds:
        return product
    blocks = triton.cdiv(out.numel(), _ROUNDED_BLOCK)
    _round_kernel[(blocks,)](product, out, out.numel(), QUANTIZE=quantize, BLOCK=_ROUNDED_BLOCK, num_warps=4)
    return out


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """FP8 codes `[out, in]` with scales `[out // 32, in // 32]` as bf16 `[out, in]`, exact."""
    out = torch.empty_like(codes, dtype=torch.bfloat16)
    size_out, size_in = codes.shape
    columns = 128
    grid = (size_out // FP8_TILE, triton.cdiv(size_in, columns))
    _dequantize_kernel[grid](codes, scales, out, IN=size_in, COLUMNS=columns, num_warps=4)
    return out


def _check(x: Tensor, codes: Tensor, scales: Tensor | None, out_dtype: torch.dtype, quantize: bool) -> None:
    size_out, size_in = codes.shape
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != size_in or x.stride(1) != 1:
        raise ValueError(
            f"x must be bfloat16 [num_rows, {size_in}] with contiguous rows, "
            f"got {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
        )
    if (
        codes.dtype != (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
        or not codes.is_contiguous()
    ):
        raise ValueError(f"w must be contiguous, bfloat16 or FP8 codes with scales, got {codes.dtype}")
    if scales is not None:
        shape = (size_out // FP8_TILE, size_in // FP8_TILE)
        if size_out % FP8_TILE or size_in % FP8_TILE or scales.shape != shape:
            raise ValueError(
                f"an FP8 weight needs sizes in multiples of {FP8_TILE} and a scale per tile, "
                f"got codes {tuple(codes.shape)} and scales {tuple(scales.shape)}"
            )
        if scales.dtype != torch.uint8 or not scales.is_contiguous():
            raise ValueError(f"scales must be contiguous uint8, got {scales.dtype}")
    if out_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"out_dtype must be float32 or bfloat16, got {out_dtype}")
    if quantize and size_out % MXFP4_GROUP:
        raise ValueError(f"quantize needs outputs in multiples of {MXFP4_GROUP}, got {size_out}")


def _multiply_few(
    x: Tensor, codes: Tensor, scales: Tensor | None, out: Tensor, quantize: bool, config: LinearConfig | None
) -> None:
    num_rows, (size_out, size_in) = x.shape[0], codes.shape
    on_gpu = x.device.type == "cuda"
    if config is None:
        capability = torch.cuda.get_device_capability(x.device) if on_gpu else (9, 0)
        config = linear_config(size_out, size_in, num_rows, capability)
    tiles = triton.cdiv(size_out, config.block_out)
    partials = arrivals = None
    if config.num_splits > 1:
        if tiles > MAX_TILES:
            raise ValueError(f"{tiles} tiles of outputs, but only {MAX_TILES} counters for split inputs")
        partials = x.new_empty(config.num_splits, num_rows, size_out, dtype=torch.float32)
        arrivals = _counters(x.device)
    options = linear_options(
        size_out, size_in, num_rows, config, is_fp8=scales is not None, quantize=quantize
    )
    overlap = overlaps_launches(x.device)
    _linear_kernel[(tiles, config.num_splits)](
        *(x, codes, scales, out, partials, arrivals, num_rows),
        STRIDE=x.stride(0),
        DOT=tl.bfloat16 if on_gpu else tl.float32,
        OVERLAP=overlap,
        launch_pdl=overlap,
        **options,
    )


def linear_options(
    size_out: int, size_in: int, num_rows: int, config: LinearConfig, *, is_fp8: bool, quantize: bool
) -> dict[str, int | bool]:
    """What the kernel for few rows is compiled with, besides the row stride and the device."""
    return {
        "OUT": size_out,
        "IN": size_in,
        "ROWS": max(16, triton.next_power_of_2(num_rows)),
        "BLOCK_OUT": config.block_out,
        "BLOCK_IN": config.block_in,
        "SPLITS": config.num_splits,
        "STAGES": config.num_stages,
        "IS_FP8": is_fp8,
        "QUANTIZE": quantize,
        "num_warps": config.num_warps,
    }


def _counters(device: torch.device) -> Tensor:
    """`[MAX_TILES]` int32, zero between two products: how many parts of each tile are there."""
    if device not in _arrivals:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "run a product once before a CUDA graph captures one: its counters must be zero"
            )
        _arrivals[device] = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
    return _arrivals[device]


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,
    codes,
    scales,
    out,
    partials,
    arrivals,
    num_rows,
    STRIDE: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_FP8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DOT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    steps: tl.constexpr = (IN + BLOCK_IN * SPLITS - 1) // (BLOCK_IN * SPLITS)
    is_whole: tl.constexpr = steps * BLOCK_IN * SPLITS == IN
    out_column = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # What lies behind the last output is read from the last row of weights, and not stored.
    weight_row = tl.minimum(out_column, OUT - 1) if OUT % BLOCK_OUT else out_column
    weights = codes + weight_row.to(tl.int64)[:, None] * IN
    row = tl.arange(0, ROWS)
    rows = x + row.to(tl.int64)[None, :] * STRIDE
    is_row = row < num_rows
    first = split * (steps * BLOCK_IN)
    total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        column = first + step * BLOCK_IN + tl.arange(0, BLOCK_IN)
        if is_whole:
            weight = tl.load(weights + column[None, :])
            values = tl.load(rows + column[:, None], mask=is_row[None, :], other=0.0)
        else:
            weight = tl.load(weights + column[None, :], mask=column[None, :] < IN, other=0.0)
            values = tl.load(rows + column[:, None], mask=is_row[None, :] & (column[:, None] < IN), other=0.0)
        if IS_FP8:
            scale = _scales_of(scales, weight_row, first + step * BLOCK_IN, IN, BLOCK_OUT, BLOCK_IN)
            weight = weight.to(tl.float32) * scale
        # float32 in the interpreter, whose products of BF16 are wrong.
        total += tl.dot(weight.to(DOT), values.to(DOT))
    at = row[None, :] * OUT + out_column[:, None]
    mask = is_row[None, :] & (out_column[:, None] < OUT)
    if SPLITS == 1:
        _store_rounded(total, out, at, mask, BLOCK_OUT, ROWS, QUANTIZE)
    else:
        tl.store(partials + split * num_rows * OUT + at, total, mask=mask)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
            for part in tl.range(0, SPLITS):
                # Other multiprocessors wrote them: past this one's L1 cache.
                total += tl.load(
                    partials + part * num_rows * OUT + at, mask=mask, other=0.0, cache_modifier=".cg"
                )
            _store_rounded(total, out, at, mask, BLOCK_OUT, ROWS, QUANTIZE)
            tl.store(arrivals + tile, 0)


@triton.jit
def _scales_of(scales, weight_row, first, IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """Scales of a block of weights: `[BLOCK_OUT, BLOCK_IN]` float32."""
    groups: tl.constexpr = BLOCK_IN // 32
    if IN % 128 == 0 and BLOCK_IN % 128 == 0:
        # Four bytes at once: only words are loaded ahead of the loop.
        word_of_row = scales.to(tl.pointer_type(tl.int32)) + (weight_row // 32) * (IN // 128)
        words: tl.constexpr = BLOCK_IN // 128
        word = tl.load(word_of_row[:, None] + first // 128 + tl.arange(0, words)[None, :])
        byte = (word[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]) & 0xFF
        byte = tl.reshape(byte, [BLOCK_OUT, groups])
    else:
        group = first // 32 + tl.arange(0, groups)
        at = scales + (weight_row // 32)[:, None] * (IN // 32) + group[None, :]
        byte = tl.load(at, mask=group[None, :] < IN // 32, other=127).to(tl.int32)
    scale = _power_of_two(byte)
    return tl.reshape(tl.broadcast_to(scale[:, :, None], [BLOCK_OUT, groups, 32]), [BLOCK_OUT, BLOCK_IN])


@triton.jit
def _power_of_two(byte):
    """Float32 values of ue8m0 bytes: the exponent's bits; 0 is subnormal, 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_rounded(total, out, at, mask, BLOCK_OUT: tl.constexpr, ROWS: tl.constexpr, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        groups = tl.reshape(round_to_bf16(total), [BLOCK_OUT // 32, 32, ROWS])
        total = tl.reshape(fake_quantize_q8(groups, 1), [BLOCK_OUT, ROWS])
    elif out.dtype.element_ty == tl.bfloat16:
        total = round_to_bf16(total)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _round_kernel(product, out, size, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rounds of `_store_rounded` for a finished product; its groups of 32 columns never cross a row."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = round_to_bf16(tl.load(product + at, mask=at < size, other=0.0))
    if QUANTIZE:
        value = tl.reshape(fake_quantize_q8(tl.reshape(value, [BLOCK // 32, 32]), 1), [BLOCK])
    tl.store(out + at, value.to(tl.bfloat16), mask=at < size)


@triton.jit
def _dequantize_kernel(codes, scales, out, IN: tl.constexpr, COLUMNS: tl.constexpr):
    """One row of tiles, some of its columns."""
    row = tl.program_id(0) * 32 + tl.arange(0, 32)
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * IN + column[None, :]
    mask = column[None, :] < IN
    scale = _scales_of(scales, row, first, IN, 32, COLUMNS)
    value = tl.load(codes + at, mask=mask, other=0.0).to(tl.float32) * scale
    tl.store(out + at, value.to(tl.bfloat16), mask=mask)
