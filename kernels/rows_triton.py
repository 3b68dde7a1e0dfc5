# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton reads a kernel's signature itself: an annotation other than constexpr would change what it compiles.)
"""Triton bodies of `kernels.embedding` and `kernels.gain`, which say what they compute.

One program for each tile of the step's tile table and, of a gain, block of columns. The gather writes one plane, for
the expand of `kernels.sgmv_triton`.
"""

import triton
import triton.language as tl

from kernels.sgmv_triton import read_tile


@triton.jit
def gather_kernel(
    ids,
    a_stack,
    planes,
    tiles,
    VOCABULARY: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """planes[0, rows of the tile] = A[slot, ids[rows]]; zero from the slot's true rank to the next multiple of 8.

    Nothing is written past that, where the expand does not read.
    """
    slot, row0, row_end, rank = read_tile(tiles, tl.program_id(0))
    if rank == 0:
        return
    rows = row0 + tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    row_mask = rows < row_end
    token = tl.load(ids + rows, mask=row_mask, other=0).to(tl.int64)
    # An id outside the vocabulary reads nothing; the base's own lookup is what complains of it.
    is_known = (token >= 0) & (token < VOCABULARY)
    a_rows = slot.to(tl.int64) * VOCABULARY + token
    # Masked at the multiple of 8, as in the expand, which keeps loads 16 bytes wide: what is there is zero.
    written = row_mask[:, None] & (r < tl.minimum((rank + 7) // 8 * 8, RANK))[None, :]
    v = tl.load(a_stack + a_rows[:, None] * RANK + r[None, :], mask=written & is_known[:, None], other=0.0)
    tl.store(planes + rows.to(tl.int64)[:, None] * RANK + r[None, :], v.to(tl.float32), mask=written)


@triton.jit
def scale_kernel(
    y,
    gain_stack,
    bias,
    tiles,
    y_stride,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y[rows of the tile, columns] += gain[slot, columns] * (y[rows, columns] - bias[columns])"""
    COLUMN_TILES: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    slot, row0, row_end, rank = read_tile(tiles, pid // COLUMN_TILES)
    if rank == 0:
        return
    rows = row0 + tl.arange(0, BLOCK_M)
    n = (pid % COLUMN_TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = n < OUT
    gain = tl.load(gain_stack + slot.to(tl.int64) * OUT + n, mask=column_mask, other=0.0)
    mask = (rows < row_end)[:, None] & column_mask[None, :]
    if OUT % BLOCK_N == 0:
        mask = (rows < row_end)[:, None]
    y_block = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
    value = tl.load(y_block, mask=mask, other=0.0).to(tl.float32)
    scaled = value
    if HAS_BIAS:
        scaled = value - tl.load(bias + n, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    # Zero times infinity would be NaN.
    result = tl.where((gain == 0.0)[None, :], value, value + gain[None, :] * scaled)
    tl.store(y_block, result.to(y.dtype.element_ty), mask=mask)
