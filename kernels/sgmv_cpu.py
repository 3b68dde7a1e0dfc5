"""SGMV on the CPU: matrix products on views of the fp32 stacks; no weight is gathered, for a row or for a group.

A small bf16 product costs about 16 us of dispatch here and an fp32 one about 2, so short groups run in fp32 whatever
the activations are: their rows are widened once, all groups add to them in place, and they are rounded once. Long bf16
groups are multiplied in bf16 (fp32 accumulation) where that makes up for the dispatch, with bf16 copies of their
weights: those are kept, `MAX_COPIES_BYTES` at most in a process, and made anew when the stacks have been written to.

Temporaries have at most `MAX_TEMPORARY` elements, or those of one row of x and y.
"""

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from math import gcd

import torch
from torch import Tensor

from kernels.bf16_copies import MAX_BLOCK_WEIGHTS, Bf16Copies, Bf16Weights
from kernels.pieces import LONG_ROWS, Batch, Loop, Segment
from kernels.schedule import Routing

MAX_TEMPORARY = 1 << 22
"""Most elements of a temporary: 16 MB in fp32."""

MAX_COPIES_BYTES = 512 << 20
"""Most bytes of bf16 copies of adapters: of 8 adapters of rank 64 in all of SmolLM2-135M, they take 312 MB."""

_BF16_COPIES = Bf16Copies(MAX_COPIES_BYTES)

_CACHED = 1 << 18
"""Elements of x and y of a batch, a loop or a block: 1 MB in fp32, what a core's own cache holds."""

_MAX_BLOCK_WORK = LONG_ROWS * MAX_BLOCK_WEIGHTS
"""Rows times rank times output width up to which one product with zeros is faster than one for each projection."""

_MAX_CHUNKS = 8
"""Most equal chunks for each projection that unequal slices are cut into."""

_READ_AHEAD_RANK, _READ_AHEAD_ROWS = 32, 3
"""Rank and rows from which B is read from memory in order first: the product itself reads it in strides, and waits."""


def sgmv_cpu(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, slices: Sequence[int]) -> None:
    """Add every adapter row's delta to `y` in place; see `kernels.sgmv.sgmv` for the semantics.

    Args:
        x: Activations `[T, K]`, bf16, fp16 or fp32.
        a_stack: fp32 `[N, S*R, K]`.
        b_stack: fp32 `[N, OUT, R]`.
        y: `[T, OUT]`, x's dtype, updated in place with one rounding.
        routing: The step's routing on the CPU.
        slices: Output widths of the S projections; they add up to OUT.
    """
    slices, row_width = tuple(slices), x.shape[1] + y.shape[1]
    for piece in routing.pieces:
        if isinstance(piece, Batch):
            if piece.num_places * row_width <= (MAX_TEMPORARY if piece.depth == 1 else _CACHED):
                _add_batch(x, a_stack, b_stack, y, piece, slices)
                continue
            piece = piece.loop
        is_wide = x.dtype == torch.float32
        rows, target = _rows(x, piece), _rows(y, piece)
        if not piece.is_short or (not is_wide and (piece.stop - piece.start) * row_width > _CACHED):
            _add_long_loop(rows, a_stack, b_stack, target, piece, slices)
            continue
        if is_wide:
            _add_in_fp32(rows, a_stack, b_stack, target, piece.segments, piece.lengths, slices)
        else:
            wide = target.float()
            _add_in_fp32(rows.float(), a_stack, b_stack, wide, piece.segments, piece.lengths, slices)
            target.copy_(wide)


