"""SGMV on the CPU: short groups in C, long ones as matrix products on views of the fp32 stacks. No weight is gathered.

Short groups (`kernels.loops`) go to `kernels.sgmv_native`, all of them in one call. Where that cannot be compiled, and
for long groups, torch multiplies each group: bf16 rows are widened once, and rounded once. Long bf16 groups are
multiplied in bf16 (fp32 accumulation) where that makes up for the dispatch, 16 us a product, with bf16 copies of their
weights: those are kept, `MAX_COPIES_BYTES` at most in a process, and made anew when the stacks have been written to.

Temporaries have at most `MAX_TEMPORARY` elements, or those of one row of x and y.
"""

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from kernels.bf16_copies import MAX_BLOCK_WEIGHTS, Bf16Copies, Bf16Weights
from kernels.loops import Loop, Segment
from kernels.schedule import Routing
from kernels.sgmv_native import DTYPES, MAX_RANK, expand_native, sgmv_function, sgmv_native

MAX_TEMPORARY = 1 << 22
"""Most elements of a temporary: 16 MB in fp32."""

MAX_COPIES_BYTES = 512 << 20
"""Most bytes of bf16 copies of adapters: of 8 adapters of rank 64 in all of SmolLM2-135M, they take 312 MB."""

_BF16_COPIES = Bf16Copies(MAX_COPIES_BYTES)

_CACHED = 1 << 18
"""Elements of x and y of a loop or a block: 1 MB in fp32, what a core's own cache holds."""

_MAX_BLOCK_WORK = 64 * MAX_BLOCK_WEIGHTS
"""Rows times rank times output width up to which one product with zeros is faster than one for each projection."""

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
    slices = tuple(slices)
    for loop in routing.loops:
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
        a_stack: fp32 `[N, V, R]`.
        b_stack: fp32 `[N, OUT, R]`.
        y: `[T, OUT]`, bf16, fp16 or fp32, updated in place with one rounding.
        routing: The step's routing on the CPU.
    """
    for loop in routing.loops:
        rows, target = _rows(ids, loop), _rows(y, loop)
        if loop.is_short and y.dtype in DTYPES and _is_native(b_stack):
            low = a_stack.new_empty(rows.shape[0], a_stack.shape[2])
            for segment, some_ids, some_low in _segments(loop, rows, low):
                torch.index_select(a_stack.select(0, segment.slot), 0, some_ids, out=some_low)
            expand_native(low, b_stack, target, loop)
            continue
        for segment, some_ids, some_rows in _segments(loop, rows, target):
            _embed_segment(some_ids, a_stack, b_stack, some_rows, segment)


def _is_native(b_stack: Tensor) -> bool:
    return b_stack.shape[2] <= MAX_RANK and sgmv_function() is not None


def _rows(tensor: Tensor, loop: Loop) -> Tensor:
    return tensor if loop.stop - loop.start == tensor.shape[0] else tensor[loop.start : loop.stop]


def _add_short_loop(
    x: Tensor, a_stack: Tensor, b_stack: Tensor, y: Tensor, loop: Loop, slices: tuple[int, ...]
) -> None:
    """Short groups; x and y are the loop's rows, fp32 or bf16."""
    if _is_native(b_stack):
        sgmv_native(x, a_stack, b_stack, y, loop, slices)
    elif x.dtype == torch.float32:
        _add_in_fp32(x, a_stack, b_stack, y, loop.segments, loop.lengths, slices)
    else:
        for segment, rows, target in _segments(loop, x, y):
            _add_long(rows, a_stack, b_stack, target, segment, slices)


def _block_rows(row_width: int) -> int:
    """Rows of one block of a long segment: as many as stay in cache, or enough to read the weights for."""
    return max(1, min(max(_CACHED // row_width, 64), MAX_TEMPORARY // row_width))


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
    may_be_bf16 = x.dtype == torch.bfloat16 and _has_fast_bf16()
    copies = _BF16_COPIES.of(a_stack, b_stack, slices) if may_be_bf16 else None
    for segment, rows, targets in _segments(loop, x, y):
        if copies is not None and _pays_in_bf16(rows.shape[0], width, out, segment.rank, projections):
            slot, rank = segment.slot, segment.rank
            weights = _BF16_COPIES.weights(copies, a_stack, b_stack, slot, rank, slices)
            _add_in_bf16(rows, weights, targets, slices)
        else:
            _add_long(rows, a_stack, b_stack, targets, segment, slices)


def _segments(loop: Loop, x: Tensor, y: Tensor) -> Iterable[tuple[Segment, Tensor, Tensor]]:
    """A loop's segments and their rows of x and y, which are the loop's."""
    lengths = loop.lengths
    if len(lengths) == 1:
        return ((loop.segments[0], x, y),)
    return zip(loop.segments, x.split_with_sizes(lengths), y.split_with_sizes(lengths), strict=True)


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


@cache
def _has_fast_bf16() -> bool:
    """Whether oneDNN multiplies bf16 natively here: without the instructions it is slower than fp32, and inexact."""
    try:
        return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
