"""SGMV on the CPU: matrix products on views of the fp32 stacks, never on copies of them.

A small bf16 product costs about 20 us of dispatch here and an fp32 one about 4, so short groups run in fp32 whatever
the activations are. From `_NATIVE_ROWS` rows on, bf16 activations are faster in their own type.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import gcd

import torch
from torch import Tensor

from kernels.pieces import Batch, Segment
from kernels.schedule import Routing

_NATIVE_ROWS = 64
"""Rows from which a segment of bf16 activations is multiplied in bf16 (fp32 accumulation) rather than in fp32."""

_MAX_CHUNKS = 8
"""Most equal chunks for each projection that unequal slices are cut into."""


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
    slices = tuple(slices)
    for piece in routing.pieces:
        if isinstance(piece, Batch):
            _add_batch(x, a_stack, b_stack, y, piece, slices)
        elif piece.stop - piece.start == 1:
            _add_row(x, a_stack, b_stack, y, piece, slices)
        elif piece.stop - piece.start >= _NATIVE_ROWS and x.dtype == torch.bfloat16 and _has_fast_bf16():
            _add_segment_bf16(x, a_stack, b_stack, y, piece, slices)
        else:
            _add_segment_fp32(x, a_stack, b_stack, y, piece, slices)


def sgmv_embed_cpu(ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing) -> None:
    """Add every adapter row's delta to `y` in place; see `kernels.embedding.sgmv_embed` for the semantics.

    Args:
        ids: int64 `[T]`.
        a_stack: fp32 `[N, V, R]`.
        b_stack: fp32 `[N, OUT, R]`.
        y: `[T, OUT]`, bf16, fp16 or fp32, updated in place with one rounding.
        routing: The step's routing on the CPU.
    """
    _, vocabulary, rank = a_stack.shape
    for piece in routing.pieces:
        target, row_ids = y[piece.start : piece.stop], ids[piece.start : piece.stop]
        if isinstance(piece, Batch):
            first_ids = torch.arange(piece.low, piece.high).mul_(vocabulary).view(-1, 1)
            places = row_ids.index_select(0, piece.rows(1)).view(-1, piece.depth).add_(first_ids).view(-1)
            v = a_stack.view(-1, rank).index_select(0, places)[:, : piece.rank].view(-1, piece.depth, piece.rank)
            target.add_(_expand(v, b_stack, piece.low, piece.high, (y.shape[1],)).index_select(0, piece.places))
            continue
        v = a_stack[piece.slot].index_select(0, row_ids)[:, : piece.rank]
        b = b_stack[piece.slot, :, : piece.rank].t()
        if y.dtype == torch.float32:
            target.addmm_(v, b)
        else:
            target.add_(torch.mm(v, b))


def _add_row(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, segment: Segment, slices: tuple[int, ...]) -> None:
    """Products with a vector, straight into y where there is one projection and y is fp32."""
    slot, live = segment.slot, segment.rank
    row, target = x[segment.start].float(), y[segment.start]
    if len(slices) > 1:
        v = torch.mv(a_stack[slot], row).view(len(slices), 1, -1)[:, :, :live]
        target.add_(_expand(v, b_stack, slot, slot + 1, slices)[0])
        return
    v = torch.mv(a_stack[slot, :live], row)
    if y.dtype == torch.float32:
        target.addmv_(b_stack[slot, :, :live], v)
    else:
        target.add_(torch.mv(b_stack[slot, :, :live], v))


def _add_batch(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, batch: Batch, slices: tuple[int, ...]) -> None:
    """One product over (slot, projection) for all of A, one over (slot, equal chunk of the output) for all of B."""
    projections, rank = len(slices), b_stack.shape[2]
    rows = x[batch.start : batch.stop].float().index_select(0, batch.rows(projections))
    a = a_stack.view(-1, rank, x.shape[1])[batch.low * projections : batch.high * projections, : batch.rank]
    v = torch.bmm(rows.view(-1, batch.depth, x.shape[1]), a.transpose(1, 2))
    delta = _expand(v, b_stack, batch.low, batch.high, slices)
    y[batch.start : batch.stop].add_(delta.index_select(0, batch.places))


def _expand(v: Tensor, b_stack: Tensor, low: int, high: int, slices: tuple[int, ...]) -> Tensor:
    """From v `[slots * projections, depth, live]` of slots `[low, high)` to fp32 deltas `[slots * depth, OUT]`."""
    slots, (_, depth, live), (_, out, rank) = high - low, v.shape, b_stack.shape
    num_chunks, width, chunk_projection = _output_chunks(slices)
    if num_chunks > _MAX_CHUNKS * len(slices):
        return _expand_by_slice(v, b_stack, low, high, slices)
    if chunk_projection is not None:
        v = v.view(slots, len(slices), depth, live).index_select(1, chunk_projection).view(-1, depth, live)
    b = b_stack.view(-1, width, rank)[low * num_chunks : high * num_chunks, :, :live]
    delta = torch.bmm(v, b.transpose(1, 2))
    if depth > 1 and num_chunks > 1:
        delta = delta.view(slots, num_chunks, depth, width).transpose(1, 2)
    return delta.reshape(-1, out)


def _expand_by_slice(v: Tensor, b_stack: Tensor, low: int, high: int, slices: tuple[int, ...]) -> Tensor:
    """The same where the slices' widths have no large common divisor: one product a slice."""
    _, depth, live = v.shape
    v = v.view(high - low, len(slices), depth, live)
    parts = []
    column = 0
    for projection, width in enumerate(slices):
        b = b_stack[low:high, column : column + width, :live]
        parts.append(torch.bmm(v[:, projection], b.transpose(1, 2)))
        column += width
    return torch.cat(parts, dim=2).view(-1, column)


