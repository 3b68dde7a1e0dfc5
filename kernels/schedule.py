"""The routing of one step: which rows of the batch use which adapter slot, on the host and on the device."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.loops import Cut, Loop, loops
from kernels.step_buffer import upload
from kernels.support import triton_fault, warn_of_fallback
from kernels.tuning import device_name, num_tiles, row_tile

MAX_RANK = 2**15
"""Largest rank a routing takes, far more than any stack has: what is more is a fault of the caller's."""

MAX_ONE_LAUNCH_TILE = 32
"""Rows of a tile up to which a step that asks for one launch gets it."""


def cpu_stack_dtype(activations: torch.dtype) -> torch.dtype:
    """Data type of the slot tensors on the CPU: that of the activations, but fp32 for fp16, which nothing there
    multiplies fast."""
    return torch.float32 if activations == torch.float16 else activations


class Group(NamedTuple):
    """Consecutive rows of the batch that use one adapter slot."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Routing:
    """The routing triple of one step, on host and device.

    The device tensors are views of `buffer`, which `build_routing` fills with one copy. Their lengths follow from
    shapes alone (`num_rows`, `max_groups`, the number of slots), never from which adapters are present.

    Attributes:
        num_rows: Rows of the step, base rows included.
        groups: The non-empty groups in row order, for code that loops on the host.
        end: Rows `[0, end)` carry LoRA. Rows at or after `end` are base rows: no kernel reads or writes them.
        lora_ids: int32 `[max_groups]`, slot of each group; -1 past the last group.
        grouped_offsets: int32 `[max_groups + 1]`, first row of each group; `end` past the last group.
        ranks: int32 `[num_slots]`, true rank of each slot's adapter (the largest over its modules); 0 if empty.
        slot_ranks: The same on the host.
        tiles: int32 `[num_tiles, 4]` rows of `(slot, row0, row_end, rank)`: at most `block_m` rows of one group
            each; then the base rows, with slot -1; then unused ones, with slot -1 and no rows. A tile without an
            adapter has rank 0. None where the step runs without a tile table.
        counters: int32 `[num_tiles + 1]` of zeros, with which each operation is one launch instead of two; or None.
        block_m: Rows a tile covers; 0 without tiles.
        path: How operations run: "triton" with tiles; "cpu" on the CPU; "torch" on devices without Triton kernels.
        buffer: int32, the memory the device tensors above are views of.
    """

    num_rows: int
    groups: tuple[Group, ...]
    end: int
    lora_ids: Tensor
    grouped_offsets: Tensor
    ranks: Tensor
    slot_ranks: tuple[int, ...]
    tiles: Tensor | None
    counters: Tensor | None
    block_m: int
    path: Literal["cpu", "torch", "triton"]
    buffer: Tensor
    _parts: "dict[frozenset[int], Routing | None]" = field(default_factory=dict, init=False, repr=False)
    _loops: dict[Cut, tuple[Loop, ...]] = field(default_factory=dict, init=False, repr=False)

    def loops(self, cut: Cut) -> tuple[Loop, ...]:
        """The groups as the CPU path multiplies them, cut once a step and shared by all its layers of one kind."""
        found = self._loops.get(cut)
        if found is None:
            found = self._loops[cut] = loops(self.groups, self.slot_ranks, cut)
        return found

    @cached_property
    def slots(self) -> frozenset[int]:
        """Slots that rows use, as far as they hold an adapter."""
        return frozenset(group.slot for group in self.groups if self.slot_ranks[group.slot])

    @cached_property
    def row_slots(self) -> tuple[Tensor, Tensor]:
        """int64 on the CPU: the rows that use a slot that holds an adapter, and the slot of each."""
        used = [group for group in self.groups if self.slot_ranks[group.slot]]
        rows = [row for group in used for row in range(group.start, group.stop)]
        slots = [group.slot for group in used for _ in range(group.start, group.stop)]
        return torch.tensor(rows, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)

    def stack_dtype(self, activations: torch.dtype) -> torch.dtype:
        """Data type of the slot tensors for activations of a data type."""
        return cpu_stack_dtype(activations) if self.path == "cpu" else activations

    def among(self, slots: frozenset[int]) -> "Routing | None":
        """The part of the step that uses some of these slots, or None where no row does.

        Its groups are those of these slots. With a tile table it is the whole routing, because the table is the
        step's: what is in other slots must then add nothing.
        """
        if self.slots <= slots:
            return self if self.slots else None
        if slots not in self._parts:
            self._parts[slots] = self._part(self.slots & slots)
        return self._parts[slots]

    def select(self, rows: Sequence[int]) -> "Routing":
        """The routing of the batch that some rows of this one make: these, ascending.

        It is on the same device and has as many slots and groups at most.

        Raises:
            ValueError: this is a part of a step, which `among` gave: the rows between its groups are not in it.
        """
        stops = [0, *(group.stop for group in self.groups)]
        if any(group.start != stop for group, stop in zip(self.groups, stops, strict=False)):
            raise ValueError(f"groups {[tuple(g) for g in self.groups]} leave rows out, expected those of a whole step")
        return build_routing(
            [group.slot for group in self.groups],
            [0, *(bisect_left(rows, group.stop) for group in self.groups)],
            self.slot_ranks,
            num_rows=len(rows),
            max_groups=self.max_groups,
            device=self.buffer.device,
            block_m=row_tile(len(rows), self.max_groups, device_name(self.buffer.device)) if self.block_m else 0,
            one_launch=self.counters is not None,
        )

    def _part(self, slots: frozenset[int]) -> "Routing | None":
        if not slots or self.tiles is not None:
            return self if slots else None
        # Layers whose live slots differ may share the part that matters to this step.
        if slots not in self._parts:
            self._parts[slots] = replace(self, groups=tuple(g for g in self.groups if g.slot in slots))
        return self._parts[slots]

    @property
    def max_groups(self) -> int:
        """Most groups any step can have."""
        return self.lora_ids.shape[0]

    @cached_property
    def max_rank(self) -> int:
        """Largest true rank of any slot; 0 without slots."""
        return max(self.slot_ranks, default=0)


def build_routing(
    lora_ids: Sequence[int],
    grouped_offsets: Sequence[int],
    slot_ranks: Sequence[int],
    *,
    num_rows: int,
    max_groups: int,
    device: torch.device,
    block_m: int | None = None,
    one_launch: bool = False,
    into: Tensor | None = None,
) -> Routing:
    """Check a step's routing triple and put it on the device with one copy.

    Args:
        lora_ids: Slot of each group, `G` of them. Empty groups are allowed.
        grouped_offsets: First row of each group and, last, the end of the last one: `G + 1` ascending rows from 0.
        slot_ranks: True rank of each slot's adapter; 0 for an empty slot.
        num_rows: Rows of the step, base rows included.
        max_groups: Most groups any step can have: the capacity of the device tensors.
        device: Where the device tensors live.
        block_m: Rows of a tile, a power of two; 0: no tile table. Unset: none on the CPU and on devices that Triton's
            kernels do not support, of which the log says why once, else chosen from `num_rows` and `max_groups`.
        one_launch: Where there is a tile table, let `sgmv` and `sgmv_swiglu` be one launch each, whose programs wait
            for each other. Steps with such a routing may not run at the same time. With `block_m` unset it does not
            hold for prompts, whose tiles are large: their time is not that of launches.
        into: A `buffer` of an earlier routing of the same shapes, overwritten instead of allocating (so that a
            captured graph finds the new routing at the old addresses).

    Raises:
        ValueError: the arguments disagree with each other (both are named).
    """
    groups = _checked_groups(lora_ids, grouped_offsets, len(slot_ranks), num_rows, max_groups)
    end = grouped_offsets[-1]
    for rank in (min(slot_ranks, default=0), max(slot_ranks, default=0)):
        if not 0 <= rank <= MAX_RANK:
            raise ValueError(f"slot_ranks has a rank of {rank}, expected 0 for an empty slot and else 1 to {MAX_RANK}")
    if block_m is None:
        block_m = _row_tile(num_rows, max_groups, device)
        one_launch = one_launch and block_m <= MAX_ONE_LAUNCH_TILE
    if block_m & (block_m - 1) if block_m > 0 else block_m:
        raise ValueError(f"block_m is {block_m} rows of a tile, expected a power of two, or 0 for no tile table")
    tile_rows, num_counters = [], 0
    if block_m:
        length = num_tiles(num_rows, max_groups, block_m)
        tile_rows = tile_table([*groups, Group(-1, end, num_rows)], [*slot_ranks, 0], block_m, length)
        num_counters = length + 1 if one_launch else 0

    buffer, (tiles, ids, offsets, ranks, counters) = upload(
        [
            tile_rows,
            [*lora_ids, *[-1] * (max_groups - len(lora_ids))],
            [*grouped_offsets, *[end] * (max_groups - len(lora_ids))],
            slot_ranks,
            [0] * num_counters,
        ],
        device,
        into,
        "num_rows, max_groups, block_m, one_launch and number of slots",
    )
    return Routing(
        num_rows=num_rows,
        groups=groups,
        end=end,
        lora_ids=ids,
        grouped_offsets=offsets,
        ranks=ranks,
        slot_ranks=tuple(slot_ranks),
        tiles=tiles.view(len(tile_rows) // 4, 4) if block_m else None,
        counters=counters if num_counters else None,
        block_m=block_m,
        path="triton" if block_m else "cpu" if device.type == "cpu" else "torch",
        buffer=buffer,
    )


def tile_table(groups: Sequence[Group], slot_ranks: Sequence[int], block_m: int, length: int) -> list[int]:
    """Cut groups into tiles `(slot, row0, row_end, rank)`, flattened and filled up to `length` with empty ones.

    Base rows may be a last group of slot -1, where `slot_ranks` has a 0 for them at its end.
    """
    table = [
        field
        for slot, start, stop in groups
        for row0 in range(start, stop, block_m)
        for field in (slot, row0, min(row0 + block_m, stop), slot_ranks[slot])
    ]
    table.extend([-1, 0, 0, 0] * (length - len(table) // 4))
    return table


def _row_tile(num_rows: int, max_groups: int, device: torch.device) -> int:
    """Rows of a tile on a device; 0 where there is no tile table."""
    if device.type == "cpu":
        return 0
    if fault := triton_fault(device):
        warn_of_fallback(device, fault)
        return 0
    return row_tile(num_rows, max_groups, device_name(device))


def _checked_groups(
    lora_ids: Sequence[int], grouped_offsets: Sequence[int], num_slots: int, num_rows: int, max_groups: int
) -> tuple[Group, ...]:
    if len(grouped_offsets) != len(lora_ids) + 1:
        raise ValueError(
            f"grouped_offsets has {len(grouped_offsets)} entries for {len(lora_ids)} lora_ids; "
            f"{len(lora_ids) + 1} are expected, one start per group and the end of the last"
        )
    if len(lora_ids) > max_groups:
        raise ValueError(f"lora_ids has {len(lora_ids)} groups, more than max_groups={max_groups}")
    if grouped_offsets[0] != 0:
        raise ValueError(f"grouped_offsets starts at row {grouped_offsets[0]}, expected row 0")
    if grouped_offsets[-1] > num_rows:
        raise ValueError(f"grouped_offsets ends at row {grouped_offsets[-1]}, past num_rows={num_rows}")
    groups = []
    for slot, start, stop in zip(lora_ids, grouped_offsets, grouped_offsets[1:], strict=False):
        if not 0 <= slot < num_slots:
            raise ValueError(f"lora_ids names slot {slot}, outside the {num_slots} slots of slot_ranks")
        if stop < start:
            raise ValueError(f"grouped_offsets falls from row {start} to row {stop}, expected ascending rows")
        if stop > start:
            groups.append(Group(slot, start, stop))
    return tuple(groups)
