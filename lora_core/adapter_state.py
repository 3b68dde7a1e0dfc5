"""What is known of an engine's adapters, behind one lock."""

import threading
from collections.abc import Collection
from typing import Generic, TypeVar

from lora_core.adapter_record import AdapterRecord
from lora_core.errors import AdapterLost
from lora_core.generations import Generations
from lora_core.operator_pins import OperatorPins
from lora_core.tiers import Tiers
from lora_core.types import AdapterRef
from lora_core.warm_ups import WarmUps

M = TypeVar("M")


class AdapterState(Generic[M]):
    """What those who change, read and describe the adapters share.

    Not thread-safe: whoever calls a method, or touches what an attribute holds, has `lock`.

    Attributes:
        lock: Of all the rest.
        tiers: Where tensors are.
        loaded: Generations, their names and users.
        pinned: The operator's pins.
        warming: Warm-ups that have not ended.
        protected: Adapters whose slots are taken last: those of `protected_names`, as far as they are loaded.
        protected_names: Their names.
        lost: What the next `prepare` of each is told.
        slow: Adapters whose read in progress keeps no place on the way and no memory from others.
        overdue: Of these, those that nobody waits for any more, and what those who ask are told until the read ends.
        dropped: Generations that are gone for good, and of which nobody has been told.
        num_hits: Users that came when their adapter was in a slot.
        num_misses: Users that came when it was not.
        loaded_version: Rises with every change of what is loaded or admits requests.
    """

    def __init__(self, num_slots: int, host_memory_bytes: int) -> None:
        self.lock = threading.Lock()
        self.tiers: Tiers[M] = Tiers(num_slots, host_memory_bytes)
        self.loaded = Generations()
        self.pinned = OperatorPins(num_slots)
        self.warming = WarmUps()
        self.protected: frozenset[AdapterRef] = frozenset()
        self.protected_names: frozenset[str] = frozenset()
        self.lost: dict[AdapterRef, AdapterLost] = {}
        self.slow: set[AdapterRef] = set()
        self.overdue: dict[AdapterRef, str] = {}
        self.dropped: list[AdapterRef] = []
        self.num_hits = 0
        self.num_misses = 0
        self.loaded_version = 0

    @property
    def version(self) -> int:
        """Rises with every change of what is loaded or admits requests, in a slot or on its way there, or in memory."""
        tiers = self.tiers
        return self.loaded_version + self.warming.version + tiers.version + tiers.slots.version + tiers.host.version

    def kept(self) -> set[AdapterRef]:
        """Whose tensors are evicted last: files of a retired generation may be gone, pinned ones are to be there."""
        return {*self.loaded.retired(), *self.pinned}

    def supersede(
        self, old: AdapterRef | None, ref: AdapterRef, record: AdapterRecord, tensors: M | None
    ) -> AdapterRef:
        """Let a generation admit requests in the place of `old`, whose pin passes on, and keep its tensors if any."""
        is_pinned = old in self.pinned
        if old is not None:
            self.retire(old)
        self.loaded.add(ref, record)
        if is_pinned:
            self.pinned.add(ref)
        if tensors is not None:
            self.tiers.keep(ref, tensors, record.num_bytes, self.kept())
        if ref.name in self.protected_names:
            self.protect(self.protected_names)
        self.loaded_version += 1
        return ref

    def retire(self, ref: AdapterRef) -> None:
        """Let a generation admit no more requests."""
        self.loaded.retire(ref)
        self.end_operator_pin(ref)
        self.warming.end(ref)
        self.loaded_version += 1
        self.drop_if_unused(ref)

    def drop_if_unused(self, ref: AdapterRef) -> None:
        """Forget a retired generation that has no users and no pins."""
        if not self.loaded.is_done(ref):
            return
        self.tiers.forget(ref)
        self.lost.pop(ref, None)
        self.loaded.remove(ref)
        self.dropped.append(ref)
        self.loaded_version += 1

    def end_operator_pin(self, ref: AdapterRef) -> None:
        """End the operator's pin of an adapter, if there is one."""
        if ref not in self.pinned:
            return
        self.pinned.end(ref)
        if ref in self.tiers.slots:
            self.tiers.slots.unpin(ref)
        self.unstage_if_unwanted(ref)

    def assign(self, ref: AdapterRef) -> int:
        """Give an adapter a slot, to be written. Raises NoFreeSlot."""
        return self._pinned_there(ref, self.tiers.assign(ref, self.loaded[ref].record))

    def protect(self, names: Collection[str]) -> None:
        """Have the adapters of these names lose their slots last, and no others."""
        self.protected_names = frozenset(names)
        found = map(self.loaded.find, self.protected_names)
        self.protected = frozenset(ref for ref in found if ref is not None)
        self.tiers.slots.protect(self.protected)

    def can_spare(self, ref: AdapterRef) -> bool:
        """Whether there is a slot for it that is free, or whose adapter nobody uses or wants kept."""
        return self.tiers.slots.can_put(ref, sparing=self._spared())

    def assign_spare(self, ref: AdapterRef) -> int | None:
        """Give an adapter such a slot, to be written; None if there is none."""
        if not self.can_spare(ref):
            return None
        return self._pinned_there(ref, self.tiers.assign(ref, self.loaded[ref].record, self._spared()))

    def is_slow(self, ref: AdapterRef) -> bool:
        """Whether nothing is to be had of an adapter until a read ends that others do not wait for."""
        return ref in self.slow and ref not in self.tiers.host and ref not in self.tiers.slots

    def is_overdue(self, ref: AdapterRef) -> bool:
        """Whether it is slow, and nobody waits for it any more."""
        return ref in self.overdue and self.is_slow(ref)

    def unstage_if_unwanted(self, ref: AdapterRef) -> None:
        """Let an adapter that nobody waits for go no further towards a slot."""
        if self.loaded[ref].num_users > 0:
            return
        self.lost.pop(ref, None)
        if ref not in self.pinned or self.tiers.written_slot(ref) is not None:
            self.tiers.unstage(ref)

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        self.loaded.check()
        loaded = dict(self.loaded.items())
        admitting = self.loaded.admitting().values()
        self.pinned.check(admitting)
        in_slots = self.tiers.slots
        self.tiers.check(
            {ref: held.num_pins + (ref in self.pinned and ref in in_slots) for ref, held in loaded.items()}
        )
        assert self.lost.keys() <= loaded.keys()
        assert not any(map(self.tiers.is_staged, self.lost)), "a lost adapter is staged"
        assert all(map(self.tiers.is_reading, self.slow)), "a read that has ended is slow"
        assert self.overdue.keys() <= self.slow, "a read is overdue that others wait for"
        assert not any(self.is_slow(ref) and self.tiers.is_staged(ref) for ref in self.slow), "a slow one is staged"
        assert set(self.warming) <= set(admitting), "an adapter that admits no requests is warmed up"

    def _spared(self) -> set[AdapterRef]:
        in_use = (ref for ref, _ in self.tiers.slots.items() if self.loaded[ref].num_users)
        return {*self.protected, *in_use}

    def _pinned_there(self, ref: AdapterRef, slot: int) -> int:
        if ref in self.pinned:
            self.tiers.slots.pin(ref)
        return slot