def _add_segment_fp32(
    x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, segment: Segment, slices: tuple[int, ...]
) -> None:
    """One product for all projections of A, then one for each slice of B, straight into y where y is fp32."""
    projections, rank, live = len(slices), b_stack.shape[2], segment.rank
    rows = x[segment.start : segment.stop].float().expand(projections, -1, -1)
    a = a_stack.view(-1, rank, x.shape[1])[segment.slot * projections : (segment.slot + 1) * projections, :live]
    v = torch.bmm(rows, a.transpose(1, 2))
    b = b_stack[segment.slot, :, :live]
    column = 0
    for projection, width in enumerate(slices):
        target = y[segment.start : segment.stop, column : column + width]
        b_slice = b[column : column + width].t()
        if y.dtype == torch.float32:
            target.addmm_(v[projection], b_slice)
        else:
            target.copy_(target.float().addmm_(v[projection], b_slice))
        column += width


def _add_segment_bf16(
    x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, segment: Segment, slices: tuple[int, ...]
) -> None:
    """As in fp32, with this slot's live weights and the low-rank rows rounded to bf16; sums stay fp32 inside.

    The weights of an adapter that was cast to a bf16 base's dtype do not change, only the low-rank rows do.
    """
    projections, rank, live = len(slices), b_stack.shape[2], segment.rank
    a = a_stack[segment.slot].view(projections, rank, -1)[:, :live].bfloat16()
    v = torch.mm(x[segment.start : segment.stop], a.view(projections * live, -1).t())
    b = b_stack[segment.slot, :, :live].bfloat16()
    column = 0
    for projection, width in enumerate(slices):
        target = y[segment.start : segment.stop, column : column + width]
        target.addmm_(v[:, projection * live : (projection + 1) * live], b[column : column + width].t())
        column += width


@lru_cache(maxsize=64)
def _output_chunks(slices: tuple[int, ...]) -> tuple[int, int, Tensor | None]:
    """Cut slices of unequal widths into equal chunks, so that all of them fit one batched product.

    Returns:
        The number of chunks, their width, and int64 `[chunks]` naming each one's projection (None: chunk i is
        projection i).
    """
    width = gcd(*slices)
    projection = [index for index, size in enumerate(slices) for _ in range(size // width)]
    same = projection == list(range(len(slices)))
    return len(projection), width, None if same else torch.tensor(projection)


@cache
def _has_fast_bf16() -> bool:
    """Whether oneDNN multiplies bf16 natively here: without the instructions it is slower than fp32, and inexact."""
    try:
        return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
