# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton reads a kernel's signature itself: an annotation other than constexpr would change what it compiles.)
"""Triton bodies of SGMV. `kernels.sgmv_launch` launches them; `kernels.sgmv` says what they compute.

Both run one program for each tile of the step's tile table and part of the columns (and of K). The table's length is
fixed by shapes, so tiles without an adapter (rank 0) return at once. The shrink writes fp32 planes, one for each split
of K, which the expand adds: no atomics, no clearing, the same sum every time.
"""

import triton
import triton.language as tl


@triton.jit
def read_tile(tiles, index):
    """`(slot, row0, row_end, rank)` of a tile."""
    tile = tiles + 4 * index
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def shrink_block(
    x,
    a_stack,
    planes,
    slot,
    row0,
    row_end,
    rank,
    column0,
    split,
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

    Columns at or past the slot's true rank hold zero.
    """
    WIDTH: tl.constexpr = PROJECTIONS * RANK
    STEPS: tl.constexpr = (IN + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
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


@triton.jit
def await_planes(counter, PDL: tl.constexpr, ARRIVALS: tl.constexpr, READERS: tl.constexpr):
    """Return when the tile's planes can be read: at once, unless they are another running program's to write.

    With PDL it is the kernel before this one that writes them. With ARRIVALS it is that many programs of this kernel,
    each of which adds 1 to the tile's counter when its part is written; READERS programs read them, and the last to
    come this far sets the counter back to zero for the next launch.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    if ARRIVALS > 0:
        while tl.load(counter, volatile=True) < ARRIVALS:
            pass
        # No thread looks at the counter any more once this program counts as a reader: it may be zero again.
        tl.debug_barrier()
        # The programs that arrived released what they wrote; one thread acquires it, the next barrier passes it on.
        arrived = tl.atomic_add(counter, 1, sem="acquire")
        if arrived == ARRIVALS + READERS - 1:
            tl.store(counter, 0)
        tl.debug_barrier()


@triton.jit
def sum_planes(
    block, plane_size, mask, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, CACHE: tl.constexpr
):
    """The sum of a block's values in all planes, fp32 `[BLOCK_M, BLOCK_R]`."""
    # A loop, not static_range: the sum stays in the load's layout and changes to the product's once, not each plane.
    v = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for _ in tl.range(0, SPLITS, num_stages=1):
        v += tl.load(block, mask=mask, other=0.0, cache_modifier=CACHE)
        block += plane_size
    return v


@triton.jit
def product_by_parts(
    v_rows,
    b_rows,
    plane_size,
    row_mask,
    column_mask,
    live_rank,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    CACHE: tl.constexpr,
):
    """round(sum of planes) @ B.T over the first `live_rank` columns of both, 64 at a time."""
    r = tl.arange(0, 64)
    delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # One stage: assemblers before CUDA 13.3 miscompile a pipelined Hopper product whose left side was computed.
    for r0 in tl.range(0, live_rank, 64, num_stages=1):
        live = (r0 + r < live_rank)[None, :]
        b = tl.load(b_rows + (r0 + r)[None, :], mask=column_mask & live, other=0.0)
        v = sum_planes(v_rows + (r0 + r)[None, :], plane_size, row_mask & live, BLOCK_M, 64, SPLITS, CACHE)
        delta = tl.dot(v.to(b.dtype), tl.trans(b), delta, input_precision=PRECISION)
    return delta


@triton.jit
def expand_block(
    planes,
    b_stack,
    y,
    counter,
    slot,
    row0,
    row_end,
    rank,
    column_tile,
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
    PDL: tl.constexpr,
    ARRIVALS: tl.constexpr,
    READERS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """y[rows, columns of slice s] += round(sum of planes[:, rows, s * RANK :]) @ B[slot, columns].T

    The columns are of one slice. Missing slices are empty: their end equals OUT. B's columns from the true rank to the
    next multiple of 8 must be zero: the mask ends there, which keeps loads 16 bytes wide.
    """
    WIDTH: tl.constexpr = PROJECTIONS * RANK
    TILES_0: tl.constexpr = (SLICE_END_0 + BLOCK_N - 1) // BLOCK_N
    TILES_1: tl.constexpr = (SLICE_END_1 - SLICE_END_0 + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = (OUT - SLICE_END_1 + BLOCK_N - 1) // BLOCK_N
    WHOLE: tl.constexpr = (
        SLICE_END_0 % BLOCK_N == 0 and (SLICE_END_1 - SLICE_END_0) % BLOCK_N == 0 and (OUT - SLICE_END_1) % BLOCK_N == 0
    )
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
    rows = row0 + tl.arange(0, BLOCK_M)
    row_mask = (rows < row_end)[:, None]
    column_mask = (n < column_end)[:, None]
    y_mask = row_mask
    if not WHOLE:
        y_mask = row_mask & (n < column_end)[None, :]
    live_rank = tl.minimum((rank + 7) // 8 * 8, RANK)
    b_rows = b_stack + slot.to(tl.int64) * (OUT * RANK) + n[:, None] * RANK
    v_rows = planes + rows.to(tl.int64)[:, None] * WIDTH + projection * RANK
    plane_size = num_rows * WIDTH
    y_block = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
    if BLOCK_M * BLOCK_R < 16384:
        r = tl.arange(0, BLOCK_R)
        rank_mask = (r < live_rank)[None, :]
        b_mask = rank_mask
        if not WHOLE:
            b_mask = rank_mask & column_mask
        b = tl.load(b_rows + r[None, :], mask=b_mask, other=0.0)
        base = tl.load(y_block, mask=y_mask, other=0.0)
        # B and y were complete before whatever writes the planes began, so only now is there something to wait for.
        await_planes(counter, PDL, ARRIVALS, READERS)
        v = sum_planes(v_rows + r[None, :], plane_size, row_mask & rank_mask, BLOCK_M, BLOCK_R, SPLITS, CACHE)
        # Outside any loop: assemblers before CUDA 13.3 miscompile a pipelined Hopper product whose left side was
        # computed.
        delta = tl.dot(v.to(b.dtype), tl.trans(b), input_precision=PRECISION)
    else:
        # Registers do not hold a tall tile's v of a whole large rank.
        base = tl.load(y_block, mask=y_mask, other=0.0)
        await_planes(counter, PDL, ARRIVALS, READERS)
        delta = product_by_parts(
            v_rows, b_rows, plane_size, row_mask, column_mask, live_rank, BLOCK_M, BLOCK_N, SPLITS, PRECISION, CACHE
        )
    tl.store(y_block, (base.to(tl.float32) + delta).to(y.dtype.element_ty), mask=y_mask)


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
    PDL: tl.constexpr,
):
    """`shrink_block` of a tile, a block of columns and a split of K; blocks past the slot's true rank are skipped."""
    COLUMN_TILES: tl.constexpr = (PROJECTIONS * RANK + BLOCK_N - 1) // BLOCK_N
    if PDL:
        # All that came before is complete and visible from here on, and only when every program has come this far can
        # the expand begin. So the expand finds y complete, and no earlier reader of the planes' memory is left.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    column0 = (pid % COLUMN_TILES) * BLOCK_N
    split = (pid // COLUMN_TILES) % SPLITS
    slot, row0, row_end, rank = read_tile(tiles, pid // (COLUMN_TILES * SPLITS))
    if rank == 0:
        return
    if RANK % BLOCK_N == 0 and column0 % RANK >= rank:
        return
    shrink_block(
        x,
        a_stack,
        planes,
        slot,
        row0,
        row_end,
        rank,
        column0,
        split,
        num_rows,
        x_stride,
        IN,
        RANK,
        PROJECTIONS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        SPLITS,
        STAGES,
        PRECISION,
    )


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
    PDL: tl.constexpr,
):
    """`expand_block` of a tile and a block of columns."""
    COLUMN_TILES: tl.constexpr = (
        (SLICE_END_0 + BLOCK_N - 1) // BLOCK_N
        + (SLICE_END_1 - SLICE_END_0 + BLOCK_N - 1) // BLOCK_N
        + (OUT - SLICE_END_1 + BLOCK_N - 1) // BLOCK_N
    )
    pid = tl.program_id(0)
    slot, row0, row_end, rank = read_tile(tiles, pid // COLUMN_TILES)
    if rank == 0:
        return
    expand_block(
        planes,
        b_stack,
        y,
        None,
        slot,
        row0,
        row_end,
        rank,
        pid % COLUMN_TILES,
        num_rows,
        y_stride,
        RANK,
        PROJECTIONS,
        SLICE_END_0,
        SLICE_END_1,
        OUT,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
        SPLITS,
        PRECISION,
        PDL,
        0,
        0,
        "",
    )
