"""How the CPU path cuts a step's groups: short ones together, for one call, and long ones for matrix products."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

LONG_ROWS, LONG_WORK = 56, 256
"""A group of rank r is multiplied by torch's own matrix products from `LONG_ROWS + LONG_WORK / r` rows on (72 at rank
16): from there on they are faster than a kernel that reads B in the order it is stored in, in spite of their calls."""

MAX_SHORT_ROWS = 224
"""Most rows of a loop of short groups, and of one: the temporaries of even the widest layer stay below 16 MB."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[start, stop)` of one slot, of true rank `rank`."""

    slot: int
    start: int
    stop: int
    rank: int

    @property
    def is_short(self) -> bool:
        """Whether it is too little for torch's matrix products."""
        rows = self.stop - self.start
        return rows <= MAX_SHORT_ROWS and (rows - LONG_ROWS) * self.rank < LONG_WORK


@dataclass(frozen=True, eq=False)
class Loop:
    """Rows `[start, stop)` of neighbouring segments.

    Attributes:
        segments: At least one. All are short, or none is.
    """

    segments: tuple[Segment, ...]

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

    @property
    def is_short(self) -> bool:
        """Whether the segments are."""
        return self.segments[0].is_short

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


def cut(groups: Sequence[tuple[int, int, int]], slot_ranks: Sequence[int]) -> tuple[Loop, ...]:
    """Cut groups `(slot, start, stop)`, in row order, into loops; groups of rank 0 add nothing and are left out."""
    return tuple(_loops([Segment(*group, slot_ranks[group[0]]) for group in groups if slot_ranks[group[0]]]))


def _loops(segments: Sequence[Segment]) -> Iterator[Loop]:
    """Segments put together as far as they are neighbours, and all long or all short."""
    members: list[Segment] = []
    for segment in segments:
        is_short = segment.is_short
        if members and (
            segment.start != members[-1].stop
            or is_short != members[-1].is_short
            or (is_short and segment.stop - members[0].start > MAX_SHORT_ROWS)
        ):
            yield Loop(tuple(members))
            members = []
        members.append(segment)
    if members:
        yield Loop(tuple(members))
