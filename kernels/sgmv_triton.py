# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton reads a kernel's signature itself: an annotation other than constexpr would change what it compiles.)
"""Triton bodies. `kernels.sgmv_launch` launches them; `kernels.sgmv`, `embedding` and `gain` say what they compute.

All run one program for each tile of the step's tile table and part of the columns (and of K). The table's length is
fixed by shapes, so unused tiles (slot -1) return at once. The shrink writes fp32 planes, one for each split of K, which
the expand adds: no atomics, no clearing, the same sum every time. The gather writes one plane for the same expand.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x,
    a_stack,
    planes,
    tiles,
    num_rows,
    x_stride,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """planes[split, rows of the tile, columns] = x[rows, part of K] @ A[slot, columns, part of K].T

    Columns at or past the slot's true rank hold zero, or nothing where a whole block of them is skipped.
    """
    WIDTH: tl.constexpr = PROJECTIONS * RANK
    COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (IN + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    pid = tl.program_id(0)
    column0 = (pid % COLUMN_TILES) * BLOCK_N
    split = (pid // COLUMN_TILES) % SPLITS
    tile = tiles + 4 * (pid // (COLUMN_TILES * SPLITS))
    slot = tl.load(tile)
    row0 = tl.load(tile + 1)
    row_end = tl.load(tile + 2)
    rank = tl.load(tile + 3)
    if slot < 0:
        return
    if RANK % BLOCK_N == 0 and column0 % RANK >= rank:
        return

    rows = row0 + tl.arange(0, BLOCK_M)
    n = column0 + tl.arange(0, BLOCK_N)
    k = split * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    row_mask = (rows < row_end)[:, None]
    # Rows of A are masked, not lanes of a row: every load stays 16 bytes wide.
    live_mask = ((n < WIDTH) & (n % RANK < rank))[:, None]
    x_block = x + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    a_block = a_stack + slot.to(tl.int64) * (WIDTH * IN) + n[:, None] * IN + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        if IN % (BLOCK_K * SPLITS) == 0:
            x_part = tl.load(x_block, mask=row_mask, other=0.0)
            a_part = tl.load(a_block, mask=live_mask, other=0.0)
        else:
            k_mask = (k + step * BLOCK_K < IN)[None, :]
            x_part = tl.load(x_block, mask=row_mask & k_mask, other=0.0)
            a_part = tl.load(a_block, mask=live_mask & k_mask, other=0.0)
        acc = tl.dot(x_part, tl.trans(a_part), acc, input_precision=PRECISION)
        x_block += BLOCK_K
        a_block += BLOCK_K
    plane_rows = split.to(tl.int64) * num_rows + rows
    tl.store(planes + plane_rows[:, None] * WIDTH + n[None, :], acc, mask=row_mask & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    planes,
    b_stack,
    y,
    tiles,
    num_rows,
    y_stride,
    RANK: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    SLICE_END_0: tl.constexpr,
    SLICE_END_1: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[rows, columns of slice s] += round(sum of planes[:, rows, s * RANK :]) @ B[slot, columns].T

    A program covers columns of one slice. Missing slices are empty: their end equals OUT. B's columns from the true
    rank to the next multiple of 8 must be zero: the mask ends there, which keeps loads 16 bytes wide.
    """
    WIDTH: tl.constexpr = PROJECTIONS * RANK
    TILES_0: tl.constexpr = (SLICE_END_0 + BLOCK_N - 1) // BLOCK_N
    TILES_1: tl.constexpr = (SLICE_END_1 - SLICE_END_0 + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = (OUT - SLICE_END_1 + BLOCK_N - 1) // BLOCK_N
    COLUMN_TILES: tl.constexpr = TILES_0 + TILES_1 + TILES_2
    WHOLE: tl.constexpr = (
        SLICE_END_0 % BLOCK_N == 0 and (SLICE_END_1 - SLICE_END_0) % BLOCK_N == 0 and (OUT - SLICE_END_1) % BLOCK_N == 0
    )
    pid = tl.program_id(0)
    column_tile = pid % COLUMN_TILES
    tile = tiles + 4 * (pid // COLUMN_TILES)
    slot = tl.load(tile)
    row0 = tl.load(tile + 1)
    row_end = tl.load(tile + 2)
    rank = tl.load(tile + 3)
    if slot < 0:
        return

    projection = 0
    column0 = column_tile * BLOCK_N
    column_end = SLICE_END_0
    if TILES_1 > 0:
        second = column_tile >= TILES_0
        projection = second.to(tl.int32)
        column0 = tl.where(second, SLICE_END_0 + (column_tile - TILES_0) * BLOCK_N, column0)
        column_end = tl.where(second, SLICE_END_1, column_end)
    if TILES_2 > 0:
        third = column_tile >= TILES_0 + TILES_1
        projection += third.to(tl.int32)
        column0 = tl.where(third, SLICE_END_1 + (column_tile - TILES_0 - TILES_1) * BLOCK_N, column0)
        column_end = tl.where(third, OUT, column_end)

    n = column0 + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    rows = row0 + tl.arange(0, BLOCK_M)
    row_mask = (rows < row_end)[:, None]
    rank_mask = (r < tl.minimum((rank + 7) // 8 * 8, RANK))[None, :]
    y_mask = row_mask
    b_mask = rank_mask
    if not WHOLE:
        y_mask = row_mask & (n < column_end)[None, :]
        b_mask = rank_mask & (n < column_end)[:, None]
    b_block = b_stack + slot.to(tl.int64) * (OUT * RANK) + n[:, None] * RANK + r[None, :]
    b = tl.load(b_block, mask=b_mask, other=0.0)
    y_block = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
    base = tl.load(y_block, mask=y_mask, other=0.0)

    # A loop, not static_range: the sum stays in the load's layout and changes to the product's once, not each plane.
    v_block = planes + rows.to(tl.int64)[:, None] * WIDTH + projection * RANK + r[None, :]
    v = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for _ in tl.range(0, SPLITS, num_stages=1):
        v += tl.load(v_block, mask=row_mask & rank_mask, other=0.0)
        v_block += num_rows * WIDTH
    # Outside any loop: assemblers before CUDA 13.3 miscompile a pipelined Hopper product whose left side was computed.
    delta = tl.dot(v.to(b.dtype), tl.trans(b), input_precision=PRECISION)
    tl.store(y_block, (base.to(tl.float32) + delta).to(y.dtype.element_ty), mask=y_mask)


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
    tile = tiles + 4 * tl.program_id(0)
    slot = tl.load(tile)
    row0 = tl.load(tile + 1)
    row_end = tl.load(tile + 2)
    rank = tl.load(tile + 3)
    if slot < 0:
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
    tile = tiles + 4 * (pid // COLUMN_TILES)
    slot = tl.load(tile)
    row0 = tl.load(tile + 1)
    row_end = tl.load(tile + 2)
    rank = tl.load(tile + 3)
    if slot < 0:
        return
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
