"""Routed expert products read straight from MXFP4 pages, on a GPU. Reference: same name.

Source: `spec/model.md` section 6; design section 4. Weights are the left operand of `mma.m16n8k16`: every thread
loads four neighbouring words of a row, 32 codes of one scale group, straight into the registers that the
instruction reads, and the activations are stored in planes (`kernels.expert_rows`) so that no code moves to another
thread. Nothing passes through shared memory but the sums of warps that share a row. Gluon, not plain Triton:
the layouts are the point.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.expert_rows import group_rows
from kernels.formats import PageLayout

PAGE_ALIGNMENT = 16
"""Bytes: the width of a load."""
_MAX_ELEMENTS = 2**31 - 1
"""Offsets into rows are 32 bits wide."""


def expert_mlp(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    addresses: Tensor,
    experts: Sequence[int] | None,
    first_expert: int,
    layout: PageLayout,
    out: Tensor,
    *,
    limit: float,
    quantize_activations: bool = False,
) -> None:
    """Write `out[t, k]` for every (token, choice) whose expert is in `experts`; leave the others alone.

    Args:
        x: `[num_tokens, hidden]` bf16, contiguous.
        topk_idx: `[num_tokens, num_topk]` int64, contiguous, global expert ids.
        topk_weights: `[num_tokens, num_topk]` float32, contiguous.
        addresses: `[num_local_experts]` int64, byte address of each page; read by the device.
        experts: local expert indices whose addresses may be read. They are checked here, which waits for the
            device. `None` means every expert of the table: nothing waits, a CUDA graph can capture the call, and
            whoever fills the table has called `check_addresses`.
        first_expert: global id of local expert 0.
        layout: of every page.
        out: `[num_tokens, num_topk, hidden]` float32, contiguous; this rank's part of each expert's output, routing
            weight included (it multiplies before the down product).
        limit: clamp of gate and up.
        quantize_activations: not offered here; the reference emulates it.
    Raises: ValueError that names the argument.
    Notes: a row's result depends on that row and its experts alone, bit by bit, whatever the batch, the slots or the
        memory that holds a page. Scales up to 2**65 are exact.
    """
    if quantize_activations:
        raise ValueError("quantize_activations is for the reference; the kernel keeps bf16 activations")
    _check_inputs(x, topk_idx, topk_weights, addresses, layout, out)
    num_tokens, num_topk = topk_idx.shape
    num_pairs, num_experts = topk_idx.numel(), addresses.numel()
    if num_pairs == 0 or num_experts == 0 or (experts is not None and len(experts) == 0):
        return
    if experts is None:
        is_wanted = torch.ones(num_experts, dtype=torch.bool, device=x.device)
    else:
        table = addresses.tolist()
        check_addresses({expert: table[expert] for expert in experts})
        wanted = torch.zeros(num_experts, dtype=torch.bool)
        wanted[list(experts)] = True
        is_wanted = wanted.to(x.device)
    grouped, planes = group_rows(x, topk_idx, is_wanted, first_expert)
    hidden, inter = layout.hidden_size, layout.intermediate_size
    h = torch.empty(num_pairs, inter, dtype=torch.bfloat16, device=x.device)
    num_active = grouped.active.numel()
    # One H200, 2026-12: how many warps split a row of gate and up. Few rows (slices) need more of them to fill the
    # GPU. It is an order of additions, so only the page may decide it.
    split = 4 if inter <= 1152 else 2
    rows = _rows_per_tile(num_pairs, num_active)
    shape = {"HIDDEN": hidden, "INTER": inter, "ROWS": rows}
    _gate_up_kernel[(inter // 16, num_active)](
        *(planes, *grouped, addresses, topk_weights, h, float(limit)),
        **shape,
        NUM_TOPK=num_topk,
        SPLIT=split,
        num_warps=split,
        maxnreg=128 if rows == 8 else None,
    )
    _down_kernel[(hidden // 32, num_active)](
        *(h, *grouped, addresses, out), **shape, TILES_ARE_UNROLLED=inter <= 512, num_warps=2
    )


def check_addresses(addresses: dict[int, int]) -> None:
    """Refuse pages that the kernel could not read.

    Args:
        addresses: byte address by local expert.
    Raises: ValueError that names the entry.
    """
    for expert, address in addresses.items():
        if address == 0:
            raise ValueError(f"addresses[{expert}] is 0: the page has no address")
        if address % PAGE_ALIGNMENT:
            raise ValueError(
                f"addresses[{expert}] is {address:#x}: pages must be aligned to {PAGE_ALIGNMENT} bytes"
            )


def _check_inputs(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, addresses: Tensor, layout: PageLayout, out: Tensor
) -> None:
    pairs = tuple(topk_idx.shape)
    if topk_idx.dim() != 2:
        raise ValueError(f"topk_idx must be [num_tokens, num_topk], got {list(pairs)}")
    for name, tensor, dtype, shape in (
        ("x", x, torch.bfloat16, (pairs[0], layout.hidden_size)),
        ("topk_idx", topk_idx, torch.int64, pairs),
        ("topk_weights", topk_weights, torch.float32, pairs),
        ("addresses", addresses, torch.int64, (addresses.numel(),)),
        ("out", out, torch.float32, (*pairs, layout.hidden_size)),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device.type != "cuda" or tensor.device != x.device:
            raise ValueError(f"{name} must be on the GPU of x, got {tensor.device} and {x.device}")
    if out.numel() > _MAX_ELEMENTS:
        raise ValueError(f"out has {out.numel()} elements, more than {_MAX_ELEMENTS}: split the tokens")


def _rows_per_tile(num_pairs: int, num_active: int) -> int:
    """Width of a tile of rows. More cost registers, fewer decode a page again; the results are the same bits."""
    mean = num_pairs / num_active
    return 8 if mean <= 8 else 16 if mean <= 16 else 32


def _dequantize_asm() -> str:
    """Eight codes of each of four words, all of one scale group, to bf16; by pairs of words.

    The three magnitude bits of a code go to bits 8..6 of a bf16, its sign to bit 15: that is the value times
    2**-126, exactly. The scale multiplies it by 2**(s - 65), so what is left is 2**-64 of the value.
    """
    lines = [
        ".reg .b32 scale, value, sign, low0, high0, low1, high1;",
        "mad.lo.u32 scale, $20, 0x00800080, 0x1F001F00;",  # bf16 2**(s - 65), twice: exponent s - 65 + 127
        *("prmt.b32 low0, $16, $17, 0x5410;", "prmt.b32 high0, $16, $17, 0x7632;"),
        *("prmt.b32 low1, $18, $19, 0x5410;", "prmt.b32 high1, $18, $19, 0x7632;"),
    ]
    for plane in range(8):
        half, code = ("low", "high")[plane // 4], plane % 4
        for pair in range(2):
            shift = 4 * code - 6
            lines += [
                f"{'shr.u32' if shift > 0 else 'shl.b32'} value, {half}{pair}, {abs(shift)};",
                "and.b32 value, value, 0x01C001C0;",
                f"shl.b32 sign, {half}{pair}, {12 - 4 * code};",
                "lop3.b32 value, sign, 0x80008000, value, 0xEA;",  # (sign & mask) | value
                f"mul.rn.bf16x2 ${2 * plane + pair}, value, scale;",
            ]
    return "{\n" + "\n".join(lines) + "\n}"


_ASM = gl.constexpr(_dequantize_asm())
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))
_UNSCALE = gl.constexpr(2.0**64)

# A tile is [warps, 16 weight rows, 32 words], one `mma` tile per warp and code of the word. `k` counts words.


@gluon.jit
def _index(size: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """`0..size - 1` along one axis of three."""
    if axis == 0:
        flat = gl.arange(0, size, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        return gl.expand_dims(gl.expand_dims(flat, 1), 2)
    elif axis == 1:
        flat = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        return gl.expand_dims(gl.expand_dims(flat, 0), 2)
    else:
        flat = gl.arange(0, size, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        return gl.expand_dims(gl.expand_dims(flat, 0), 1)


@gluon.jit
def _load_words(codes, row, k, NUM_WORDS: gl.constexpr):
    offset = gl.max_contiguous(gl.multiple_of(row * NUM_WORDS + k, [1, 1, 4]), [1, 1, 4])
    mask = (k < NUM_WORDS) & (row >= 0)
    return gl.load(codes + offset, mask=mask, other=0, eviction_policy="evict_first")


@gluon.jit
def _load_scales(scales, row, group, NUM_GROUPS: gl.constexpr):
    mask = (group < NUM_GROUPS) & (row >= 0)
    return gl.load(scales + row * NUM_GROUPS + group, mask=mask, other=0).to(gl.int32)


@gluon.jit
def _multiply(acc, words, scales, x, x_row, k, x_mask, NUM_WORDS: gl.constexpr, WARPS: gl.constexpr):
    """Add the product of one tile: eight `mma`, one for each code of the words."""
    layout: gl.constexpr = words.type.layout
    scales = gl.expand_dims(scales, 3).broadcast_to(WARPS, 16, 8, 4)
    scales = gl.convert_layout(gl.reshape(scales, [WARPS, 16, 32]), layout, assert_trivial=True)
    weights = gl.inline_asm_elementwise(
        _ASM,
        _CONSTRAINTS,
        [words, scales],
        dtype=(
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        ),
        is_pure=True,
        pack=4,
    )
    mask = x_mask & (k < NUM_WORDS)
    for code in gl.static_range(8):
        acc = mma_v2(weights[code], gl.load(x + x_row + code * NUM_WORDS + k, mask=mask, other=0.0), acc)
    return acc


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
):
    """16 columns of `h` of one expert, all its rows. The warps split `hidden`."""
    NUM_WORDS: gl.constexpr = HIDDEN // 8
    NUM_GROUPS: gl.constexpr = HIDDEN // 32
    TILES: gl.constexpr = (NUM_WORDS + 32 * SPLIT - 1) // (32 * SPLIT)
    CODES: gl.constexpr = HIDDEN * INTER // 2
    SCALES: gl.constexpr = HIDDEN * INTER // 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLIT, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    # LEFT with the words of a group as a fourth axis: a scale is loaded once and stands where its words are.
    GROUPED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0], [0, 0, 4, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0]] if SPLIT == 2 else [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [SPLIT, 16, 8, 4],
    )
    SCALE: gl.constexpr = gl.SliceLayout(3, GROUPED)
    FLAT: gl.constexpr = gl.SliceLayout(0, MMA)
    expert = gl.load(active + gl.program_id(1))
    if expert >= 0:
        first_row = gl.program_id(0) * 16
        page = gl.multiple_of(gl.load(addresses + expert), 16)
        first = gl.load(offsets + expert)
        count = gl.load(counts + expert)
        row = first_row + _index(16, 1, LEFT)
        k = _index(SPLIT, 0, LEFT) * (TILES * 32) + _index(32, 2, LEFT)
        scale_row = first_row + _index(16, 1, SCALE)
        group = _index(SPLIT, 0, SCALE) * (TILES * 8) + _index(8, 2, SCALE)
        x_k = _index(SPLIT, 0, RIGHT) * (TILES * 32) + _index(32, 1, RIGHT)
        gate_codes = gl.multiple_of(page.to(gl.pointer_type(gl.int32)), 16)
        up_codes = gl.multiple_of((page + CODES).to(gl.pointer_type(gl.int32)), 16)
        gate_scales = (page + 2 * CODES).to(gl.pointer_type(gl.uint8))
        up_scales = (page + 2 * CODES + SCALES).to(gl.pointer_type(gl.uint8))
        for start in range(0, count, ROWS):
            x_place = start + _index(ROWS, 2, RIGHT)
            x_mask = x_place < count
            x_row = gl.load(pairs + first + x_place, mask=x_mask, other=0) // NUM_TOPK * HIDDEN
            gate = gl.zeros([SPLIT, 16, ROWS], gl.float32, MMA)
            up = gl.zeros([SPLIT, 16, ROWS], gl.float32, MMA)
            next_gate = _load_words(gate_codes, row, k, NUM_WORDS)
            next_up = _load_words(up_codes, row, k, NUM_WORDS)
            next_gate_scales = _load_scales(gate_scales, scale_row, group, NUM_GROUPS)
            next_up_scales = _load_scales(up_scales, scale_row, group, NUM_GROUPS)
            for tile in range(TILES):
                gate_words = next_gate
                up_words = next_up
                gate_scale = next_gate_scales
                up_scale = next_up_scales
                ahead = tile + 1
                next_gate = _load_words(gate_codes, row, k + ahead * 32, NUM_WORDS)
                next_up = _load_words(up_codes, row, k + ahead * 32, NUM_WORDS)
                next_gate_scales = _load_scales(gate_scales, scale_row, group + ahead * 8, NUM_GROUPS)
                next_up_scales = _load_scales(up_scales, scale_row, group + ahead * 8, NUM_GROUPS)
                at = x_k + tile * 32
                gate = _multiply(gate, gate_words, gate_scale, x, x_row, at, x_mask, NUM_WORDS, SPLIT)
                up = _multiply(up, up_words, up_scale, x, x_row, at, x_mask, NUM_WORDS, SPLIT)
            g = (gl.sum(gate, axis=0) * _UNSCALE).to(gl.bfloat16).to(gl.float32)
            u = (gl.sum(up, axis=0) * _UNSCALE).to(gl.bfloat16).to(gl.float32)
            # A NaN has to get through: it marks what could not be computed.
            g = gl.where(g > limit, limit, g)
            u = gl.where(u > limit, limit, gl.where(u < -limit, -limit, u))
            column = first_row + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, FLAT)), 1)
            place = start + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, FLAT)), 0)
            mask = place < count
            pair = gl.load(pairs + first + place, mask=mask, other=0)
            weight = gl.load(topk_weights + pair, mask=mask, other=0.0)
            value = g / (1.0 + gl.exp(-g)) * u * weight
            to = (first + place) * INTER + column % 8 * (INTER // 8) + column // 8  # planes
            gl.store(h + to, value.to(gl.bfloat16), mask=mask & (column < INTER))


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
    TILES_ARE_UNROLLED: gl.constexpr,
):
    """32 columns of the output of one expert, 16 for each of two warps, all its rows."""
    NUM_WORDS: gl.constexpr = INTER // 8
    NUM_GROUPS: gl.constexpr = INTER // 32
    TILES: gl.constexpr = (NUM_WORDS + 31) // 32
    CODES: gl.constexpr = HIDDEN * INTER // 2
    SCALES: gl.constexpr = HIDDEN * INTER // 32
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    GROUPED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0], [0, 0, 4, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1, 0, 0, 0]],
        [],
        [2, 16, 8, 4],
    )
    SCALE: gl.constexpr = gl.SliceLayout(3, GROUPED)
    expert = gl.load(active + gl.program_id(1))
    if expert >= 0:
        first_row = gl.program_id(0) * 32
        page = gl.multiple_of(gl.load(addresses + expert), 16)
        first = gl.load(offsets + expert)
        count = gl.load(counts + expert)
        row = first_row + _index(2, 0, LEFT) * 16 + _index(16, 1, LEFT)
        k = _index(32, 2, LEFT)
        scale_row = first_row + _index(2, 0, SCALE) * 16 + _index(16, 1, SCALE)
        group = _index(8, 2, SCALE)
        h_k = _index(2, 0, RIGHT) * 0 + _index(32, 1, RIGHT)  # both warps read the same rows
        codes = gl.multiple_of((page + 2 * (CODES + SCALES)).to(gl.pointer_type(gl.int32)), 16)
        scales = (page + 3 * CODES + 2 * SCALES).to(gl.pointer_type(gl.uint8))
        for start in range(0, count, ROWS):
            h_place = start + _index(ROWS, 2, RIGHT)
            h_mask = h_place < count
            h_row = (first + h_place) * INTER
            acc = gl.zeros([2, 16, ROWS], gl.float32, MMA)
            next_words = _load_words(codes, row, k, NUM_WORDS)
            next_scales = _load_scales(scales, scale_row, group, NUM_GROUPS)
            if TILES_ARE_UNROLLED:
                for tile in gl.static_range(TILES):
                    words = next_words
                    scale = next_scales
                    if tile + 1 < TILES:
                        next_words = _load_words(codes, row, k + (tile + 1) * 32, NUM_WORDS)
                        next_scales = _load_scales(scales, scale_row, group + (tile + 1) * 8, NUM_GROUPS)
                    acc = _multiply(acc, words, scale, h, h_row, h_k + tile * 32, h_mask, NUM_WORDS, 2)
            else:
                for tile in range(TILES):
                    words = next_words
                    scale = next_scales
                    next_words = _load_words(codes, row, k + (tile + 1) * 32, NUM_WORDS)
                    next_scales = _load_scales(scales, scale_row, group + (tile + 1) * 8, NUM_GROUPS)
                    acc = _multiply(acc, words, scale, h, h_row, h_k + tile * 32, h_mask, NUM_WORDS, 2)
            column = first_row + _index(2, 0, MMA) * 16 + _index(16, 1, MMA)
            place = start + _index(ROWS, 2, MMA)
            mask = place < count
            pair = gl.load(pairs + first + place, mask=mask, other=0)
            gl.store(out + pair * HIDDEN + column, acc * _UNSCALE, mask=mask & (column < HIDDEN))
