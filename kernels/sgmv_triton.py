# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton reads a kernel's signature itself: an annotation other than constexpr would change what it compiles.)
"""Triton bodies of the SGMV pair. `kernels.sgmv_launch` launches them, `kernels.sgmv` says what they compute.

Both run one program for each tile of the step's tile table and part of the columns (and of K). The table's length is
fixed by shapes, so unused tiles (slot -1) return at once. The shrink writes fp32 planes, one for each split of K, which
the expand adds: no atomics, no clearing, the same sum every time.
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