def sgmv_embed_cpu(ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing) -> None:
    """Add every adapter row's delta to `y` in place; see `kernels.embedding.sgmv_embed` for the semantics.

    Args:
        ids: int64 `[T]`.
        a_stack: fp32 `[N, V, R]`.
        b_stack: fp32 `[N, OUT, R]`.
        y: `[T, OUT]`, bf16, fp16 or fp32, updated in place with one rounding.
        routing: The step's routing on the CPU.
    """
    out = y.shape[1]
    for piece in routing.pieces:
        if isinstance(piece, Batch):
            if piece.num_places * out <= MAX_TEMPORARY:
                _embed_batch(ids, a_stack, b_stack, y, piece)
                continue
            piece = piece.loop
        for segment in piece.segments:
            _embed_segment(_rows(ids, segment), a_stack, b_stack, _rows(y, segment), segment)


def _rows(tensor: Tensor, piece: Loop | Batch | Segment) -> Tensor:
    return tensor if piece.stop - piece.start == tensor.shape[0] else tensor[piece.start : piece.stop]


def _block_rows(row_width: int) -> int:
    """Rows of one block of a long segment: as many as stay in cache, or enough to read the weights for."""
    return max(1, min(max(_CACHED // row_width, LONG_ROWS), MAX_TEMPORARY // row_width))


def _add_in_fp32(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    segments: Sequence[Segment],
    lengths: Sequence[int],
    slices: tuple[int, ...],
) -> None:
    """Groups one after the other, in place; x and y are their rows in fp32, so many of each."""
    projections, width, (_, out, rank) = len(slices), x.shape[1], b_stack.shape
    a_start, b_start = int(a_stack.storage_offset()), int(b_stack.storage_offset())
    a_part, b_size = rank * width, out * rank
    rows: Sequence[Tensor] = (x,)
    parts = (y,) if projections == 1 else y.split_with_sizes(slices, 1)
    groups: Iterable[Sequence[Tensor]] = (parts,)
    if len(lengths) > 1:
        rows = x.split_with_sizes(lengths)
        groups = zip(*(part.split_with_sizes(lengths) for part in parts), strict=True)
    for segment, length, some_rows, targets in zip(segments, lengths, rows, groups, strict=True):
        live, slot = segment.rank, segment.slot
        a_first, b_first = a_start + slot * projections * a_part, b_start + slot * b_size
        vs: Sequence[Tensor]
        if projections == 1:
            vs = (torch.mm(some_rows, a_stack.as_strided((width, live), (1, width), a_first)),)
        elif live == rank:
            # None of A's rows is padding: one product for all projections.
            a = a_stack.as_strided((width, projections * rank), (1, width), a_first)
            vs = torch.mm(some_rows, a).chunk(projections, 1)
        else:
            firsts = range(a_first, a_first + projections * a_part, a_part)
            vs = [torch.mm(some_rows, a_stack.as_strided((width, live), (1, width), first)) for first in firsts]
        read_ahead = live >= _READ_AHEAD_RANK and length >= _READ_AHEAD_ROWS
        for v, target, columns in zip(vs, targets, slices, strict=True):
            b = b_stack.as_strided((live, columns), (1, rank), b_first)
            if read_ahead:
                b.sum()
            target.addmm_(v, b)
            b_first += columns * rank


def _add_batch(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, batch: Batch, slices: tuple[int, ...]) -> None:
    """Groups at once, in the slots' order: x and y are gathered in it, widened, and y is put back."""
    projections, rank, width = len(slices), b_stack.shape[2], x.shape[1]
    rows = x.index_select(0, batch.rows)
    if rows.dtype != torch.float32:
        rows = rows.float()
    rows = rows.view(batch.count, batch.depth, width)
    slot_size = projections * rank * width
    first, strides = a_stack.storage_offset() + batch.low * slot_size, (batch.step * slot_size, 1, width)
    if projections == 1 or batch.rank == rank:
        columns = batch.rank if projections == 1 else projections * rank
        v = torch.bmm(rows, a_stack.as_strided((batch.count, width, columns), strides, first))
    else:
        shape, part = (batch.count, width, batch.rank), rank * width
        v = torch.cat(
            [torch.bmm(rows, a_stack.as_strided(shape, strides, first + p * part)) for p in range(projections)], 2
        )
    _expand_batch(v, b_stack, y, batch, slices)


def _expand_batch(v: Tensor, b_stack: Tensor, y: Tensor, batch: Batch, slices: tuple[int, ...]) -> None:
    """Add to y what B makes of the low-rank rows `[count, depth, S * live]`."""
    count, depth, live, (_, out, rank) = batch.count, batch.depth, batch.rank, b_stack.shape
    wide = y.index_select(0, batch.rows)
    if y.dtype != torch.float32:
        wide = wide.float()
    first, slot_stride = b_stack.storage_offset() + batch.low * out * rank, batch.step * out * rank
    if len(slices) == 1:
        b = b_stack.as_strided((count, live, out), (slot_stride, 1, rank), first)
        wide.view(count, depth, out).baddbmm_(v, b)
    elif batch.step == 1 and wide.numel() <= _CACHED // 2 and (chunks := _output_chunks(slices)) is not None:
        projection_of, width = chunks
        b = b_stack.as_strided((count * (out // width), live, width), (width * rank, 1, rank), first)
        v = v.view(count, depth, len(slices), live)
        if projection_of is not None:
            v = v.index_select(2, projection_of)
        if depth == 1:
            wide.view(-1, 1, width).baddbmm_(v.view(-1, 1, live), b)
        else:
            delta = torch.bmm(v.transpose(1, 2).reshape(-1, depth, live), b)
            wide.view(count, depth, -1, width).add_(delta.view(count, -1, depth, width).transpose(1, 2))
    else:
        targets = wide.view(count, depth, out).split_with_sizes(slices, 2)
        for low, target in zip(v.chunk(len(slices), 2), targets, strict=True):
            columns = target.shape[2]
            target.baddbmm_(low, b_stack.as_strided((count, live, columns), (slot_stride, 1, rank), first))
            first += columns * rank
    if y.dtype != torch.float32:
        wide = wide.to(y.dtype)
    torch.index_select(wide, 0, batch.places, out=_rows(y, batch))


def _embed_batch(ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, batch: Batch) -> None:
    _, vocabulary, rank = a_stack.shape
    first_ids = torch.arange(batch.low, batch.low + batch.count * batch.step, batch.step).mul_(vocabulary).view(-1, 1)
    tokens = ids.index_select(0, batch.rows).view(batch.count, batch.depth).add_(first_ids).view(-1)
    v = a_stack.view(-1, rank).index_select(0, tokens)[:, : batch.rank]
    _expand_batch(v.view(batch.count, batch.depth, -1), b_stack, y, batch, (y.shape[1],))


def _embed_segment(ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, segment: Segment) -> None:
    table = a_stack.select(0, segment.slot)[:, : segment.rank]
    b = b_stack.select(0, segment.slot)[:, : segment.rank].t()
    is_wide = y.dtype == torch.float32
    block = max(1, MAX_TEMPORARY // segment.rank) if is_wide else _block_rows(y.shape[1])
    for some_ids, some_rows in zip(torch.split(ids, block), torch.split(y, block), strict=True):
        v = table.index_select(0, some_ids)
        if is_wide:
            some_rows.addmm_(v, b)
        else:
            some_rows.copy_(some_rows.float().addmm_(v, b))


def _add_long_loop(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, loop: Loop, slices: tuple[int, ...]) -> None:
    """Groups one after the other, in bf16 where that pays; x and y are the loop's rows."""
    width, out, projections = x.shape[1], y.shape[1], len(slices)
    may_be_bf16 = x.dtype == torch.bfloat16 and not loop.is_short and _has_fast_bf16()
    copies = _BF16_COPIES.of(a_stack, b_stack, slices) if may_be_bf16 else None
    for segment, length, rows, targets in _segments(loop, x, y):
        if copies is not None and _pays_in_bf16(length, width, out, segment.rank, projections):
            slot, rank = segment.slot, segment.rank
            weights = _BF16_COPIES.weights(copies, a_stack, b_stack, slot, rank, slices)
            _add_in_bf16(rows, weights, targets, slices)
        else:
            _add_long(rows, a_stack, b_stack, targets, segment, slices)


def _segments(loop: Loop, x: Tensor, y: Tensor) -> Iterable[tuple[Segment, int, Tensor, Tensor]]:
    """A loop's segments, their lengths, and their rows of x and y, which are the loop's."""
    lengths = loop.lengths
    if len(lengths) == 1:
        return ((loop.segments[0], lengths[0], x, y),)
    return zip(loop.segments, lengths, x.split_with_sizes(lengths), y.split_with_sizes(lengths), strict=True)


def _add_long(
    x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, segment: Segment, slices: tuple[int, ...]
) -> None:
    """One group of rows x and y, block by block in fp32."""
    is_wide = x.dtype == torch.float32
    block = MAX_TEMPORARY // (len(slices) * segment.rank) if is_wide else _block_rows(x.shape[1] + y.shape[1])
    for rows, target in _blocks(x, y, max(1, block)):
        wide = target if is_wide else target.float()
        _add_in_fp32(rows.float(), a_stack, b_stack, wide, (segment,), (rows.shape[0],), slices)
        if not is_wide:
            target.copy_(wide)


def _blocks(x: Tensor, y: Tensor, num_rows: int) -> Iterable[tuple[Tensor, Tensor]]:
    """At most so many rows of both at a time."""
    if x.shape[0] <= num_rows:
        return ((x, y),)
    return zip(torch.split(x, num_rows), torch.split(y, num_rows), strict=True)


def _add_in_bf16(x: Tensor, weights: Bf16Weights, y: Tensor, slices: tuple[int, ...]) -> None:
    """The bf16 rows of one group, with its weights and low-rank rows rounded to bf16; sums stay fp32 inside.

    The weights of an adapter that was cast to a bf16 base's dtype do not change, only the low-rank rows do.
    """
    projections, (num_rows, out) = len(slices), y.shape
    most_rows = MAX_TEMPORARY // (projections * weights.rank)
    if num_rows > most_rows:
        for some_rows, some_targets in _blocks(x, y, max(1, most_rows)):
            _add_in_bf16(some_rows, weights, some_targets, slices)
        return
    v = torch.mm(x, weights.a)
    if projections == 1:
        y.addmm_(v, weights.b[0])
    elif weights.block is not None and num_rows * weights.rank * out <= _MAX_BLOCK_WORK:
        y.addmm_(v, weights.block)
    else:
        for low, b, target in zip(v.chunk(projections, 1), weights.b, y.split_with_sizes(slices, 1), strict=True):
            target.addmm_(low, b)


@lru_cache(maxsize=1024)
def _pays_in_bf16(num_rows: int, width: int, out: int, live: int, projections: int) -> bool:
    """Whether products in bf16 save more than their calls cost, in nanoseconds of one core with AVX512-BF16."""
    if live * (projections * width + out) > MAX_TEMPORARY:
        return False
    saved = num_rows * (width * (0.1 + 0.0147 * projections * live) + out * (0.15 + 0.0115 * live))
    return saved > 14_000 * (1 if num_rows * live * out <= _MAX_BLOCK_WORK else projections)


@lru_cache(maxsize=64)
def _output_chunks(slices: tuple[int, ...]) -> tuple[Tensor | None, int] | None:
    """Cut slices of unequal widths into equal chunks, so that all of them fit one batched product.

    Returns:
        int64 `[chunks]` naming each chunk's projection (None: chunk i is projection i), and their width; or None where
        the slices' widths have no large common divisor.
    """
    width = gcd(*slices)
    projection = [index for index, size in enumerate(slices) for _ in range(size // width)]
    if len(projection) > _MAX_CHUNKS * len(slices):
        return None
    return None if projection == list(range(len(slices))) else torch.tensor(projection), width


@cache
def _has_fast_bf16() -> bool:
    """Whether oneDNN multiplies bf16 natively here: without the instructions it is slower than fp32, and inexact."""
    try:
        return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
