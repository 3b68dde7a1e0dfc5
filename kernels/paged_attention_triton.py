# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
# (Triton reads a kernel's signature itself: an annotation other than constexpr would change what it compiles.)
"""Triton bodies of attention over pages. `kernels.paged_attention` says what they compute.

The query heads of one KV head are rows of one product, so that each page is read once for all of them. Softmax is
online (FlashAttention, Dao et al. 2022), and a long past is split among programs (Flash-Decoding, Dao et al. 2023)
whose results the combine kernel adds. Which tokens there are is read from the schedule on the device; what a program
does not own, such as the tail of a last page, is never loaded.
"""

import triton
import triton.language as tl


@triton.jit
def _fold_block(
    q,
    keys,
    values,
    table,
    head,
    token0,
    first,
    end,
    positions,
    masked_before,
    masked_from,
    tanh_scale,
    exponent_scale,
    acc,
    largest,
    total,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to tokens `token0 .. token0 + BLOCK_N` within `[first, end)`: the running sum, maximum and total after.

    Row i attends to tokens up to `positions[i]`, and no further back than its window; to tokens from `masked_before` on
    and before `masked_from` all rows do. `exponent_scale`, which is positive, makes exponents of two of the scores.
    """
    n = token0 + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_held = (n >= first) & (n < end)
    held = is_held[:, None]
    if BLOCK_D != HEAD_DIM:
        held = held & (d < HEAD_DIM)[None, :]
    page = tl.load(table + n // BLOCK_SIZE, mask=is_held, other=0).to(tl.int64)
    cache_rows = (page * KV_HEADS + head) * BLOCK_SIZE + n % BLOCK_SIZE
    offsets = cache_rows[:, None] * HEAD_DIM + d[None, :]
    k = tl.load(keys + offsets, mask=held, other=0.0)
    # Loaded here, not where it is used, so that its way here overlaps the first product.
    v = tl.load(values + offsets, mask=held, other=0.0)

    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SOFTCAP:
        # tanh(x) with e = exp(-2 |x|), which cannot overflow.
        e = tl.exp2(-tl.abs(scores * tanh_scale))
        bounded = (1.0 - e) / (1.0 + e)
        scores = tl.where(scores < 0, -bounded, bounded)
    if token0 < masked_before or token0 + BLOCK_N > masked_from:
        attended = n[None, :] <= positions[:, None]
        if WINDOW > 0:
            attended = attended & (n[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(attended, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = new_largest
    if WINDOW > 0:
        # The first blocks may lie before the windows of some rows: infinity minus infinity would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    base = base * exponent_scale
    weights = tl.exp2(scores * exponent_scale - base[:, None])
    decay = tl.exp2(largest * exponent_scale - base)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_largest, total


@triton.jit
def _split_blocks(kv_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """First token attended, the block of BLOCK_N tokens it is in, blocks in a split, and blocks in all."""
    first = tl.maximum(kv_len * 0, kv_len - WINDOW) if WINDOW > 0 else kv_len * 0
    first_block = first // BLOCK_N
    num_blocks = (kv_len + BLOCK_N - 1) // BLOCK_N - first_block
    split_blocks = tl.maximum((num_blocks + SPLITS - 1) // SPLITS, MIN_BLOCKS)
    return first, first_block, split_blocks, num_blocks


@triton.jit(do_not_specialize=["max_blocks"])
def decode_kernel(
    queries,
    keys,
    values,
    out,
    partials,
    logsums,
    decodes,
    tables,
    query_stride,
    max_blocks,
    tanh_scale,
    exponent_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row, the heads of one KV head, one split of the past.

    With one split: out[row, heads]. With more, what the split's tokens alone would give, and log2 of the sum of its
    weights: partials[slot, split, heads] and logsums[slot, split, heads]. Splits without a token write nothing.
    """
    pid = tl.program_id(0)
    split = pid % SPLITS
    head = (pid // SPLITS) % KV_HEADS
    slot = pid // (SPLITS * KV_HEADS)
    row = tl.load(decodes + 4 * slot)
    kv_len = tl.load(decodes + 4 * slot + 1)
    sequence = tl.load(decodes + 4 * slot + 2)
    if row < 0:
        return
    first, first_block, split_blocks, num_blocks = _split_blocks(kv_len, WINDOW, BLOCK_N, SPLITS, MIN_BLOCKS)
    begin = split * split_blocks
    stop = tl.minimum(begin + split_blocks, num_blocks)
    # A single split has a row to write also where there is nothing to attend to.
    if begin >= num_blocks and SPLITS > 1:
        return

    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query_head = head * GROUP + r
    mask = (r < GROUP)[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    q_block = queries + row.to(tl.int64) * query_stride + query_head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_block, mask=mask, other=0.0)
    table = tables + sequence.to(tl.int64) * max_blocks
    positions = tl.zeros((BLOCK_M,), tl.int32) + (kv_len - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for block in tl.range(first_block + begin, first_block + stop, num_stages=STAGES):
        acc, largest, total = _fold_block(
            q,
            keys,
            values,
            table,
            head,
            block * BLOCK_N,
            first,
            kv_len,
            positions,
            first,
            kv_len,
            tanh_scale,
            exponent_scale,
            acc,
            largest,
            total,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            WINDOW,
            HAS_SOFTCAP,
            BLOCK_N,
            BLOCK_D,
            PRECISION,
        )
    # A row without a past attends to nothing, and gets zeros.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        out_block = out + (row.to(tl.int64) * (KV_HEADS * GROUP) + query_head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_block, result.to(out.dtype.element_ty), mask=mask)
    else:
        plane = (slot.to(tl.int64) * SPLITS + split) * (KV_HEADS * GROUP) + query_head
        tl.store(partials + plane[:, None] * HEAD_DIM + d[None, :], result, mask=mask)
        tl.store(logsums + plane, largest * exponent_scale + tl.log2(total), mask=r < GROUP)


@triton.jit
def combine_kernel(
    partials,
    logsums,
    out,
    decodes,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLITS: tl.constexpr,
    UNROLLED: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """out[row, columns] = the splits' partials, each weighted by its share of the head's sum of weights."""
    COLUMNS: tl.constexpr = HEADS * HEAD_DIM
    COLUMN_TILES: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    slot = pid // COLUMN_TILES
    row = tl.load(decodes + 4 * slot)
    kv_len = tl.load(decodes + 4 * slot + 1)
    if row < 0:
        return
    _, _, split_blocks, num_blocks = _split_blocks(kv_len, WINDOW, BLOCK_N, SPLITS, MIN_BLOCKS)
    c = (pid % COLUMN_TILES) * BLOCK_C + tl.arange(0, BLOCK_C)
    column_mask = c < COLUMNS
    acc = tl.zeros((BLOCK_C,), tl.float32)
    largest = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_C,), tl.float32)
    # Of a head's columns each reads its sum again: they lie together whatever the length of a head.
    logsum_block = logsums + slot.to(tl.int64) * (SPLITS * HEADS) + c // HEAD_DIM
    part_block = partials + slot.to(tl.int64) * (SPLITS * COLUMNS) + c
    num_live = (num_blocks + split_blocks - 1) // split_blocks
    for split0 in tl.range(0, num_live, UNROLLED, num_stages=1):
        # Unrolled, so that all their loads are under way at once.
        for step in tl.static_range(0, UNROLLED):
            split = split0 + step
            live = column_mask & (tl.zeros((BLOCK_C,), tl.int32) + split < num_live)
            logsum = tl.load(logsum_block + split * HEADS, mask=live, other=float("-inf"))
            part = tl.load(part_block + split * COLUMNS, mask=live, other=0.0)
            new_largest = tl.maximum(largest, logsum)
            # Columns past the last have no sum at all, and infinity minus infinity would be NaN.
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            share = tl.exp2(logsum - base)
            decay = tl.exp2(largest - base)
            total = total * decay + share
            acc = acc * decay + part * share
            largest = new_largest
    # No split is live of a row without a past, which gets zeros.
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row.to(tl.int64) * COLUMNS + c, result.to(out.dtype.element_ty), mask=column_mask)


@triton.jit(do_not_specialize=["max_blocks"])
def prefill_kernel(
    queries,
    keys,
    values,
    out,
    tiles,
    tables,
    query_stride,
    max_blocks,
    tanh_scale,
    exponent_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[rows of the tile, the heads of one KV head]; zeros where the tile is of no sequence."""
    pid = tl.program_id(0)
    head = pid % KV_HEADS
    tile = tiles + 4 * (pid // KV_HEADS)
    sequence = tl.load(tile)
    row0 = tl.load(tile + 1)
    row_end = tl.load(tile + 2)
    position0 = tl.load(tile + 3)
    if row0 >= row_end:
        return

    # GROUP need not be a power of two: the product's last rows may then be of no token.
    r = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = r // GROUP
    rows = row0 + token
    is_row = (token < BLOCK_M // GROUP) & (rows < row_end)
    mask = is_row[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    query_head = head * GROUP + r % GROUP
    q_rows = rows.to(tl.int64) * query_stride + query_head * HEAD_DIM
    q = tl.load(queries + q_rows[:, None] + d[None, :], mask=mask, other=0.0)
    end = tl.where(sequence < 0, 0, position0 + row_end - row0)
    first = tl.maximum(position0 + 1 - WINDOW, 0) if WINDOW > 0 else position0 * 0
    table = tables + sequence.to(tl.int64) * max_blocks
    positions = position0 + token
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for block in tl.range(first // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N, num_stages=STAGES):
        acc, largest, total = _fold_block(
            q,
            keys,
            values,
            table,
            head,
            block * BLOCK_N,
            first,
            end,
            positions,
            end - WINDOW if WINDOW > 0 else 0,
            position0 + 1,
            tanh_scale,
            exponent_scale,
            acc,
            largest,
            total,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_SIZE,
            WINDOW,
            HAS_SOFTCAP,
            BLOCK_N,
            BLOCK_D,
            PRECISION,
        )
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_rows = rows.to(tl.int64) * (KV_HEADS * GROUP) + query_head
    tl.store(out + out_rows[:, None] * HEAD_DIM + d[None, :], result.to(out.dtype.element_ty), mask=mask)
