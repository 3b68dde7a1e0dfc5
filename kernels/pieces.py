"""How the CPU path cuts a step's groups into pieces that cost few matrix products each.

The choice rule lives here and nowhere else. Its costs are microseconds for a layer of SmolLM2-135M (four sites, 576 and
1536 wide) on one thread, with weights that come from memory: see `_batch_cost` and `_alone_cost`. They add up the same
way for wider layers, where what is read, written and multiplied grows with the width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BATCH = 110.0
"""Once for a batch: its rows are put in the slots' order, and back."""

_SLOT, _ALONE = 20.0, 60.0
"""Calls for a group, inside one batched product and on its own."""

_ROW, _RANK, _RANK_ROW = 8.0, 4.0, 0.3
"""Reading and writing a row; reading a rank's weights; multiplying one with the other."""

_MAX_BATCHED_WORK = 256
"""Rank times rows of a group from which its own product is efficient, and a batched one less so."""

_MAX_BATCHED_ROWS = 64
"""Most padded rows of a batch: its temporaries, rows times width, must stay in cache."""

LONG_ROWS = 64
"""Rows from which a group is multiplied in blocks of its own, or in the activations' data type."""

_MAX_LOOP_ROWS = 128
"""Most rows of a loop of short groups, which share temporaries."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `[start, stop)` of one slot, multiplied on their own."""

    slot: int
    start: int
    stop: int
    rank: int


@dataclass(frozen=True, eq=False, slots=True)
class Loop:
    """Rows `[start, stop)` of neighbouring segments, multiplied one after the other.

    Attributes:
        segments: At least one. All have `LONG_ROWS`, or none has.
        lengths: Rows of each.
    """

    start: int
    stop: int
    segments: tuple[Segment, ...]
    lengths: tuple[int, ...]

    @property
    def is_short(self) -> bool:
        """Whether the segments have fewer rows than `LONG_ROWS`."""
        return self.lengths[0] < LONG_ROWS


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Rows `[start, stop)` of `count` slots, at least two, multiplied as one batch over a strided view of the stacks.

    The slots are `low + i * step`. Each has `depth` places: row `r` of the step takes place `places[r - start]`, and
    places without a row repeat another row.

    Attributes:
        depth: Length of the longest group.
        rank: Largest true rank of the slots.
        rows: int64 `[count * depth]`, the row in each place.
        places: int64 `[stop - start]`, the place of each row.
        loop: The same rows as a loop.
    """

    low: int
    step: int
    count: int
    start: int
    stop: int
    depth: int
    rank: int
    rows: Tensor
    places: Tensor
    loop: Loop

    @property
    def num_places(self) -> int:
        """Places for rows, those without one included."""
        return self.count * self.depth


def cut(groups: Sequence[tuple[int, int, int]], slot_ranks: Sequence[int]) -> tuple[Loop | Batch, ...]:
    """Cut groups `(slot, start, stop)`, in row order, into pieces; groups of rank 0 add nothing and are left out."""
    pieces: list[Loop | Batch] = []
    alone: list[Segment] = []
    for run in _runs([Segment(*group, slot_ranks[group[0]]) for group in groups if slot_ranks[group[0]]]):
        if run.pays():
            pieces += _loops(alone)
            alone = []
            pieces.append(run.batch())
        else:
            alone += run.members
    pieces += _loops(alone)
    return tuple(pieces)


class _Run:
    """Neighbouring segments that one batch could take."""

    def __init__(self, segment: Segment) -> None:
        self.members = [segment]
        self._step = 0
        self._depth = segment.stop - segment.start
        self._rank = segment.rank
        self._cost_alone = _alone_cost(self._depth, self._rank)

    def add(self, segment: Segment) -> bool:
        """Take one more where that is possible and no dearer than leaving it alone; returns whether it was taken."""
        last, rows = self.members[-1], segment.stop - segment.start
        step = last.slot - segment.slot
        if step < 1 or (self._step and step != self._step) or segment.start != last.stop:
            return False
        count, depth, rank = len(self.members), max(self._depth, rows), max(self._rank, segment.rank)
        if depth * rank >= _MAX_BATCHED_WORK or depth * (count + 1) > _MAX_BATCHED_ROWS:
            return False
        added_alone = _alone_cost(rows, segment.rank)
        if _batch_cost(count + 1, depth, rank) - _batch_cost(count, self._depth, self._rank) > added_alone:
            return False
        self.members.append(segment)
        self._step, self._depth, self._rank = step, depth, rank
        self._cost_alone += added_alone
        return True

    def pays(self) -> bool:
        """Whether its members cost less as a batch."""
        return len(self.members) > 1 and _batch_cost(len(self.members), self._depth, self._rank) < self._cost_alone

    def batch(self) -> Batch:
        """Its members as a batch."""
        first, low, depth = self.members[0], self.members[-1].slot, self._depth
        rows = [first.start] * (len(self.members) * depth)
        places: list[int] = []
        for segment in self.members:
            place, length = (segment.slot - low) // self._step * depth, segment.stop - segment.start
            places.extend(range(place, place + length))
            rows[place : place + length] = range(segment.start, segment.stop)
        return Batch(
            low=low,
            step=self._step,
            count=len(self.members),
            start=first.start,
            stop=self.members[-1].stop,
            depth=depth,
            rank=self._rank,
            rows=torch.tensor(rows),
            places=torch.tensor(places),
            loop=_loop(self.members),
        )


def _runs(segments: Sequence[Segment]) -> Iterator[_Run]:
    """Runs of neighbours, each as long as it pays."""
    run: _Run | None = None
    for segment in segments:
        if run is None or not run.add(segment):
            if run is not None:
                yield run
            run = _Run(segment)
    if run is not None:
        yield run


def _batch_cost(count: int, depth: int, rank: int) -> float:
    return _BATCH + count * (_SLOT + depth * _ROW + rank * (_RANK + depth * _RANK_ROW))


def _alone_cost(rows: int, rank: int) -> float:
    return _ALONE + rows * _ROW + rank * (_RANK + rows * _RANK_ROW)


def _loops(segments: Sequence[Segment]) -> Iterator[Loop]:
    """Segments put together as far as they are neighbours, and all long or all short."""
    members: list[Segment] = []
    for segment in segments:
        is_long = segment.stop - segment.start >= LONG_ROWS
        if members and (
            segment.start != members[-1].stop
            or is_long != (members[-1].stop - members[-1].start >= LONG_ROWS)
            or (not is_long and segment.stop - members[0].start > _MAX_LOOP_ROWS)
        ):
            yield _loop(members)
            members = []
        members.append(segment)
    if members:
        yield _loop(members)


def _loop(members: Sequence[Segment]) -> Loop:
    lengths = tuple(segment.stop - segment.start for segment in members)
    return Loop(members[0].start, members[-1].stop, tuple(members), lengths)
