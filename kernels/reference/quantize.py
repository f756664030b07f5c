"""Quantisers and packing of the checkpoint's number formats, in plain torch.

Source: `spec/model.md` section 0 (pow2ceil, Q8, Q4u, Q4n, e2m1_rne) and 2.2 (packing).
Scales and codes are exact whatever the accumulation dtype: they are computed in FP32 from BF16-valued inputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels.formats import (
    E2M1_MAGNITUDES,
    E2M1_MAX,
    E4M3_MAX,
    FP8_TILE,
    MXFP4_GROUP,
    NVFP4_GROUP,
    UE8M0_BIAS,
    UE8M0_NAN,
)
from kernels.tensors import QuantizedRows

_FP8 = torch.float8_e4m3fn
_MANTISSA_BITS = 0x007FFFFF
_INFINITY_BITS = 0x7F800000


@cache
def _e2m1_values(device: torch.device) -> Tensor:
    """`[16]` float32: value of each code."""
    return torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], device=device)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """`[256]`: values of the two codes of each byte, two float32 seen as one int64 so that one look-up gets both."""
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    return decode_e2m1(unpack_nibbles(byte.unsqueeze(-1))).view(torch.int64).squeeze(-1)


@cache
def _ue8m0_values(device: torch.device) -> Tensor:
    """`[256]` float32: value of each scale byte."""
    powers = [2.0 ** (code - UE8M0_BIAS) for code in range(UE8M0_NAN)]
    return torch.tensor([*powers, torch.nan], device=device)


def _look_up(table: Tensor, code: Tensor) -> Tensor:
    return table.index_select(0, code.flatten().int()).view(code.shape)


def pow2ceil(amax: Tensor, reciprocal_of: float) -> Tensor:
    """Smallest power of two that is at least `amax / reciprocal_of`, by FP32 multiplication and its bits.

    Args:
        amax: any shape, positive; taken in FP32.
        reciprocal_of: the format's largest value; its FP32-rounded reciprocal is the factor.
    Returns: FP32 powers of two, same shape; infinity for an infinite `amax` or NaN.
    """
    # The factor is rounded to FP32 like every scalar; a division would round differently.
    t = amax.to(torch.float32) * (1.0 / reciprocal_of)
    bits = t.view(torch.int32).clamp_max(_INFINITY_BITS)
    # Any mantissa bit carries into the exponent.
    return ((bits + _MANTISSA_BITS) & _INFINITY_BITS).view(torch.float32)


def encode_ue8m0(scale: Tensor) -> Tensor:
    """Exponent bytes of FP32 powers of two: `[...]` float32 to `[...]` uint8; infinity gives 255, the NaN."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def decode_ue8m0(code: Tensor) -> Tensor:
    """FP32 values `2 ** (code - 127)` of exponent bytes; 255 is NaN, 0 is the FP32 subnormal `2 ** -127`."""
    return _look_up(_ue8m0_values(code.device), code)


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 codes, ties to the even code, saturating at 6; the sign of zero is kept.

    Args:
        x: `[...]` float.
    Returns: `[...]` uint8 in 0..15.
    """
    magnitude = x.abs().clamp_max(E2M1_MAX)
    # Magnitudes step by 1/2 up to 2, by 1 up to 4, by 2 up to 6. `round` takes ties to the even number of steps, and
    # that is the even code.
    code = torch.where(
        magnitude < 2,
        torch.round(magnitude * 2),
        torch.where(magnitude < 4, torch.round(magnitude) + 2, torch.round(magnitude / 2) + 4),
    )
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(code: Tensor) -> Tensor:
    """FP32 values of e2m1 codes 0..15: `[...]` uint8 to `[...]` float32."""
    return _look_up(_e2m1_values(code.device), code)


def pack_nibbles(code: Tensor) -> Tensor:
    """Two codes a byte, low nibble first: `[..., n]` uint8 in 0..15 to `[..., n // 2]` uint8."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: `[..., n // 2]` uint8 to `[..., n]` uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantize_q8(x: Tensor) -> Tensor:
    """Q8: round to FP8 e4m3 with a power-of-two scale per 32 columns, and back.

    Args:
        x: `[..., n]` bf16, `n` a multiple of 32.
    Returns: `[..., n]` bf16; every value is exact.
    """
    codes, scale = _q8_codes(x)
    return (codes.to(torch.float32) * scale).flatten(-2).to(torch.bfloat16)


def quantize_q4u(x: Tensor) -> Tensor:
    """Q4u: round to e2m1 with a ue8m0 scale per 32 columns, and back: `[..., n]` bf16 to `[..., n]` bf16, exact."""
    codes, scale = _mxfp4_codes(x.to(torch.float32))
    return (decode_e2m1(codes) * scale).flatten(-2).to(torch.bfloat16)


def quantize_q4n(x: Tensor) -> Tensor:
    """Q4n: round to e2m1 with an e4m3 scale per 16 columns, and back: `[..., n]` bf16 to `[..., n]` bf16, exact."""
    codes, scale = _q4n_codes(x)
    return (decode_e2m1(codes) * scale.to(torch.float32)).flatten(-2).to(torch.bfloat16)


def pack_q8(x: Tensor) -> QuantizedRows:
    """Codes and scales of Q8.

    Args:
        x: `[..., n]` bf16, `n` a multiple of 32.
    Returns: rows that `unpack_q8` makes what `quantize_q8` returns; a NaN or infinity makes its group NaN.
    """
    codes, scale = _q8_codes(x)
    return QuantizedRows(codes.flatten(-2), encode_ue8m0(scale.squeeze(-1)))


def unpack_q8(rows: QuantizedRows) -> Tensor:
    """Values of Q8 rows: `[..., n]` bf16, exact."""
    return dequantize_fp8_rows(rows.codes, rows.scales).to(torch.bfloat16)


