# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton reads a kernel's signature itself: an annotation other than constexpr would change what it compiles.)
"""Triton body of shrink and expand in one launch: `kernels.sgmv_launch.pair_launch` and `swiglu_pair_launch`.

Some programs shrink and the others wait for them. A program's part is the ticket it draws when it starts, and the
parts that shrink have the first tickets. So whoever waits knows that all it waits for has started, and what shrinks
waits for nothing: in whatever order a device starts programs, and however few at a time, none waits for ever.
"""

import triton
import triton.language as tl

from kernels.sgmv_triton import expand_block, read_tile, shrink_block
from kernels.swiglu_triton import swiglu_block


@triton.jit(do_not_specialize=["num_rows"])
def pair_kernel(
    x,
    a_stack,
    b_stack,
    y,
    act,
    planes,
    tiles,
    counters,
    num_rows,
    x_stride,
    y_stride,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    SLICE_END_0: tl.constexpr,
    SLICE_END_1: tl.constexpr,
    OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHRINK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EXPAND_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`shrink_block` into the planes, then `expand_block` into y or, with an ACTIVATION, `swiglu_block` into act.

    `counters` is zero before and after: `[0]` counts tickets, `[1 + tile]` programs that have written the tile's
    planes, then those that need wait for them no longer.
    """
    SHRINK_COLUMNS: tl.constexpr = (PROJECTIONS * RANK + SHRINK_N - 1) // SHRINK_N
    ARRIVALS: tl.constexpr = SHRINK_COLUMNS * SPLITS
    SLICE_COLUMNS: tl.constexpr = (
        (SLICE_END_0 + EXPAND_N - 1) // EXPAND_N
        + (SLICE_END_1 - SLICE_END_0 + EXPAND_N - 1) // EXPAND_N
        + (OUT - SLICE_END_1 + EXPAND_N - 1) // EXPAND_N
    )
    READERS: tl.constexpr = SLICE_COLUMNS if ACTIVATION is None else (SLICE_END_0 + EXPAND_N - 1) // EXPAND_N
    num_programs = tl.num_programs(0)
    num_shrinking = num_programs // (ARRIVALS + READERS) * ARRIVALS
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    if ticket == num_programs - 1:
        # Nobody draws after the last; the next launch begins at zero again.
        tl.store(counters, 0)
    if ticket < num_shrinking:
        tile = ticket // ARRIVALS
        slot, row0, row_end, rank = read_tile(tiles, tile)
        column0 = (ticket % SHRINK_COLUMNS) * SHRINK_N
        split = (ticket // SHRINK_COLUMNS) % SPLITS
        if rank > 0:
            if RANK % SHRINK_N != 0 or column0 % RANK < rank:
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
                    SHRINK_N,
                    BLOCK_K,
                    SPLITS,
                    STAGES,
                    PRECISION,
                )
            # All threads have written; one says so, and what it releases includes what the barrier orders before it.
            tl.debug_barrier()
            tl.atomic_add(counters + 1 + tile, 1, sem="release")
    else:
        part = ticket - num_shrinking
        tile = part // READERS
        slot, row0, row_end, rank = read_tile(tiles, tile)
        # What others write while this kernel runs is not read through this multiprocessor's own cache (.cg).
        if ACTIVATION is None:
            if rank > 0:
                expand_block(
                    planes,
                    b_stack,
                    y,
                    counters + 1 + tile,
                    slot,
                    row0,
                    row_end,
                    rank,
                    part % READERS,
                    num_rows,
                    y_stride,
                    RANK,
                    PROJECTIONS,
                    SLICE_END_0,
                    SLICE_END_1,
                    OUT,
                    BLOCK_M,
                    EXPAND_N,
                    BLOCK_R,
                    SPLITS,
                    PRECISION,
                    False,
                    ARRIVALS,
                    READERS,
                    ".cg",
                )
        else:
            if row0 < row_end:
                swiglu_block(
                    planes,
                    b_stack,
                    y,
                    act,
                    counters + 1 + tile,
                    slot,
                    row0,
                    row_end,
                    rank,
                    part % READERS,
                    num_rows,
                    y_stride,
                    RANK,
                    SLICE_END_0,
                    BLOCK_M,
                    EXPAND_N,
                    BLOCK_R,
                    SPLITS,
                    PRECISION,
                    ACTIVATION,
                    False,
                    ARRIVALS,
                    READERS,
                    ".cg",
                )
