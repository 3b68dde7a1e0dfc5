"""Where the tensors of each adapter are, and how far those on their way into a slot have come."""

from collections.abc import Collection, Container, Mapping
from typing import Generic, TypeVar

from lora_core.adapter_record import AdapterRecord
from lora_core.host_memory import HostMemory
from lora_core.slots import _LoRALRUCache
from lora_core.types import AdapterRef

M = TypeVar("M")

READ_AHEAD = 2
"""Adapters read for waiting requests, beyond one for each slot."""


class Tiers(Generic[M]):
    """Slots, host memory, and the adapters between folder, memory and slot.

    An adapter is *staged* while it is on its way into a slot for somebody who waits for it: it is read in its turn, its
    tensors in memory are claimed, and the slot it gets is held until it is unstaged.

    Not thread-safe: its owner serialises calls.

    Attributes:
        slots: What is, or is being written, in each slot.
        host: Tensors in host memory.
        version: Rises with every change of what is on its way into a slot.
        num_evictions: Adapters that lost their slot to another.
    """

    def __init__(self, num_slots: int, host_memory_bytes: int) -> None:
        self.slots: _LoRALRUCache[AdapterRef, AdapterRecord] = _LoRALRUCache(num_slots)
        self.host: HostMemory[AdapterRef, M] = HostMemory(host_memory_bytes)
        self.version = 0
        self.num_evictions = 0
        self._max_staged = num_slots + READ_AHEAD
        # In order of asking.
        self._staged: dict[AdapterRef, None] = {}
        # Whose files are being read, and whether room is reserved for them.
        self._reading: dict[AdapterRef, bool] = {}
        self._writing: set[AdapterRef] = set()
        # Pinned in their slots because they are staged or being written.
        self._held: set[AdapterRef] = set()

    # Slots

    def written_slot(self, ref: AdapterRef) -> int | None:
        """The adapter's slot; None while it has none that is written."""
        return None if ref in self._writing else self.slots.get_slot(ref)

    def is_writing(self, ref: AdapterRef) -> bool:
        """Whether the adapter's slot is still to be written."""
        return ref in self._writing

    def unwritten(self) -> set[AdapterRef]:
        """Adapters whose slots are still to be written."""
        return set(self._writing)

    def assign(self, ref: AdapterRef, record: AdapterRecord, sparing: Collection[AdapterRef] = ()) -> int:
        """Give an adapter without a slot one, to be written, and not that of one in `sparing`. Raises NoFreeSlot."""
        evicted, slot = self.slots.put(ref, record, sparing=sparing)
        self.num_evictions += evicted is not None
        self._writing.add(ref)
        self._held.add(ref)
        self.slots.pin(ref)
        if ref in self.host:
            self.host.claim(ref)
        return slot

    def finish_write(self, ref: AdapterRef) -> None:
        """Take note that a slot is written: its adapter needs no copy in memory any more."""
        self._writing.remove(ref)
        self.version += 1
        self.host.release(ref)
        if ref not in self._staged:
            self._unhold(ref)

    def leave_slot(self, ref: AdapterRef) -> None:
        """Free the slot of an adapter, if it has one, that has no pins but the one that staging or writing gave it."""
        if ref in self.slots:
            self._writing.discard(ref)
            self.host.release(ref)
            self.unstage(ref)
            self._unhold(ref)
            self.slots.remove(ref)

    # On the way

    def on_their_way(self) -> list[AdapterRef]:
        """Adapters that are read for whoever waits for them, wait for a slot, or whose slot is being written."""
        return [*(ref for ref in self._staged if ref not in self.slots), *self._writing]

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for an adapter that has no slot yet."""
        return any(ref not in self.slots for ref in self._staged)

    def is_staged(self, ref: AdapterRef) -> bool:
        """Whether the adapter is on its way, or in a slot that is held for it."""
        return ref in self._staged

    def stage(self, ref: AdapterRef) -> bool:
        """Put an adapter on its way, unless many are or it would keep one that is to be read out of memory.

        Returns:
            Whether it was not on its way, and is now.
        """
        # Asked for every adapter that waits, at every step; the staged ones in slots are among those held.
        num_without_slot = len(self._staged) - sum(map(self._staged.__contains__, self._held))
        if ref in self._staged or num_without_slot >= self._max_staged:
            return False
        # Claimed by one that came later, memory would never come free for the one whose turn it is to be read.
        if ref in self.host and ref not in self.slots and self.next_unread() is not None:
            return False
        self._staged[ref] = None
        self.version += 1
        self._claim_if_staged(ref)
        return True

    def unstage(self, ref: AdapterRef) -> None:
        """End what `stage` began, if it did; a write in progress goes on."""
        if ref in self._staged:
            del self._staged[ref]
            self.version += ref not in self.slots
            if ref not in self._writing:
                self.host.release(ref)
                self._unhold(ref)

    def hold(self, ref: AdapterRef) -> None:
        """Stage an adapter whose slot is being written, so that it keeps the slot after that."""
        self._staged[ref] = None

    # Tensors

    def keep(self, ref: AdapterRef, tensors: M, num_bytes: int, last: Container[AdapterRef]) -> None:
        """Put tensors into host memory, if there is room without those claimed; those in `last` make room last."""
        self.host.put(ref, tensors, num_bytes, last)
        self._claim_if_staged(ref)

    def is_nowhere(self, ref: AdapterRef) -> bool:
        """Whether the adapter is neither in a slot, nor in memory, nor being read."""
        return ref not in self.slots and ref not in self.host and ref not in self._reading

    def is_reading(self, ref: AdapterRef) -> bool:
        """Whether the adapter's files are being read."""
        return ref in self._reading

    def next_unread(self) -> AdapterRef | None:
        """The first staged adapter whose tensors are nowhere."""
        return next((ref for ref in self._staged if self.is_nowhere(ref)), None)

    def begin_read(self, ref: AdapterRef, *, is_reserved: bool) -> None:
        """Take note that an adapter is being read, into room in host memory that is reserved for it, or not."""
        self._reading[ref] = is_reserved

    def end_read(self, ref: AdapterRef, tensors: M, num_bytes: int, last: Container[AdapterRef]) -> None:
        """Keep what was read: surely where room is reserved, else if there is some."""
        if self._reading.pop(ref):
            self.host.fill(ref, tensors)
            self._claim_if_staged(ref)
        elif ref not in self.host:
            self.keep(ref, tensors, num_bytes, last)

    def free_reservation(self, ref: AdapterRef) -> None:
        """Give the room up that is reserved for a read in progress, whose outcome is kept only if there is some."""
        if self._reading[ref]:
            self.host.cancel(ref)
            self._reading[ref] = False

    def drop_read(self, ref: AdapterRef) -> None:
        """End a read with nothing to keep."""
        if self._reading.pop(ref):
            self.host.cancel(ref)

    def forget(self, ref: AdapterRef) -> None:
        """Free an adapter's slot and memory; a read in progress is ended by whoever reads."""
        self.unstage(ref)
        self.leave_slot(ref)
        self.host.remove(ref)

    def check(self, other_pins: Mapping[AdapterRef, int]) -> None:
        """Assert what must hold between any two calls.

        Args:
            other_pins: Of every adapter that may be here: the pins in its slot that are its owner's.
        """
        self.slots.check()
        self.host.check()
        in_slots, in_memory = set(self.slots.keys()), set(self.host.keys())
        known = other_pins.keys()
        reserved = {ref for ref, is_reserved in self._reading.items() if is_reserved}
        assert self.host.reserved() == reserved, f"room is reserved for {self.host.reserved()}, and {reserved} is read"
        assert in_slots <= known, "a slot holds an adapter that is gone"
        assert in_memory <= known, "host memory holds an adapter that is gone"
        assert self._staged.keys() <= known, "an adapter that is gone is staged"
        assert self._writing <= in_slots, "an adapter without a slot is being written"
        assert self._held == in_slots & (self._writing | self._staged.keys()), f"held: {self._held}"
        waiting = self._staged.keys() - in_slots
        assert len(waiting) <= self._max_staged, f"{len(waiting)} adapters are staged"
        for ref, count in other_pins.items():
            expected = count + (ref in self._held)
            assert self.slots.num_pins(ref) == expected, f"{ref} has {self.slots.num_pins(ref)} pins, not {expected}"
        for ref in in_memory:
            on_its_way = ref in self._writing or ref in waiting
            assert self.host.is_claimed(ref) == on_its_way, f"{ref}: its tensors are claimed, or not, by mistake"

    def _unhold(self, ref: AdapterRef) -> None:
        if ref in self._held:
            self._held.discard(ref)
            self.slots.unpin(ref)

    def _claim_if_staged(self, ref: AdapterRef) -> None:
        if ref in self._staged and ref in self.host and ref not in self.slots:
            self.host.claim(ref)
