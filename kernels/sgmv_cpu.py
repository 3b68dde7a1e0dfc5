"""SGMV on the CPU: short groups in C, long ones as matrix products on views of the stacks. No weight is gathered.

Short groups (`kernels.loops`) go to `kernels.sgmv_native`, all of them in one call. Where that cannot be compiled, and
for long groups, torch multiplies each group: in the activations' data type where the processor does, with fp32 sums and
the low-rank rows rounded to it, which the C kernel does from 16 rows on; else in fp32, rows and weights widened, and
the result rounded once.

Temporaries have at most `MAX_TEMPORARY` elements, or those of one row of x and y.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kernels.loops import Cut, Loop, Segment
from kernels.schedule import Routing
from kernels.sgmv_native import DTYPES, MAX_RANK, expand_native, sgmv_function, sgmv_native

MAX_TEMPORARY = 1 << 22
"""Most elements of a temporary: 16 MB in fp32."""

_CACHED = 1 << 18
"""Elements of x and y of a loop or a block: 1 MB in fp32, what a core's own cache holds."""

_READ_AHEAD_RANK, _READ_AHEAD_ROWS = 32, 3
"""Rank and rows from which an fp32 B is read from memory in order first: its product reads it in strides, and waits."""


def sgmv_cpu(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing, slices: Sequence[int]) -> None:
    """Add every adapter row's delta to `y` in place; see `kernels.sgmv.sgmv` for the semantics.

    Args:
        x: Activations `[T, K]`, bf16, fp16 or fp32.
        a_stack: `[N, S*R, K]`, x's dtype, but fp32 for fp16 (`kernels.schedule.cpu_stack_dtype`).
        b_stack: `[N, OUT, R]`, likewise.
        y: `[T, OUT]`, x's dtype, updated in place with one rounding.
        routing: The step's routing on the CPU.
        slices: Output widths of the S projections; they add up to OUT.
    """
    slices = tuple(slices)
    for loop in routing.loops(layer_cut(x.dtype, x.shape[1], slices)):
        rows, target = _rows(x, loop), _rows(y, loop)
        if not loop.is_short or (rows.dtype not in DTYPES and target.numel() > MAX_TEMPORARY):
            _add_long_loop(rows, a_stack, b_stack, target, loop, slices)
        elif rows.dtype in DTYPES:
            _add_short_loop(rows, a_stack, b_stack, target, loop, slices)
        else:
            wide = target.float()
            _add_short_loop(rows.float(), a_stack, b_stack, wide, loop, slices)
            target.copy_(wide)


def sgmv_embed_cpu(ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, routing: Routing) -> None:
    """Add every adapter row's delta to `y` in place; see `kernels.embedding.sgmv_embed` for the semantics.

    Args:
        ids: int64 `[T]`.
        a_stack: `[N, V, R]`, y's dtype, but fp32 for fp16 (`kernels.schedule.cpu_stack_dtype`).
        b_stack: `[N, OUT, R]`, likewise.
        y: `[T, OUT]`, bf16, fp16 or fp32, updated in place with one rounding.
        routing: The step's routing on the CPU.
    """
    for loop in routing.loops(layer_cut(y.dtype, 0, (y.shape[1],))):
        rows, target = _rows(ids, loop), _rows(y, loop)
        if loop.is_short and y.dtype in DTYPES and _is_native(b_stack):
            low = torch.empty(rows.shape[0], a_stack.shape[2])
            for segment, some_ids, some_low in _segments(loop, rows, low):
                some_low.copy_(a_stack.select(0, segment.slot).index_select(0, some_ids))
            expand_native(low, b_stack, target, loop)
            continue
        for segment, some_ids, some_rows in _segments(loop, rows, target):
            _embed_segment(some_ids, a_stack, b_stack, some_rows, segment)


def layer_cut(dtype: torch.dtype, width: int, slices: Sequence[int]) -> Cut:
    """How a step's groups are cut in a layer: activations of a data type and width, projections of these widths."""
    if dtype == torch.bfloat16 and _has_fast_bf16():
        return Cut(is_bf16=True, width=len(slices) * width + sum(slices))
    return Cut(is_bf16=False, is_widened=dtype == torch.bfloat16)


def _is_native(b_stack: Tensor) -> bool:
    return b_stack.shape[2] <= MAX_RANK and sgmv_function() is not None


def _rows(tensor: Tensor, loop: Loop) -> Tensor:
    return tensor if loop.stop - loop.start == tensor.shape[0] else tensor[loop.start : loop.stop]


def _add_short_loop(
    x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, loop: Loop, slices: tuple[int, ...]
) -> None:
    """Short groups; x and y are the loop's rows, fp32 or bf16, and so are the stacks."""
    if _is_native(b_stack):
        sgmv_native(x, a_stack, b_stack, y, loop, slices)
    else:
        _add_long_loop(x, a_stack, b_stack, y, loop, slices)


