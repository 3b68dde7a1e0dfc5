"""Which adapters are loaded, who uses them, and which slot each one has."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from lora_core.adapter_reads import AdapterReads
from lora_core.adapter_record import AdapterRecord
from lora_core.adapter_state import AdapterState
from lora_core.errors import AdapterLost, AdapterNameTaken
from lora_core.readiness import Preparation, Readiness
from lora_core.types import AdapterRef
from lora_core.wanted_slots import WantedSlots
from lora_core.whereabouts import Whereabouts

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
    and written by one thread, the one that calls `prepare`, `assign` and
    `wanted.assign_warm_up`.

    Attributes:
        reads: Reads of adapters' files.
        wanted: Slots that are wanted whether or not requests use them.
        whereabouts: What is where.
    """

    def __init__(self, num_slots: int, host_memory_bytes: int) -> None:
        self._state: AdapterState[M] = AdapterState(num_slots, host_memory_bytes)
        self.reads = AdapterReads(self._state)
        self.wanted = WantedSlots(self._state)
        self.whereabouts = Whereabouts(self._state)

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
        state = self._state
        with state.lock:
            old = state.loaded.find(name)
            if old is not None and not replace:
                raise AdapterNameTaken(f"LoRA adapter {name!r} is already loaded; unload it first, or replace it")
            return state.supersede(old, state.loaded.identify(name, generation), record, tensors)

    def renumber(self, name: str, generation: int) -> AdapterRef:
        """Give the adapter that has `name` another generation: requests in progress finish under the old one.

        Raises:
            AdapterNotFound: the name admits no requests.
            GenerationTaken: the generation was given to an adapter before.
        """
        state = self._state
        with state.lock:
            old = state.loaded.named(name)
            record, tensors = state.loaded[old].record, state.tiers.host.get(old)
            return state.supersede(old, state.loaded.identify(name, generation), record, tensors)

    def refresh(self, ref: AdapterRef, record: AdapterRecord, tensors: M | None) -> None:
        """Take note that an adapter's files, the same bytes as ever, are where `record` says; keep what was read.

        Nothing happens if it is gone.
        """
        state = self._state
        with state.lock:
            if ref not in state.loaded:
                return
            state.loaded[ref].record = record
            state.pinned.try_again(ref)
            state.lost.pop(ref, None)
            if tensors is not None and (state.tiers.is_nowhere(ref) or state.is_slow(ref)):
                state.tiers.keep(ref, tensors, record.num_bytes, state.kept())

    def retire(self, name: str) -> int:
        """Admit no more requests for `name`, end its operator's pin, and drop its adapter once nobody uses it.

        Returns:
            How many users still hold it.

        Raises:
            AdapterNotFound: the name admits no requests.
        """
        state = self._state
        with state.lock:
            ref = state.loaded.named(name)
            num_users = state.loaded[ref].num_users
            state.retire(ref)
            return num_users

    def reset(self, name: str) -> None:
        """Drop the tensors of `name`'s adapter, which runs no request, from slot and memory: they are read anew when
        they are needed. Nothing happens where the name admits no requests.
        """
        state = self._state
        with state.lock:
            ref = state.loaded.find(name)
            if ref is None or state.loaded[ref].num_pins:
                return
            if ref in state.pinned and ref in state.tiers.slots:
                state.tiers.slots.unpin(ref)
            state.lost.pop(ref, None)
            state.tiers.forget(ref)
            state.pinned.try_again(ref)

    def find(self, name: str) -> tuple[AdapterRef, AdapterRecord] | None:
        """The adapter that requests for `name` would get."""
        with self._state.lock:
            ref = self._state.loaded.find(name)
            return None if ref is None else (ref, self._state.loaded[ref].record)

    def record_of(self, ref: AdapterRef) -> AdapterRecord | None:
        """What describes a generation; None if it is not loaded."""
        with self._state.lock:
            return self._state.loaded[ref].record if ref in self._state.loaded else None

    def in_memory(self, folder: Path, content_hash: str) -> tuple[AdapterRecord, M] | None:
        """An adapter of this content, loaded from this folder under any name, whose tensors are in host memory."""
        with self._state.lock:
            for ref, loaded in self._state.loaded.items():
                is_meant = loaded.record.path == folder and loaded.record.content_hash == content_hash
                if is_meant and (tensors := self._state.tiers.host.get(ref)) is not None:
                    return loaded.record, tensors
            return None

    def tensors_of(self, ref: AdapterRef) -> M | None:
        """The adapter's tensors, if they are in host memory."""
        with self._state.lock:
            return self._state.tiers.host.get(ref)

    def resolve(self, name_or_ref: str | AdapterRef) -> AdapterRef:
        """The loaded generation that is meant; of a name the one that admits requests.

        Raises:
            KeyError: there is none.
        """
        loaded = self._state.loaded
        with self._state.lock:
            ref = loaded.find(name_or_ref) if isinstance(name_or_ref, str) else name_or_ref
            if ref is None or ref not in loaded:
                raise KeyError(f"LoRA adapter {name_or_ref!r} is not loaded")
            return ref

    # Users

    def acquire(self, name: str) -> AdapterRef:
        """Count a user of `name`'s adapter, which stays loaded until the user calls `release`.

        Raises:
            AdapterNotFound: the name admits no requests.
        """
        state = self._state
        with state.lock:
            ref = state.loaded.named(name)
            state.loaded[ref].num_users += 1
            in_slot = state.tiers.written_slot(ref) is not None
            state.num_hits += in_slot
            state.num_misses += not in_slot
            return ref

    def release(self, ref: AdapterRef) -> None:
        """End one `acquire`.

        Raises:
            KeyError: there is no such user.
        """
        state = self._state
        with state.lock:
            loaded = state.loaded[ref]
            if loaded.num_users == 0:
                raise KeyError(f"LoRA adapter {ref} has no user to release")
            loaded.num_users -= 1
            state.unstage_if_unwanted(ref)
            state.drop_if_unused(ref)

    def num_users(self, ref: AdapterRef) -> int:
        """Users of a generation; 0 if it is not loaded."""
        with self._state.lock:
            return self._state.loaded[ref].num_users if ref in self._state.loaded else 0

    def num_pins(self, ref: AdapterRef) -> int:
        """Calls of `pin` that `unpin` has not ended; 0 if the generation is not loaded."""
        with self._state.lock:
            return self._state.loaded[ref].num_pins if ref in self._state.loaded else 0

    def retired(self) -> list[AdapterRef]:
        """Generations that admit no requests and still have some."""
        with self._state.lock:
            return self._state.loaded.retired()

    def take_dropped(self) -> list[AdapterRef]:
        """Generations that were dropped since the last call; none of them comes back."""
        with self._state.lock:
            dropped, self._state.dropped = self._state.dropped, []
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
        state, tiers = self._state, self._state.tiers
        with state.lock:
            state.loaded.require(ref)
            if ref in tiers.slots:
                if not tiers.is_writing(ref):
                    return Preparation(Readiness.READY)
                # A slot that is written to warm the adapter up is this request's from now on.
                if state.loaded[ref].num_users:
                    tiers.hold(ref)
                return Preparation(Readiness.WRITING)
            if ref in state.lost:
                raise state.lost.pop(ref)
            tensors = tiers.host.get(ref)
            if state.is_overdue(ref):
                raise AdapterLost(state.overdue[ref])
            if state.is_slow(ref):
                return _STILL_READING
            is_new = tiers.stage(ref)
            if tensors is None:
                return Preparation(Readiness.READING, is_new) if is_new else _STILL_READING
            if not tiers.slots.can_put(ref):
                return Preparation(Readiness.NO_SLOT)
            if not take_slot:
                return Preparation(Readiness.SLOT_AVAILABLE)
            slot = state.assign(ref)
            tiers.hold(ref)
            return Preparation(Readiness.WRITING, slot=slot, tensors=tensors)

    def assign(self, ref: AdapterRef) -> int:
        """Give an adapter without a slot one, to be written now.

        Raises:
            KeyError: the generation is not loaded.
            NoFreeSlot: none can be had.
        """
        with self._state.lock:
            self._state.loaded.require(ref)
            return self._state.assign(ref)

    def finish_write(self, ref: AdapterRef) -> None:
        """Take note that an adapter's slot is written; nothing happens if the adapter is gone."""
        state = self._state
        with state.lock:
            if not state.tiers.is_writing(ref):
                return
            state.tiers.finish_write(ref)
            state.warming.end(ref)
            if state.loaded[ref].num_users == 0:
                state.tiers.unstage(ref)

    def abandon_write(self, ref: AdapterRef) -> None:
        """Take a slot back that could not be written; nothing happens if the adapter is gone."""
        state = self._state
        with state.lock:
            if not state.tiers.is_writing(ref):
                return
            state.warming.end(ref)
            if ref in state.pinned:
                state.tiers.slots.unpin(ref)
                state.pinned.give_up(ref)
            state.tiers.leave_slot(ref)

    def lose(self, ref: AdapterRef, error: AdapterLost) -> None:
        """Have the requests that wait for an adapter told, by `prepare`, that it cannot be had."""
        state = self._state
        with state.lock:
            if ref in state.loaded and state.loaded[ref].num_users > 0:
                state.lost[ref] = error

    def unwritten(self) -> set[AdapterRef]:
        """Adapters whose slots are still to be written."""
        with self._state.lock:
            return self._state.tiers.unwritten()

    def is_writing(self, ref: AdapterRef) -> bool:
        """Whether the adapter's slot is still to be written."""
        with self._state.lock:
            return self._state.tiers.is_writing(ref)

    def can_activate(self, ref: AdapterRef) -> bool:
        """Whether the adapter has a slot, or one could be had now."""
        with self._state.lock:
            return self._state.tiers.slots.can_put(ref)

    def wants_slot(self, ref: AdapterRef) -> bool:
        """Whether a slot is all the adapter lacks: its tensors are in memory."""
        with self._state.lock:
            return ref in self._state.tiers.host and ref not in self._state.tiers.slots

    def pin(self, ref: AdapterRef) -> None:
        """Keep the adapter in its slot until `unpin`, and make it the most recently used one; pins are counted.

        Raises:
            KeyError: it is in no slot, or its slot is not written yet.
        """
        state = self._state
        with state.lock:
            if state.tiers.written_slot(ref) is None:
                raise KeyError(f"LoRA adapter {ref} is in no slot that is written")
            state.tiers.slots.get(ref)
            state.tiers.slots.pin(ref)
            state.loaded[ref].num_pins += 1
            state.tiers.unstage(ref)

    def unpin(self, ref: AdapterRef) -> None:
        """End one `pin`. Raises KeyError if there is none."""
        state = self._state
        with state.lock:
            if state.loaded[ref].num_pins == 0:
                raise KeyError(f"LoRA adapter {ref} has no pin to end")
            state.loaded[ref].num_pins -= 1
            state.tiers.slots.unpin(ref)
            state.drop_if_unused(ref)

    def slot_of(self, ref: AdapterRef) -> int | None:
        """The adapter's slot, or None while it has none that is written."""
        with self._state.lock:
            return self._state.tiers.written_slot(ref)

    def use_slot(self, ref: AdapterRef) -> int | None:
        """The adapter's slot, its recency refreshed; None while it has none that is written."""
        tiers = self._state.tiers
        with self._state.lock:
            slot = tiers.written_slot(ref)
            if slot is not None:
                tiers.slots.get(ref)
            return slot

    def use_slots(self, refs: Iterable[AdapterRef | None]) -> list[int | None]:
        """Slot of each adapter (None for each None), refreshing their recency.

        Raises:
            KeyError: an adapter has no slot that is written; it is named.
        """
        tiers = self._state.tiers
        with self._state.lock:
            slots: list[int | None] = []
            for ref in refs:
                slot = None if ref is None else tiers.written_slot(ref)
                if ref is not None:
                    if slot is None:
                        raise KeyError(f"LoRA adapter {ref} has no slot; activate it before its requests are routed")
                    tiers.slots.get(ref)
                slots.append(slot)
            return slots

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        with self._state.lock:
            self._state.check()
