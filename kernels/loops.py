"""How the CPU path cuts a step's groups: short ones together, for one call, and long ones for matrix products."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

MAX_SHORT_ROWS = 384
"""Most rows of a loop of short groups, and of one: with more, torch's products are as fast at any rank, unless torch
has to widen what it multiplies."""

MIN_LONG_ROWS = 5
"""Fewer rows are always short: what they take is mostly reading the weights."""


class Cut(NamedTuple):
    """From how many rows on torch multiplies a layer's group faster than a kernel that reads B as it is stored.

    Measured with 8 groups a step (`tests/bench/bench_kernels_cpu.py`). A group of fp32 costs torch less from 48 + 256 /
    rank rows on, whatever the layer. One of bf16 costs it some 30 us for each of its products, however few its rows
    are, where it has instructions for them (AVX512-BF16); the kernel has no such cost, but gets from its caches what
    torch keeps at hand. Where it has none (AVX2) it copies x and y for its products, which ranks up to 32 never repay.

    Attributes:
        is_bf16: Whether torch multiplies the layer in bf16.
        width: Of a rank's weights: of A for each of the projections, and of B for all of them. Only counts in bf16.
        is_widened: Whether the layer is of bf16, which torch has to widen.
    """

    is_bf16: bool
    width: int = 0
    is_widened: bool = False

    def is_short(self, rows: int, rank: int) -> bool:
        """Whether a group is too little for torch's matrix products."""
        if self.is_widened:
            return rank <= 32 or (rows - 32) * (rank - 32) <= 1024
        if rows < MIN_LONG_ROWS or rows > MAX_SHORT_ROWS:
            return rows < MIN_LONG_ROWS
        if self.is_bf16:
            return rows * rank * (self.width + 8_000) < 110_000_000 and (rows - 160) * rank < 1_536
        return (rows - 48) * rank < 256


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[start, stop)` of one slot, of true rank `rank`."""

    slot: int
    start: int
    stop: int
    rank: int


@dataclass(frozen=True, eq=False)
class Loop:
    """Rows `[start, stop)` of neighbouring segments.

    Attributes:
        segments: At least one.
        is_short: Whether all are short (`Cut.is_short`); else none is.
    """

    segments: tuple[Segment, ...]
    is_short: bool = True

    @property
    def start(self) -> int:
        """The first row."""
        return self.segments[0].start

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.segments[-1].stop

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each segment."""
        return tuple(segment.stop - segment.start for segment in self.segments)

    @cached_property
    def num_rank_rows(self) -> int:
        """Sum of rows times ranks: of one and the same width, what it takes to multiply them."""
        return sum(segment.rank * rows for segment, rows in zip(self.segments, self.lengths, strict=True))

    @cached_property
    def array(self) -> "tuple[int, ctypes.Array[Any]]":
        """int32 `[segments, 4]`, `(slot, start, stop, rank)` of each, its first row being row 0; and its address."""
        numbers = [
            number
            for segment in self.segments
            for number in (segment.slot, segment.start - self.start, segment.stop - self.start, segment.rank)
        ]
        array = (ctypes.c_int32 * len(numbers))(*numbers)
        return ctypes.addressof(array), array


def loops(groups: Sequence[tuple[int, int, int]], slot_ranks: Sequence[int], cut: Cut) -> tuple[Loop, ...]:
    """Cut groups `(slot, start, stop)`, in row order, into loops; groups of rank 0 add nothing and are left out.

    Segments are put together as far as they are neighbours, and all long or all short; a short one is in several loops
    if it has more than `MAX_SHORT_ROWS`.
    """
    segments = [Segment(*group, slot_ranks[group[0]]) for group in groups if slot_ranks[group[0]]]
    return tuple(_loops(_pieces(segments, cut)))


def _pieces(segments: Sequence[Segment], cut: Cut) -> Iterator[tuple[Segment, bool]]:
    """Segments, short ones in pieces of at most `MAX_SHORT_ROWS`, and whether they are short."""
    for segment in segments:
        is_short = cut.is_short(segment.stop - segment.start, segment.rank)
        size = MAX_SHORT_ROWS if is_short else segment.stop - segment.start
        for start in range(segment.start, segment.stop, size):
            yield replace(segment, start=start, stop=min(start + size, segment.stop)), is_short


def _loops(segments: Iterable[tuple[Segment, bool]]) -> Iterator[Loop]:
    members: list[Segment] = []
    are_short = True
    for segment, is_short in segments:
        if members and (
            segment.start != members[-1].stop
            or is_short != are_short
            or (is_short and segment.stop - members[0].start > MAX_SHORT_ROWS)
        ):
            yield Loop(tuple(members), are_short)
            members = []
        members.append(segment)
        are_short = is_short
    if members:
        yield Loop(tuple(members), are_short)