def _block_rows(row_width: int) -> int:
    """Rows of one block of a long segment: as many as stay in cache, or enough to read the weights for."""
    return max(1, min(max(_CACHED // row_width, 64), MAX_TEMPORARY // row_width))


def _add_products(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    segments: Sequence[Segment],
    lengths: Sequence[int],
    slices: tuple[int, ...],
) -> None:
    """Groups one after the other, in place, in x's dtype; x and y are their rows, so many of each."""
    projections, width, (_, out, rank) = len(slices), x.shape[1], b_stack.shape
    a_start, b_start = int(a_stack.storage_offset()), int(b_stack.storage_offset())
    a_part, b_size = rank * width, out * rank
    as_it_is = x.dtype == a_stack.dtype
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
        if projections > 1 and live == rank and as_it_is:
            # None of A's rows is padding: one product for all projections.
            a = a_stack.as_strided((width, projections * rank), (1, width), a_first)
            vs = torch.mm(some_rows, a).chunk(projections, 1)
        else:
            firsts = range(a_first, a_first + projections * a_part, a_part)
            views = (a_stack.as_strided((width, live), (1, width), first) for first in firsts)
            vs = [torch.mm(some_rows, a if as_it_is else a.to(x.dtype)) for a in views]
        read_ahead = b_stack.dtype == torch.float32 and live >= _READ_AHEAD_RANK and length >= _READ_AHEAD_ROWS
        for v, target, columns in zip(vs, targets, slices, strict=True):
            b = b_stack.as_strided((live, columns), (1, rank), b_first)
            b_first += columns * rank
            if not as_it_is:
                _add_widened(v, b, target)
                continue
            if read_ahead:
                b.sum()
            target.addmm_(v, b)


def _add_widened(v: Tensor, b: Tensor, y: Tensor) -> None:
    """Add `v @ b` to y, with as many columns of b at a time in their dtype as a temporary holds."""
    step = max(1, MAX_TEMPORARY // b.shape[0])
    for some_columns, some_targets in zip(torch.split(b, step, 1), torch.split(y, step, 1), strict=True):
        some_targets.addmm_(v, some_columns.to(v.dtype))


def _embed_segment(ids: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, segment: Segment) -> None:
    table = a_stack.select(0, segment.slot)[:, : segment.rank]
    b = b_stack.select(0, segment.slot)[:, : segment.rank].t()
    is_wide = y.dtype == torch.float32
    block = max(1, MAX_TEMPORARY // segment.rank) if is_wide else _block_rows(y.shape[1])
    for some_ids, some_rows in zip(torch.split(ids, block), torch.split(y, block), strict=True):
        v = table.index_select(0, some_ids).float()
        if is_wide:
            some_rows.addmm_(v, b)
        else:
            wide = some_rows.float()
            _add_widened(v, b, wide)
            some_rows.copy_(wide)


def _segments(loop: Loop, x: Tensor, y: Tensor) -> Iterable[tuple[Segment, Tensor, Tensor]]:
    """A loop's segments and their rows of x and y, which are the loop's."""
    lengths = loop.lengths
    if len(lengths) == 1:
        return ((loop.segments[0], x, y),)
    return zip(loop.segments, x.split_with_sizes(lengths), y.split_with_sizes(lengths), strict=True)


def _add_long_loop(x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, loop: Loop, slices: tuple[int, ...]) -> None:
    """A loop's groups of rows x and y: in their dtype where the processor multiplies it, else in fp32."""
    as_it_is = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and _has_fast_bf16())
    if as_it_is and loop.num_rank_rows * len(slices) <= MAX_TEMPORARY:
        _add_products(x, a_stack, b_stack, y, loop.segments, loop.lengths, slices)
        return
    for segment, rows, targets in _segments(loop, x, y):
        _add_blocks(rows, a_stack, b_stack, targets, segment, slices, as_it_is=as_it_is)


def _add_blocks(
    x: Tensor,
    a_stack: Tensor,
    b_stack: Tensor,
    y: Tensor,
    segment: Segment,
    slices: tuple[int, ...],
    *,
    as_it_is: bool,
) -> None:
    """One group of rows x and y, block by block, in their dtype or in fp32."""
    num_weights = segment.rank * (len(slices) * x.shape[1] + y.shape[1])
    if not as_it_is and a_stack.dtype != torch.float32 and num_weights <= MAX_TEMPORARY:
        a_stack, b_stack, segment = _widened(a_stack, b_stack, segment, len(slices))
    block = MAX_TEMPORARY // (len(slices) * segment.rank) if as_it_is else _block_rows(x.shape[1] + y.shape[1])
    for rows, target in _blocks(x, y, max(1, block)):
        wide = target if as_it_is else target.float()
        some_rows = rows if as_it_is else rows.float()
        _add_products(some_rows, a_stack, b_stack, wide, (segment,), (rows.shape[0],), slices)
        if not as_it_is:
            target.copy_(wide)


def _widened(a_stack: Tensor, b_stack: Tensor, segment: Segment, projections: int) -> tuple[Tensor, Tensor, Segment]:
    """Stacks of one slot that hold what is live of a segment's in fp32, and the segment as one of theirs."""
    live, width = segment.rank, a_stack.shape[2]
    a = a_stack[segment.slot].view(projections, -1, width)[:, :live].float()
    b = b_stack[segment.slot, :, :live].float()
    return a.view(1, -1, width), b.unsqueeze(0), replace(segment, slot=0)


def _blocks(x: Tensor, y: Tensor, num_rows: int) -> Iterable[tuple[Tensor, Tensor]]:
    """At most so many rows of both at a time."""
    if x.shape[0] <= num_rows:
        return ((x, y),)
    return zip(torch.split(x, num_rows), torch.split(y, num_rows), strict=True)


@cache
def _has_fast_bf16() -> bool:
    """Whether oneDNN multiplies bf16 natively here: without the instructions it is slower than fp32, and inexact."""
    try:
        return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
