"""The shared expert's activation, and the roundings that kernels share. Source: `spec/model.md` sections 0 and 6."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.formats import MXFP4_GROUP

_MAX_COLUMNS = 1024
"""Of one program."""
_RECIPROCAL_OF_448 = tl.constexpr(1.0 / 448.0)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_SIGN_BIT = tl.constexpr(-0x80000000)


def swiglu_q8(gate_up: Tensor, limit: float) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` of values rounded to BF16; the product to BF16, then Q8.

    Args:
        gate_up: `[num_rows, 2 * inter]` float32 or bf16, contiguous, gate columns first, `inter` a multiple of 32.
        limit: of gate (from above only) and up.
    Returns: `[num_rows, inter]` bf16.
    Raises: ValueError if a dtype, shape or stride differs from the above.
    """
    if gate_up.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"gate_up must be float32 or bfloat16, got {gate_up.dtype}")
    if gate_up.dim() != 2 or gate_up.shape[1] % (2 * MXFP4_GROUP) or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up must be contiguous, two times a multiple of {MXFP4_GROUP} columns wide, "
            f"got shape {tuple(gate_up.shape)} with strides {gate_up.stride()}"
        )
    num_rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, inter, dtype=torch.bfloat16)
    if num_rows:
        columns = min(triton.next_power_of_2(inter), _MAX_COLUMNS)
        overlap = overlaps_launches(gate_up.device)
        _swiglu_q8_kernel[(num_rows, triton.cdiv(inter, columns))](
            *(gate_up, out, float(limit)),
            INTER=inter,
            COLUMNS=columns,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=4,
        )
    return out


def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends: compute capability 9.0 has it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _swiglu_q8_kernel(gate_up, out, limit, INTER: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < INTER
    at = gate_up + row * (2 * INTER) + column
    gate = round_to_bf16(tl.load(at, mask=mask, other=0.0).to(tl.float32))
    up = round_to_bf16(tl.load(at + INTER, mask=mask, other=0.0).to(tl.float32))
    # Comparisons are false for NaN, which therefore stays; minimum and maximum would drop it.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    h = round_to_bf16(gate / (1.0 + tl.exp(-gate)) * up)
    h = tl.reshape(fake_quantize_q8(tl.reshape(h, [COLUMNS // 32, 32]), 1), [COLUMNS])
    tl.store(out + row * INTER + column, h.to(tl.bfloat16), mask=mask)


@triton.jit
def round_to_bf16(x):
    """Float32 values rounded to the nearest BF16, ties to even; still float32.

    The conversion itself truncates in Triton's interpreter; of what this returns it is exact.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x != x, x, rounded.to(tl.float32, bitcast=True))


@triton.jit
def fake_quantize_q8(x, AXIS: tl.constexpr):
    """Q8 of float32 values that BF16 holds, groups of 32 along `AXIS`; NaN spoils its group."""
    magnitude_bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = magnitude_bits.to(tl.float32, bitcast=True)
    # Non-negative floats and their bits have the same order, and the bits of NaN are above all.
    amax = tl.max(magnitude_bits, axis=AXIS, keep_dims=True).to(tl.float32, bitcast=True)
    amax = tl.where(amax < 1e-4, 1e-4, amax)
    bits = (amax * _RECIPROCAL_OF_448).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale_bits = (tl.minimum(bits, _INFINITY_BITS) + 0x007FFFFF) & _INFINITY_BITS
    scale = scale_bits.to(tl.float32, bitcast=True)
    scaled = tl.div_rn(magnitude, scale)
    # A float32 with an ulp of one step of e4m3 (three bits of mantissa, exponent -6 at least) rounds to such steps.
    exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) & _INFINITY_BITS, (127 - 6) << 23)
    shift = ((exponent + (20 << 23)) | 0x00400000).to(tl.float32, bitcast=True)
    code = tl.where(scaled > 448.0, 448.0, (scaled + shift) - shift)
    value = code * scale
    signed = value.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN_BIT)
    return tl.where(value != value, value, signed.to(tl.float32, bitcast=True))
