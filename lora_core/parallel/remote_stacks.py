"""Slot tensors of another rank, written from the first."""

import math
from bisect import bisect_right
from collections.abc import Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from lora_core.parallel.rank_messages import MarkLive, RankMessage, TensorMove, WriteSlot
from lora_core.slot_write import Move
from lora_core.stacks import SlotStacks, TensorSpec
from lora_core.targets import LoRASite

ALIGN_BYTES = 8
"""Each tensor's bytes begin at a multiple of this behind their message."""


class OtherRank(Protocol):
    """Who is told what to write."""

    def tell(self, message: RankMessage, payload: Any = b"") -> None:
        """Send a message with bytes behind it."""
        ...


class RemoteStacks(SlotStacks):
    """The slot tensors of another rank: what is written to these is written there.

    These have shapes alone, and no memory.
    """

    def __init__(
        self,
        sites: Sequence[LoRASite],
        num_slots: int,
        rank: int,
        dtype: torch.dtype,
        other: OtherRank,
    ) -> None:
        """Write to nothing but zeros.

        Args:
            sites: The other rank's.
            num_slots: Slots.
            rank: Largest rank of an adapter.
            dtype: Of A and B.
            other: The other rank.
        """
        super().__init__(sites, num_slots, rank, dtype, mover=self._send)
        self._other = other
        self._starts, tensors = _without_memory(self.specs)
        self.bind(tensors, are_zero=True)

    def mark(self, slot: int, sites: Set[int], gain_sites: Set[int]) -> None:
        """Say at which sites the slot's adapter is, and where it has gains, here and there."""
        super().mark(slot, sites, gain_sites)
        self._other.tell(MarkLive(slot, sorted(sites), sorted(gain_sites)))

    def _send(self, moves: Sequence[Move]) -> None:
        described: list[TensorMove] = []
        parts: list[memoryview | bytes] = []
        for destination, source in moves:
            tensor, offset = self._place(destination)
            dtype = None if source is None else str(source.dtype).removeprefix("torch.")
            described.append(TensorMove(tensor, offset, tuple(destination.shape), tuple(destination.stride()), dtype))
            if source is not None:
                content = source.contiguous().view(-1).view(torch.uint8).numpy().data
                parts += [content, bytes(-len(content) % ALIGN_BYTES)]
        self._other.tell(WriteSlot(described), b"".join(parts))

    def _place(self, view: Tensor) -> tuple[int, int]:
        """Which tensor a view is part of, and its first element there."""
        start = view.storage_offset() * view.itemsize
        tensor = bisect_right(self._starts, start) - 1
        return tensor, (start - self._starts[tensor]) // view.itemsize


def make_remote_moves(moves: Sequence[TensorMove], payload: bytearray, tensors: Sequence[Tensor]) -> None:
    """Make the moves that another rank has sent: to its slot tensors, as they are bound."""
    start = 0
    for move in moves:
        destination = tensors[move.tensor].as_strided(move.shape, move.stride, move.offset)
        if move.dtype is None:
            destination.zero_()
            continue
        dtype: torch.dtype = getattr(torch, move.dtype)
        count = math.prod(move.shape)
        source = torch.frombuffer(payload, dtype=dtype, count=count, offset=start).view(move.shape)
        destination.copy_(source)
        num_bytes = count * dtype.itemsize
        start += num_bytes + -num_bytes % ALIGN_BYTES


def _without_memory(specs: Sequence[TensorSpec]) -> tuple[list[int], list[Tensor]]:
    """Tensors of these shapes, side by side in one that has no memory, and the byte where each begins."""
    starts, num_bytes = [], 0
    for spec in specs:
        starts.append(num_bytes)
        size = math.prod(spec.shape) * spec.dtype.itemsize
        num_bytes += size + -size % ALIGN_BYTES
    whole = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    tensors = [
        whole[start : start + math.prod(spec.shape) * spec.dtype.itemsize].view(spec.dtype).view(spec.shape)
        for start, spec in zip(starts, specs, strict=True)
    ]
    return starts, tensors
