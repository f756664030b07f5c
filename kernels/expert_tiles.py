"""Tiles of an expert page in the registers of a warp: addresses, dequantisation, activations. Gluon.

Source: `kernels.formats.PageLayout` for the order in memory. The weights are the left operand of `m16n8k16`, of
which lane `4 * row + quarter` holds rows `row` and `row + 8`, one of each half of a tile, and, of every 16 columns
of K, `2 * quarter + (0, 1)` and 8 more. A lane takes whole words of its quarter of a row. Two codes that are 16 bits
apart become two neighbours in K, so that shifts and masks work on both at once and nothing moves to another lane.
So K permutes the columns:

    column of a wide tile    32 * quarter + 8 * word + 4 * pair + 2 * step + half
    column of a narrow tile                8 * quarter + 4 * pair + 2 * step + half
    K                        (((word * 2 + step) * 2 + half) * 4 + quarter) * 2 + pair

The activations have to stand in the same order. They are stored twofold permuted (`kernels.expert_rows`): by K, for
an operand in shared memory, or by `(word, quarter, step, half, pair)`, for loads of 16 bytes into a lane's registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _dequantize_asm() -> str:
    """Eight codes of a word, twice two of each output, to bf16.

    The three magnitude bits of a code go to bits 8..6 of a bf16, its sign to bit 15: that is the value times
    2**-126, exactly. The scale multiplies it by 2**(s - 65), so what is left is 2**-64 of the value.
    """
    word, scale = "$4", "$12"  # of eight copies each
    lines = [".reg .b32 value, sign, zero;", "mov.b32 zero, 0x80008000;"]  # -0, which changes no product
    for code in range(4):  # and the one 16 bits further up
        shift = 4 * code - 6
        lines += [
            f"{'shr.u32' if shift > 0 else 'shl.b32'} value, {word}, {abs(shift)};",
            "and.b32 value, value, 0x01C001C0;",
            f"shl.b32 sign, {word}, {12 - 4 * code};",
            "lop3.b32 value, sign, 0x80008000, value, 0xEA;",  # (sign & mask) | value
            f"fma.rn.bf16x2 ${code}, value, {scale}, zero;",  # mul needs compute capability 9.0
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_ASM = gl.constexpr(_dequantize_asm())
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 16))
UNSCALE = gl.constexpr(2.0**64)
"""What a product of dequantised weights has to be multiplied with."""


@gluon.constexpr_function
def _powers(axis: int, rank: int, begin: int, end: int) -> list[list[int]]:
    """Bases of a linear layout: 'begin', 'begin * 2' ... along an axis, below 'end'."""
    bases = []
    while begin < end:
        bases.append([begin if i == axis else 0 for i in range(rank)])
        begin *= 2
    return bases


@gluon.constexpr_function
def tile_layout(
    num_blocks: int, num_groups: int, num_words: int, num_warps: int
) -> gl.DistributedLinearLayout:
    """Layout of codes: `[num_blocks, 2 (half), 8 (row), num_groups, num_words, 8 (code)]`.

    Wide tiles have 4 words a lane and 4 groups each, narrow ones 1 word and stand for their group with four lanes.
    Warps go along the blocks.
    """
    shape = [num_blocks, 2, 8, num_groups, num_words, 8]
    registers = [
        *_powers(5, 6, 1, 8),
        *_powers(4, 6, 1, num_words),
        *_powers(1, 6, 1, 2),
        *_powers(3, 6, 4, num_groups),
        *_powers(0, 6, num_warps, num_blocks),
    ]
    lanes = [*_powers(3, 6, 1, 4), *_powers(2, 6, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, _powers(0, 6, 1, num_warps), [], shape)


@gluon.constexpr_function
def activation_layout(
    num_blocks: int, num_rows: int, num_groups: int, num_words: int, num_warps: int
) -> gl.DistributedLinearLayout:
    """Layout of activations: `[num_blocks, num_rows, num_groups // 4, num_words, 4 (quarter), 8 (code)]`."""
    shape = [num_blocks, num_rows, num_groups // 4, num_words, 4, 8]
    registers = [
        *_powers(5, 6, 1, 8),
        *_powers(3, 6, 1, num_words),
        *_powers(2, 6, 1, num_groups // 4),
        *_powers(1, 6, 8, num_rows),
        *_powers(0, 6, num_warps, num_blocks),
    ]
    lanes = [*_powers(4, 6, 1, 4), *_powers(1, 6, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, _powers(0, 6, 1, num_warps), [], shape)


@gluon.constexpr_function
def slices(layout: gl.DistributedLayout, rank: int, axes: tuple[int, ...]) -> gl.DistributedLayout:
    """The layout of what is left when `axes` of a tensor of `rank` dimensions are taken away."""
    for axis in sorted(axes, reverse=True):
        layout = gl.SliceLayout(axis, layout)
    return layout


@gluon.constexpr_function
def _others(rank: int, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(rank) if i != axis)


@gluon.jit
def index(SIZE: gl.constexpr, AXIS: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
    """`0..SIZE - 1` along an axis of `RANK`."""
    values = gl.arange(0, SIZE, layout=slices(LAYOUT, RANK, _others(RANK, AXIS)))
    for axis in gl.static_range(RANK):
        if axis != AXIS:
            values = gl.expand_dims(values, axis)
    return values


@gluon.jit
def code_offsets(GROUPS: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the words of tiles side by side stand, in words: `[1, 2, 8, GROUPS, WORDS]`."""
    CODES: gl.constexpr = slices(LAYOUT, 6, (5,))
    half = index(2, 1, 5, CODES)
    row = index(8, 2, 5, CODES)
    group = index(GROUPS, 3, 5, CODES)
    word = index(WORDS, 4, 5, CODES)
    return group // 4 * (64 * WORDS) + half * (32 * WORDS) + row * (4 * WORDS) + group % 4 * WORDS + word


