"""How the CPU path cuts a step's groups into pieces that cost one set of matrix products each.

The choice rule lives here and nowhere else. It comes from timings with one thread at SmolLM2's four sites (576 and 1536
wide, ranks 8 and 16, cold weights). Counted in rows of a batch (about 10 us for a layer's four sites), there costs

    a batch of n slots, each padded to m rows    11 + 4.5 n + n m
    a group of m rows on its own                 13 + m

so a group joins its neighbour's batch while that adds less than standing alone would. `n` counts the absent slots a
batch spans: their weights are read and the result is dropped, which pays for one of them. `grouped_mm` of
`torch.nn.functional` needs no padding, yet it was slower wherever there can be a batch, and pays for every absent slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_SLOT_COST = 4.5
_ALONE_COST = 13

_MAX_BATCHED_GROUP = 16
"""Longest group a batch takes: from there on a product of its own is efficient."""

_MAX_BATCHED_ROWS = 64
"""Most padded rows of a batch: its temporaries, rows times output width, must stay in cache."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows `[start, stop)` of one slot, multiplied on their own."""

    slot: int
    start: int
    stop: int
    rank: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows `[start, stop)` of at least two slots, multiplied as one batch over the stack view `[low, high)`.

    Row `i` of the slot `low + n` takes place `n * depth + i` of the batch. Places without a row repeat another row.

    Attributes:
        depth: Places for each slot, the length of the longest group.
        rank: Largest true rank of the slots used.
        places: int64 `[stop - start]`, the place of each row.
    """

    low: int
    high: int
    start: int
    stop: int
    depth: int
    rank: int
    places: Tensor
    _rows: tuple[int, ...]
    _row_index: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, repeat: int) -> Tensor:
        """int64 `[(high - low) * repeat * depth]`: the row, from `start`, in each place, each slot's `repeat` times."""
        index = self._row_index.get(repeat)
        if index is None:
            index = (
                torch.tensor(self._rows).view(self.high - self.low, 1, self.depth).expand(-1, repeat, -1).reshape(-1)
            )
            self._row_index[repeat] = index
        return index


def cut(groups: Sequence[tuple[int, int, int]], slot_ranks: Sequence[int]) -> tuple[Segment | Batch, ...]:
    """Cut groups `(slot, start, stop)`, in row order, into pieces; groups of rank 0 add nothing and are left out."""
    return tuple(_piece(run, slot_ranks) for run in _runs([group for group in groups if slot_ranks[group[0]]]))


def _runs(groups: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Runs of neighbouring groups that are cheapest together."""
    run: list[tuple[int, int, int]] = []
    for group in groups:
        if run and not _joins(run, group):
            yield run
            run = []
        run.append(group)
    if run:
        yield run


def _joins(run: Sequence[tuple[int, int, int]], group: tuple[int, int, int]) -> bool:
    slot, start, stop = group
    last_slot, _, last_stop = run[-1]
    if slot >= last_slot or start != last_stop:
        return False
    slots, new_slots = run[0][0] - last_slot + 1, last_slot - slot
    old_depth = max(stop - start for _, start, stop in run)
    depth = max(old_depth, stop - start)
    padded = (slots + new_slots) * depth
    return (
        depth <= _MAX_BATCHED_GROUP
        and padded <= _MAX_BATCHED_ROWS
        and padded - slots * old_depth + _SLOT_COST * new_slots <= _ALONE_COST + stop - start
    )


def _piece(run: Sequence[tuple[int, int, int]], slot_ranks: Sequence[int]) -> Segment | Batch:
    (high, first, _), (low, _, last) = run[0], run[-1]
    if len(run) == 1:
        return Segment(high, first, last, slot_ranks[high])
    depth = max(stop - start for _, start, stop in run)
    rows = [0] * ((high - low + 1) * depth)
    places: list[int] = []
    for slot, start, stop in run:
        place = (slot - low) * depth
        places.extend(range(place, place + stop - start))
        rows[place : place + stop - start] = range(start - first, stop - first)
    return Batch(
        low=low,
        high=high + 1,
        start=first,
        stop=last,
        depth=depth,
        rank=max(slot_ranks[slot] for slot, _, _ in run),
        places=torch.tensor(places),
        _rows=tuple(rows),
    )
