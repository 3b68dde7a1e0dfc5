"""Which adapters are loaded, who uses them, where their tensors are, and which slot each one has."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from lora_core.adapter_record import AdapterRecord
from lora_core.errors import AdapterLost, AdapterNameTaken
from lora_core.generations import Generations
from lora_core.operator_pins import OperatorPins
from lora_core.readiness import Preparation, Readiness
from lora_core.tiers import Tiers
from lora_core.types import AdapterRef, AdapterStatus

M = TypeVar("M")


_STILL_READING: Preparation[Any] = Preparation(Readiness.READING)
"""Made once, as it is what hundreds of adapters are told at every step."""


class AdapterTable(Generic[M]):
    """The adapters of one engine, by generation.

    A name admits requests from `add` to `retire`. A retired generation stays until its last user has released it and
    its last pin has ended; then its slot is freed and its tensors are dropped.

    Tensors are in host memory, in a slot, in both, or only in the adapter's folder (`lora_core.tiers`). A generation is
    staged, and the slot it gets is held, until a request pins it or nobody wants it any more.

    Thread-safe: every method holds one lock, and none of them does more than look at dictionaries. Slots are assigned
    and written by one thread, the one that calls `prepare` and `assign`.
    """

    def __init__(self, num_slots: int, host_memory_bytes: int) -> None:
        self._lock = threading.Lock()
        self._tiers: Tiers[M] = Tiers(num_slots, host_memory_bytes)
        self._loaded = Generations()
        self._pinned = OperatorPins(num_slots)
        # What the next `prepare` is told.
        self._lost: dict[AdapterRef, AdapterLost] = {}
        # Reads that nobody waits for any more, and what those who ask are told until they end.
        self._overdue: dict[AdapterRef, str] = {}
        self._dropped: list[AdapterRef] = []
        self._changes = 0

    @property
    def version(self) -> int:
        """Rises with every change of what is loaded, what admits requests, or what is in which slot or in memory."""
        with self._lock:
            return self._changes + self._tiers.slots.version + self._tiers.host.version

    # Loaded adapters

    def add(
        self,
        name: str,
        record: AdapterRecord,
        tensors: M,
        generation: int | None = None,
        *,
        replace: bool = False,
    ) -> AdapterRef:
        """Admit requests for `name`, under the given generation or a fresh one.

        The tensors are kept in host memory if there is room; otherwise they are read when a request needs them. With
        `replace`, the generation that has the name retires in the same moment, and its operator's pin passes on.

        Raises:
            AdapterNameTaken: the name already admits requests, and `replace` is not set.
            GenerationTaken: the generation was given to an adapter before.
        """
        with self._lock:
            old = self._loaded.find(name)
            if old is not None and not replace:
                raise AdapterNameTaken(f"LoRA adapter {name!r} is already loaded; unload it first, or replace it")
            return self._supersede(old, self._loaded.identify(name, generation), record, tensors)

    def renumber(self, name: str, generation: int) -> AdapterRef:
        """Give the adapter that has `name` another generation: requests in progress finish under the old one.

        Raises:
            AdapterNotFound: the name admits no requests.
            GenerationTaken: the generation was given to an adapter before.
        """
        with self._lock:
            old = self._loaded.named(name)
            record, tensors = self._loaded[old].record, self._tiers.host.get(old)
            return self._supersede(old, self._loaded.identify(name, generation), record, tensors)

    def refresh(self, ref: AdapterRef, record: AdapterRecord, tensors: M | None) -> None:
        """Take note that an adapter's files, the same bytes as ever, are where `record` says; keep what was read.

        Nothing happens if it is gone.
        """
        with self._lock:
            if ref not in self._loaded:
                return
            self._loaded[ref].record = record
            self._pinned.try_again(ref)
            self._lost.pop(ref, None)
            if tensors is not None and (self._tiers.is_nowhere(ref) or self._is_overdue(ref)):
                self._tiers.keep(ref, tensors, record.num_bytes, self._kept())

    def retire(self, name: str) -> int:
        """Admit no more requests for `name`, end its operator's pin, and drop its adapter once nobody uses it.

        Returns:
            How many users still hold it.

        Raises:
            AdapterNotFound: the name admits no requests.
        """
        with self._lock:
            ref = self._loaded.named(name)
            num_users = self._loaded[ref].num_users
            self._retire(ref)
            return num_users

    def find(self, name: str) -> tuple[AdapterRef, AdapterRecord] | None:
        """The adapter that requests for `name` would get."""
        with self._lock:
            ref = self._loaded.find(name)
            return None if ref is None else (ref, self._loaded[ref].record)

    def in_memory(self, folder: Path, content_hash: str) -> tuple[AdapterRecord, M] | None:
        """An adapter of this content, loaded from this folder under any name, whose tensors are in host memory."""
        with self._lock:
            for ref, loaded in self._loaded.items():
                is_meant = loaded.record.path == folder and loaded.record.content_hash == content_hash
                if is_meant and (tensors := self._tiers.host.get(ref)) is not None:
                    return loaded.record, tensors
            return None

    def records(self) -> dict[str, AdapterRecord]:
        """The adapters that admit requests, by name."""
        with self._lock:
            return {name: self._loaded[ref].record for name, ref in self._loaded.admitting().items()}

    def resolve(self, name_or_ref: str | AdapterRef) -> AdapterRef:
        """The loaded generation that is meant; of a name the one that admits requests.

        Raises:
            KeyError: there is none.
        """
        with self._lock:
            ref = self._loaded.find(name_or_ref) if isinstance(name_or_ref, str) else name_or_ref
            if ref is None or ref not in self._loaded:
                raise KeyError(f"LoRA adapter {name_or_ref!r} is not loaded")
            return ref

    # Users

    def acquire(self, name: str) -> AdapterRef:
        """Count a user of `name`'s adapter, which stays loaded until the user calls `release`.

        Raises:
            AdapterNotFound: the name admits no requests.
        """
        with self._lock:
            ref = self._loaded.named(name)
            self._loaded[ref].num_users += 1
            return ref

    def release(self, ref: AdapterRef) -> None:
        """End one `acquire`.

        Raises:
            KeyError: there is no such user.
        """
        with self._lock:
            loaded = self._loaded[ref]
            if loaded.num_users == 0:
                raise KeyError(f"LoRA adapter {ref} has no user to release")
            loaded.num_users -= 1
            self._unstage_if_unwanted(ref)
            self._drop_if_unused(ref)

    def num_users(self, ref: AdapterRef) -> int:
        """Users of a generation; 0 if it is not loaded."""
        with self._lock:
            return self._loaded[ref].num_users if ref in self._loaded else 0

    def num_pins(self, ref: AdapterRef) -> int:
        """Calls of `pin` that `unpin` has not ended; 0 if the generation is not loaded."""
        with self._lock:
            return self._loaded[ref].num_pins if ref in self._loaded else 0

    def retired(self) -> list[AdapterRef]:
        """Generations that admit no requests and still have some."""
        with self._lock:
            return self._loaded.retired()

    def take_dropped(self) -> list[AdapterRef]:
        """Generations that were dropped since the last call; none of them comes back."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    # Slots

    def prepare(self, ref: AdapterRef, *, take_slot: bool = True) -> Preparation[M]:
        """Bring an adapter nearer to a slot for a request that waits for it, without waiting.

        It is staged, if not too many are, and gets a slot if its tensors are in memory, one can be had, and
        `take_slot` allows it.

        Raises:
            KeyError: the generation is not loaded.
            AdapterLost: its tensors were needed and could not be read; told once, then tried anew. Told for as long as
                a read that takes too long is in progress.
        """
        with self._lock:
            self._loaded.require(ref)
            if ref in self._tiers.slots:
                return Preparation(Readiness.WRITING if self._tiers.is_writing(ref) else Readiness.READY)
            if ref in self._lost:
                raise self._lost.pop(ref)
            tensors = self._tiers.host.get(ref)
            if self._is_overdue(ref):
                raise AdapterLost(self._overdue[ref])
            is_new = self._tiers.stage(ref)
            if tensors is None:
                return Preparation(Readiness.READING, is_new) if is_new else _STILL_READING
            if not self._tiers.slots.can_put(ref):
                return Preparation(Readiness.NO_SLOT)
            if not take_slot:
                return Preparation(Readiness.SLOT_AVAILABLE)
            slot = self._assign(ref)
            self._tiers.hold(ref)
            return Preparation(Readiness.WRITING, slot=slot, tensors=tensors)

    def assign(self, ref: AdapterRef) -> int:
        """Give an adapter without a slot one, to be written now.

        Raises:
            KeyError: the generation is not loaded.
            NoFreeSlot: none can be had.
        """
        with self._lock:
            self._loaded.require(ref)
            return self._assign(ref)

    def finish_write(self, ref: AdapterRef) -> None:
        """Take note that an adapter's slot is written; nothing happens if the adapter is gone."""
        with self._lock:
            if not self._tiers.is_writing(ref):
                return
            self._tiers.finish_write(ref)
            if self._loaded[ref].num_users == 0:
                self._tiers.unstage(ref)
            self._changes += 1

    def abandon_write(self, ref: AdapterRef) -> None:
        """Take a slot back that could not be written; nothing happens if the adapter is gone."""
        with self._lock:
            if not self._tiers.is_writing(ref):
                return
            if ref in self._pinned:
                self._tiers.slots.unpin(ref)
                self._pinned.give_up(ref)
            self._tiers.leave_slot(ref)

    def lose(self, ref: AdapterRef, error: AdapterLost) -> None:
        """Have the requests that wait for an adapter told, by `prepare`, that it cannot be had."""
        with self._lock:
            if ref in self._loaded and self._loaded[ref].num_users > 0:
                self._lost[ref] = error

    def unwritten(self) -> set[AdapterRef]:
        """Adapters whose slots are still to be written."""
        with self._lock:
            return self._tiers.unwritten()

    def is_writing(self, ref: AdapterRef) -> bool:
        """Whether the adapter's slot is still to be written."""
        with self._lock:
            return self._tiers.is_writing(ref)

    def can_activate(self, ref: AdapterRef) -> bool:
        """Whether the adapter has a slot, or one could be had now."""
        with self._lock:
            return self._tiers.slots.can_put(ref)

    def wants_slot(self, ref: AdapterRef) -> bool:
        """Whether a slot is all the adapter lacks: its tensors are in memory."""
        with self._lock:
            return ref in self._tiers.host and ref not in self._tiers.slots

    def pin(self, ref: AdapterRef) -> None:
        """Keep the adapter in its slot until `unpin`, and make it the most recently used one; pins are counted.

        Raises:
            KeyError: it is in no slot, or its slot is not written yet.
        """
        with self._lock:
            if self._tiers.written_slot(ref) is None:
                raise KeyError(f"LoRA adapter {ref} is in no slot that is written")
            self._tiers.slots.get(ref)
            self._tiers.slots.pin(ref)
            self._loaded[ref].num_pins += 1
            self._tiers.unstage(ref)

    def unpin(self, ref: AdapterRef) -> None:
        """End one `pin`. Raises KeyError if there is none."""
        with self._lock:
            if self._loaded[ref].num_pins == 0:
                raise KeyError(f"LoRA adapter {ref} has no pin to end")
            self._loaded[ref].num_pins -= 1
            self._tiers.slots.unpin(ref)
            self._drop_if_unused(ref)

    def slot_of(self, ref: AdapterRef) -> int | None:
        """The adapter's slot, or None while it has none that is written."""
        with self._lock:
            return self._tiers.written_slot(ref)

    def use_slot(self, ref: AdapterRef) -> int | None:
        """The adapter's slot, its recency refreshed; None while it has none that is written."""
        with self._lock:
            slot = self._tiers.written_slot(ref)
            if slot is not None:
                self._tiers.slots.get(ref)
            return slot

    def use_slots(self, refs: Iterable[AdapterRef | None]) -> list[int | None]:
        """Slot of each adapter (None for each None), refreshing their recency.

        Raises:
            KeyError: an adapter has no slot that is written; it is named.
        """
        with self._lock:
            slots: list[int | None] = []
            for ref in refs:
                slot = None if ref is None else self._tiers.written_slot(ref)
                if ref is not None:
                    if slot is None:
                        raise KeyError(f"LoRA adapter {ref} has no slot; activate it before its requests are routed")
                    self._tiers.slots.get(ref)
                slots.append(slot)
            return slots

    def residents(self) -> dict[int, tuple[AdapterRef, AdapterRecord]]:
        """What is, or is being written, in each taken slot, adapters that no longer admit requests included."""
        with self._lock:
            return {slot: (ref, record) for ref, (record, slot) in self._tiers.slots.items()}

    def residency(self) -> tuple[list[AdapterRef], list[AdapterRef]]:
        """Adapters that admit requests: those in written slots (by slot), and all of them (in load order)."""
        with self._lock:
            by_slot = sorted(
                (slot, ref) for ref, (_, slot) in self._tiers.slots.items() if not self._tiers.is_writing(ref)
            )
            # In load order.
            admitting = dict.fromkeys(self._loaded.admitting().values())
            return [ref for _, ref in by_slot if ref in admitting], list(admitting)

    def in_host_memory(self) -> list[AdapterRef]:
        """Adapters that admit requests and whose tensors are in host memory, in load order."""
        with self._lock:
            return [ref for ref in self._loaded.admitting().values() if ref in self._tiers.host]

    # The operator's pins

    def pin_name(self, name: str) -> bool:
        """Let the adapter of `name` have the next slot and keep it; False if it was pinned already.

        Raises:
            AdapterNotFound: the name admits no requests.
            PinRefused: no slot would be left for the adapters that are not pinned.
        """
        with self._lock:
            ref = self._loaded.named(name)
            self._pinned.try_again(ref)
            if ref in self._pinned:
                return False
            self._pinned.add(ref)
            if ref in self._tiers.slots:
                self._tiers.slots.pin(ref)
            return True

    def unpin_name(self, name: str) -> bool:
        """End the pin of `name`'s adapter; False if there was none. Raises AdapterNotFound as `pin_name` does."""
        with self._lock:
            ref = self._loaded.named(name)
            was_pinned = ref in self._pinned
            self._end_operator_pin(ref)
            return was_pinned

    def is_pinned(self, ref: AdapterRef) -> bool:
        """Whether the operator has pinned it."""
        with self._lock:
            return ref in self._pinned

    def pinned_without_slot(self) -> list[AdapterRef]:
        """Pinned adapters on their way to a slot; not those whose files are lost."""
        with self._lock:
            return [
                ref
                for ref in self._pinned.wanted()
                if self._tiers.written_slot(ref) is None and not self._is_overdue(ref)
            ]

    # Tensors

    def tensors_of(self, ref: AdapterRef) -> M | None:
        """The adapter's tensors, if they are in host memory."""
        with self._lock:
            return self._tiers.host.get(ref)

    def next_read(self) -> tuple[AdapterRef, AdapterRecord] | None:
        """Begin to read the staged adapter whose turn it is, with room for it set aside.

        None if nothing is to be read, or there is no room for the first one: a smaller one does not overtake it.
        """
        with self._lock:
            ref = self._tiers.next_unread()
            if ref is None:
                return None
            record = self._loaded[ref].record
            if not self._tiers.host.reserve(ref, record.num_bytes, self._kept()):
                return None
            self._tiers.begin_read(ref, is_reserved=True)
            return ref, record

    def begin_read(self, ref: AdapterRef) -> AdapterRecord | None:
        """Begin to read an adapter at once, with no room set aside; None if it is being read or in memory.

        Raises:
            KeyError: the generation is not loaded.
        """
        with self._lock:
            record = self._loaded[ref].record
            if self._tiers.is_reading(ref) or ref in self._tiers.host:
                return None
            self._tiers.begin_read(ref, is_reserved=False)
            return record

    def end_read(self, ref: AdapterRef, tensors: M) -> None:
        """Keep what was read, if the adapter is still loaded and there is room."""
        with self._lock:
            self._overdue.pop(ref, None)
            if ref not in self._loaded:
                self._tiers.drop_read(ref)
                return
            self._tiers.end_read(ref, tensors, self._loaded[ref].record.num_bytes, self._kept())
            self._pinned.try_again(ref)
            self._unstage_if_unwanted(ref)

    def fail_read(self, ref: AdapterRef, error: AdapterLost) -> None:
        """Take note that an adapter could not be read: those who wait for it are told, later ones try again."""
        with self._lock:
            self._overdue.pop(ref, None)
            self._tiers.drop_read(ref)
            if ref not in self._loaded:
                return
            if self._tiers.is_staged(ref) and self._loaded[ref].num_users > 0:
                self._lost[ref] = error
            self._tiers.unstage(ref)
            self._pinned.give_up(ref)

    def give_up_read(self, ref: AdapterRef, reason: str) -> None:
        """Let nobody wait for a read that may never end, nor memory for its outcome; nothing happens if it has ended.

        Whoever asks for the adapter before it ends is told the reason, by AdapterLost.
        """
        with self._lock:
            if ref in self._overdue or not self._tiers.is_reading(ref):
                return
            self._overdue[ref] = reason
            self._tiers.free_reservation(ref)
            if ref in self._loaded:
                self._tiers.unstage(ref)

    def is_reading(self, ref: AdapterRef) -> bool:
        """Whether the adapter's files are being read."""
        with self._lock:
            return self._tiers.is_reading(ref)

    # What is there

    def status(self, name: str) -> AdapterStatus:
        """How the adapter of `name` is held. Raises AdapterNotFound."""
        with self._lock:
            return self._status(self._loaded.named(name))

    def statuses(self) -> list[AdapterStatus]:
        """How every adapter that admits requests is held, in load order."""
        with self._lock:
            return [self._status(ref) for ref in self._loaded.admitting().values()]

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        with self._lock:
            self._loaded.check()
            loaded = dict(self._loaded.items())
            self._pinned.check(self._loaded.admitting().values())
            in_slots = self._tiers.slots
            self._tiers.check(
                {ref: held.num_pins + (ref in self._pinned and ref in in_slots) for ref, held in loaded.items()}
            )
            assert self._lost.keys() <= loaded.keys()
            assert not any(map(self._tiers.is_staged, self._lost)), "a lost adapter is staged"
            assert all(map(self._tiers.is_reading, self._overdue)), "a read that has ended is overdue"

    def _status(self, ref: AdapterRef) -> AdapterStatus:
        in_slot = self._tiers.written_slot(ref) is not None
        return AdapterStatus(
            name=ref.name,
            generation=ref.generation,
            tier="slot" if in_slot else "host" if ref in self._tiers.host else "disk",
            pinned=ref in self._pinned,
            num_users=self._loaded[ref].num_users,
            draining=[old.generation for old in self._loaded.retired() if old.name == ref.name],
            report=self._loaded[ref].record.report(ref.generation),
        )

    # Below, the lock is held.

    def _kept(self) -> set[AdapterRef]:
        """Whose tensors are evicted last: files of a retired generation may be gone, pinned ones are to be there."""
        return {*self._loaded.retired(), *self._pinned}

    def _supersede(
        self, old: AdapterRef | None, ref: AdapterRef, record: AdapterRecord, tensors: M | None
    ) -> AdapterRef:
        """Let a generation admit requests in the place of `old`, whose pin passes on, and keep its tensors if any."""
        is_pinned = old in self._pinned
        if old is not None:
            self._retire(old)
        self._loaded.add(ref, record)
        if is_pinned:
            self._pinned.add(ref)
        if tensors is not None:
            self._tiers.keep(ref, tensors, record.num_bytes, self._kept())
        self._changes += 1
        return ref

    def _retire(self, ref: AdapterRef) -> None:
        self._loaded.retire(ref)
        self._end_operator_pin(ref)
        self._changes += 1
        self._drop_if_unused(ref)

    def _drop_if_unused(self, ref: AdapterRef) -> None:
        if not self._loaded.is_done(ref):
            return
        self._tiers.forget(ref)
        self._lost.pop(ref, None)
        self._loaded.remove(ref)
        self._dropped.append(ref)
        self._changes += 1

    def _end_operator_pin(self, ref: AdapterRef) -> None:
        if ref not in self._pinned:
            return
        self._pinned.end(ref)
        if ref in self._tiers.slots:
            self._tiers.slots.unpin(ref)
        self._unstage_if_unwanted(ref)

    def _assign(self, ref: AdapterRef) -> int:
        slot = self._tiers.assign(ref, self._loaded[ref].record)
        if ref in self._pinned:
            self._tiers.slots.pin(ref)
        return slot

    def _is_overdue(self, ref: AdapterRef) -> bool:
        """Whether nothing is to be had of an adapter until its read ends."""
        return ref in self._overdue and ref not in self._tiers.host and ref not in self._tiers.slots

    def _unstage_if_unwanted(self, ref: AdapterRef) -> None:
        if self._loaded[ref].num_users > 0:
            return
        self._lost.pop(ref, None)
        if ref not in self._pinned or self._tiers.written_slot(ref) is not None:
            self._tiers.unstage(ref)