@gluon.jit
def scale_offsets(GROUPS: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the pairs of scales of tiles side by side stand, in pairs: `[1, 8, GROUPS]`."""
    SCALES: gl.constexpr = slices(LAYOUT, 6, (1, 4, 5))
    row = index(8, 1, 3, SCALES)
    group = index(GROUPS, 2, 3, SCALES)
    if WORDS == 4:
        return group // 4 * 32 + row * 4 + group % 4
    else:
        return group // 4 * 8 + row + group % 4 * 0


@gluon.jit
def code_pointer(page, offset):
    """The words that begin `offset` bytes, a multiple of 16, after the beginning of a page."""
    return gl.multiple_of(page.to(gl.pointer_type(gl.int32)), 16) + offset // 4


@gluon.jit
def scale_pointer(page, offset):
    """The pairs of scales that begin `offset` bytes after the beginning of a page."""
    return page.to(gl.pointer_type(gl.int16)) + offset // 2


@gluon.jit
def load_codes(codes, offsets, mask):
    """Words of tiles at `code_offsets`; zero where masked."""
    WORDS: gl.constexpr = offsets.shape[4]
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 1, 1, 1, WORDS]), [1, 1, 1, 1, WORDS])
    return gl.load(codes + offsets, mask=mask, other=0, eviction_policy="evict_first")


@gluon.jit
def load_scales(scales, offsets, mask):
    """Pairs of scales of tiles at `scale_offsets`, as int32; zero where masked."""
    return gl.load(scales + offsets, mask=mask, other=0).to(gl.int32)


@gluon.jit
def dequantize(words, scales, LAYOUT: gl.constexpr):
    """Weights of tiles side by side.

    Args:
        words: `[blocks, 2, 8, groups, words]` int32.
        scales: `[blocks, 8, groups]` int32: both scales of a lane, the one of half 0 in the low byte.
        LAYOUT: `tile_layout`.
    Returns: `[blocks * 16, K]` bf16: the weights times 2**-64, columns in the order of K.
    """
    BLOCKS: gl.constexpr = words.shape[0]
    GROUPS: gl.constexpr = words.shape[3]
    WORDS: gl.constexpr = words.shape[4]
    words = gl.convert_layout(words, slices(LAYOUT, 6, (5,)), assert_trivial=True)
    scales = gl.convert_layout(scales, slices(LAYOUT, 6, (1, 4, 5)), assert_trivial=True)
    half = index(2, 1, 4, slices(LAYOUT, 6, (4, 5)))
    # The bf16 2**(s - 65), twice: its exponent field is s - 65 + 127.
    factors = ((gl.expand_dims(scales, 1) >> (8 * half)) & 0xFF) * 0x00800080 + 0x1F001F00
    factors = gl.expand_dims(gl.expand_dims(factors, 4), 5)
    weights = gl.inline_asm_elementwise(
        _ASM,
        _CONSTRAINTS,
        [
            gl.expand_dims(words, 5).broadcast_to(BLOCKS, 2, 8, GROUPS, WORDS, 8),
            factors.broadcast_to(BLOCKS, 2, 8, GROUPS, WORDS, 8),
        ],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=8,
    )
    weights = gl.reshape(weights, [BLOCKS, 16, GROUPS // 4, 4, WORDS, 4, 2])  # the last: step and half, pair
    weights = gl.permute(weights, (0, 1, 2, 4, 5, 3, 6))
    return gl.reshape(weights, [BLOCKS, 16, GROUPS * WORDS * 8])


@gluon.jit
def activation_offsets(GROUPS: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the activations of tiles side by side stand: `[1, 1, GROUPS // 4, WORDS, 4, 8]`."""
    tile = index(GROUPS // 4, 2, 6, LAYOUT)
    word = index(WORDS, 3, 6, LAYOUT)
    quarter = index(4, 4, 6, LAYOUT)
    code = index(8, 5, 6, LAYOUT)
    return tile * (32 * WORDS) + word * 32 + quarter * 8 + code


@gluon.jit
def load_activations(x, offsets, mask):
    """Activations of tiles side by side as a right operand: `[blocks, K, rows]` bf16."""
    offsets = gl.max_contiguous(gl.multiple_of(offsets, [1, 1, 1, 1, 1, 8]), [1, 1, 1, 1, 1, 8])
    values = gl.load(x + offsets, mask=mask, other=0.0)
    BLOCKS: gl.constexpr = values.shape[0]
    ROWS: gl.constexpr = values.shape[1]
    TILES: gl.constexpr = values.shape[2]
    WORDS: gl.constexpr = values.shape[3]
    values = gl.reshape(values, [BLOCKS, ROWS, TILES, WORDS, 4, 4, 2])
    values = gl.permute(values, (0, 2, 3, 5, 4, 6, 1))
    return gl.reshape(values, [BLOCKS, TILES * WORDS * 32, ROWS])


@gluon.constexpr_function
def _row_order_layout(num_rows: int, num_columns: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Layout of products whose rows are in order: the two neighbours that a lane has come first."""
    registers = [
        [1, 0],
        [0, 1],
        *_powers(1, 2, 8, num_columns),
        *_powers(0, 2, 16 * num_warps, num_rows),
    ]
    lanes = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, _powers(0, 2, 16, 16 * num_warps), [], [num_rows, num_columns]
    )


@gluon.jit
def in_row_order(acc, WARPS: gl.constexpr):
    """Products of tiles, `[rows, n]`, with the rows of the two halves of a tile back in turns."""
    ROWS: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    acc = gl.reshape(gl.permute(gl.reshape(acc, [ROWS // 16, 2, 8, N]), (0, 2, 1, 3)), [ROWS, N])
    return gl.convert_layout(acc, _row_order_layout(ROWS, N, WARPS), assert_trivial=True)


@gluon.jit
def to_bf16(values):
    """Round float32, at least two a thread, two at a time: four times the rate of the compiler's conversion."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [values], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def swiglu(gate, up, limit):
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` of float32 values that are first rounded to bf16."""
    gate = to_bf16(gate).to(gl.float32)
    up = to_bf16(up).to(gl.float32)
    # A NaN has to get through: it marks what could not be computed.
    gate = gl.where(gate > limit, limit, gate)
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def column_for_registers(column, NUM_COLUMNS: gl.constexpr):
    """Where a column stands in the order `kernels.expert_rows.FOR_REGISTERS`."""
    WIDE: gl.constexpr = NUM_COLUMNS // 128 * 128
    code = column % 8
    code = code % 4 * 2 + code // 4
    wide = column // 128 * 128 + column % 32 // 8 * 32 + column % 128 // 32 * 8 + code
    narrow = column // 8 * 8 + code
    return gl.where(column < WIDE, wide, narrow)


@gluon.jit
def column_in_k_order(column, NUM_COLUMNS: gl.constexpr):
    """Where a column stands in the order `kernels.expert_rows.FOR_SHARED_MEMORY`."""
    WIDE: gl.constexpr = NUM_COLUMNS // 128 * 128
    code = column % 4  # of two neighbours in K
    code = code // 2 * 16 + code % 2 * 8 + column % 8 // 4
    wide = column // 128 * 128 + column % 32 // 8 * 32 + column % 128 // 32 * 2 + code
    narrow = column // 32 * 32 + column % 32 // 8 * 2 + code
    return gl.where(column < WIDE, wide, narrow)
