# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton reads a kernel's signature itself: an annotation other than constexpr would change what it compiles.)
"""Triton bodies of the gated activation. `kernels.swiglu` says what they compute, `kernels.sgmv_launch` launches them.

One program for each tile of the step's tile table, those of base rows included, and block of columns.
"""

import triton
import triton.language as tl

from kernels.sgmv_triton import await_planes, product_by_parts, read_tile, sum_planes


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """The activation of fp32 values."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate))
    else:
        tl.static_assert(ACTIVATION == "gelu_pytorch_tanh")
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z; the factor is sqrt(8 / pi).
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))


@triton.jit
def swiglu_block(
    planes,
    b_stack,
    y,
    act,
    counter,
    slot,
    row0,
    row_end,
    rank,
    column_tile,
    num_rows,
    y_stride,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    ARRIVALS: tl.constexpr,
    READERS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """act[rows, n] = activation(y[rows, n] + delta[rows, n]) * (y[rows, WIDTH + n] + delta[rows, WIDTH + n])

    delta[:, p * WIDTH + n] = round(sum of planes[:, rows, p * RANK :]) @ B[slot, p * WIDTH + n].T, nothing without a
    rank. Every value is rounded to y's type where separate kernels would write it to memory: gate and up, the
    activation, the product.
    """
    n = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = row0 + tl.arange(0, BLOCK_M)
    row_mask = (rows < row_end)[:, None]
    y_mask = row_mask
    if WIDTH % BLOCK_N != 0:
        y_mask = row_mask & (n < WIDTH)[None, :]
    y_block = y + rows.to(tl.int64)[:, None] * y_stride + n[None, :]
    gate = tl.load(y_block, mask=y_mask, other=0.0)
    up = tl.load(y_block + WIDTH, mask=y_mask, other=0.0)
    if rank > 0:
        live_rank = tl.minimum((rank + 7) // 8 * 8, RANK)
        b_rows = b_stack + slot.to(tl.int64) * (2 * WIDTH * RANK) + n[:, None] * RANK
        v_rows = planes + rows.to(tl.int64)[:, None] * (2 * RANK)
        plane_size = num_rows * (2 * RANK)
        column_mask = (n < WIDTH)[:, None]
        if BLOCK_M * BLOCK_R < 16384:
            r = tl.arange(0, BLOCK_R)
            rank_mask = (r < live_rank)[None, :]
            b_mask = rank_mask
            if WIDTH % BLOCK_N != 0:
                b_mask = rank_mask & column_mask
            b_gate = tl.load(b_rows + r[None, :], mask=b_mask, other=0.0)
            b_up = tl.load(b_rows + WIDTH * RANK + r[None, :], mask=b_mask, other=0.0)
            await_planes(counter, PDL, ARRIVALS, READERS)
            v_block = v_rows + r[None, :]
            v_mask = row_mask & rank_mask
            v = sum_planes(v_block, plane_size, v_mask, BLOCK_M, BLOCK_R, SPLITS, CACHE)
            delta_gate = tl.dot(v.to(b_gate.dtype), tl.trans(b_gate), input_precision=PRECISION)
            v = sum_planes(v_block + RANK, plane_size, v_mask, BLOCK_M, BLOCK_R, SPLITS, CACHE)
            delta_up = tl.dot(v.to(b_up.dtype), tl.trans(b_up), input_precision=PRECISION)
        else:
            # Registers do not hold a tall tile's v of a whole large rank.
            await_planes(counter, PDL, ARRIVALS, READERS)
            delta_gate = product_by_parts(
                v_rows, b_rows, plane_size, row_mask, column_mask, live_rank, BLOCK_M, BLOCK_N, SPLITS, PRECISION, CACHE
            )
            v_rows += RANK
            b_rows += WIDTH * RANK
            delta_up = product_by_parts(
                v_rows, b_rows, plane_size, row_mask, column_mask, live_rank, BLOCK_M, BLOCK_N, SPLITS, PRECISION, CACHE
            )
        gate = (gate.to(tl.float32) + delta_gate).to(y.dtype.element_ty)
        up = (up.to(tl.float32) + delta_up).to(y.dtype.element_ty)
    activated = activate(gate.to(tl.float32), ACTIVATION).to(y.dtype.element_ty)
    product = activated.to(tl.float32) * up.to(tl.float32)
    act_block = act + rows.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(act_block, product.to(y.dtype.element_ty), mask=y_mask)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_kernel(
    planes,
    b_stack,
    y,
    act,
    tiles,
    num_rows,
    y_stride,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """`swiglu_block` of a tile and a block of columns."""
    COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    slot, row0, row_end, rank = read_tile(tiles, pid // COLUMN_TILES)
    if row0 >= row_end:
        return
    swiglu_block(
        planes,
        b_stack,
        y,
        act,
        None,
        slot,
        row0,
        row_end,
        rank,
        pid % COLUMN_TILES,
        num_rows,
        y_stride,
        RANK,
        WIDTH,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
        SPLITS,
        PRECISION,
        ACTIVATION,
        PDL,
        0,
        0,
        "",
    )