def pack_q4u(x: Tensor) -> QuantizedRows:
    """Codes and scales of Q4u.

    Args:
        x: `[..., n]` bf16, `n` a multiple of 32.
    Returns: rows that `unpack_q4u` makes what `quantize_q4u` returns; a NaN or infinity makes its group NaN.
    """
    return QuantizedRows(*encode_mxfp4(x.to(torch.float32)))


def unpack_q4u(rows: QuantizedRows) -> Tensor:
    """Values of Q4u rows: `[..., n]` bf16, exact."""
    return dequantize_mxfp4(rows.codes, rows.scales).to(torch.bfloat16)


def pack_q4n(x: Tensor) -> QuantizedRows:
    """Codes and scales of Q4n.

    Args:
        x: `[..., n]` bf16, `n` a multiple of 16.
    Returns: rows that `unpack_q4n` makes what `quantize_q4n` returns; a NaN makes its group NaN.
    """
    codes, scale = _q4n_codes(x)
    return QuantizedRows(pack_nibbles(codes.flatten(-2)), scale.squeeze(-1))


def unpack_q4n(rows: QuantizedRows) -> Tensor:
    """Values of Q4n rows: `[..., n]` bf16, exact."""
    groups = decode_e2m1(unpack_nibbles(rows.codes)).unflatten(-1, (-1, NVFP4_GROUP))
    return (groups * rows.scales.to(torch.float32).unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def _q8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[..., n // 32, 32]` e4m3 and FP32 scales `[..., n // 32, 1]` of `[..., n]` bf16."""
    groups = x.to(torch.float32).unflatten(-1, (-1, MXFP4_GROUP))
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-4)
    scale = pow2ceil(amax, E4M3_MAX)
    return (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).to(_FP8), scale


def _q4n_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[..., n // 16, 16]` uint8 and scales `[..., n // 16, 1]` e4m3 of `[..., n]` bf16."""
    groups = x.to(torch.float32).unflatten(-1, (-1, NVFP4_GROUP))
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(_FP8)
    return encode_e2m1(groups / scale.to(torch.float32)), scale


def encode_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Q4u's codes and scales.

    Args:
        x: `[..., n]` float32, `n` a multiple of 32.
    Returns: packed codes `[..., n // 2]` uint8 and scales `[..., n // 32]` uint8 (ue8m0).
    """
    codes, scale = _mxfp4_codes(x)
    return pack_nibbles(codes.flatten(-2)), encode_ue8m0(scale.squeeze(-1))


def _mxfp4_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[..., n // 32, 32]` uint8 and FP32 scales `[..., n // 32, 1]` of `[..., n]` float32."""
    groups = x.unflatten(-1, (-1, MXFP4_GROUP))
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    scale = pow2ceil(amax, E2M1_MAX)
    return encode_e2m1(groups / scale), scale


def dequantize_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """Values of an MXFP4 tensor.

    Args:
        codes: `[..., n // 2]` uint8, low nibble first.
        scales: `[..., n // 32]` uint8 (ue8m0).
    Returns: `[..., n]` float32, exact.
    """
    groups = _look_up(_e2m1_pairs(codes.device), codes).view(torch.float32).unflatten(-1, (-1, MXFP4_GROUP))
    return (groups * decode_ue8m0(scales).unsqueeze(-1)).flatten(-2)


def encode_fp8_tiles(w: Tensor) -> tuple[Tensor, Tensor]:
    """Dense FP8 weight with one scale per 32x32 tile.

    Args:
        w: `[out, in]` float32, both multiples of 32.
    Returns: codes `[out, in]` float8_e4m3fn and scales `[out // 32, in // 32]` uint8 (ue8m0).
    """
    rows, columns = w.shape
    tiles = w.reshape(rows // FP8_TILE, FP8_TILE, columns // FP8_TILE, FP8_TILE)
    amax = tiles.abs().amax(dim=(1, 3), keepdim=True).clamp_min(1e-4)
    scale = pow2ceil(amax, E4M3_MAX)
    codes = (tiles / scale).clamp(-E4M3_MAX, E4M3_MAX).reshape(rows, columns).to(_FP8)
    return codes, encode_ue8m0(scale[:, 0, :, 0])


def dequantize_fp8_tiles(codes: Tensor, scales: Tensor) -> Tensor:
    """Values of a dense FP8 weight.

    Args:
        codes: `[out, in]` float8_e4m3fn.
        scales: `[out // 32, in // 32]` uint8 (ue8m0).
    Returns: `[out, in]` float32, exact.
    """
    scale = decode_ue8m0(scales).repeat_interleave(FP8_TILE, dim=0).repeat_interleave(FP8_TILE, dim=1)
    return codes.to(torch.float32) * scale


def encode_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 rows with a ue8m0 scale per 32 columns (Engram tables).

    Args:
        x: `[rows, n]` float32.
    Returns: codes `[rows, n]` float8_e4m3fn and scales `[rows, n // 32]` uint8.
    """
    groups = x.unflatten(-1, (-1, MXFP4_GROUP))
    scale = pow2ceil(groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-4), E4M3_MAX)
    codes = (groups / scale).clamp(-E4M3_MAX, E4M3_MAX).flatten(-2).to(_FP8)
    return codes, encode_ue8m0(scale.squeeze(-1))


def dequantize_fp8_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `encode_fp8_rows`: `[..., n]` float8_e4m3fn and `[..., n // 32]` uint8 to `[..., n]` float32."""
    groups = codes.to(torch.float32).unflatten(-1, (-1, MXFP4_GROUP))
    return (groups * decode_ue8m0(scales).unsqueeze(-1)).flatten(-2)
