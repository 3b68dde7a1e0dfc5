"""Where an engine's adapters are, for whoever asks."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from lora_core.adapter_record import AdapterRecord
from lora_core.adapter_state import AdapterState
from lora_core.messages import Residency
from lora_core.types import AdapterRef, AdapterStatus
from lora_core.workload import SlotCounts

M = TypeVar("M")

FEW = 256
"""Names that are told with every change of them."""

SECONDS_PER_NAME = 1e-5
"""Of more names, how long passes between two times that all are told: a tenth of which the telling takes."""


class Whereabouts(Generic[M]):
    """Looks at an engine's adapters and changes nothing. Thread-safe, but for `next_report`."""

    def __init__(self, state: AdapterState[M], clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._sequence = 0
        # As last reported: the version of all, of what is loaded, and of that and what is in memory.
        self._reported, self._reported_loaded, self._reported_memory = -1, -1, (-1, -1)
        self._lists_due_s = 0.0

    def records(self) -> dict[str, AdapterRecord]:
        """The adapters that admit requests, by name."""
        state = self._state
        with state.lock:
            return {name: state.loaded[ref].record for name, ref in state.loaded.admitting().items()}

    def residents(self) -> dict[int, tuple[AdapterRef, AdapterRecord]]:
        """What is, or is being written, in each taken slot, adapters that no longer admit requests included."""
        with self._state.lock:
            return {slot: (ref, record) for ref, (record, slot) in self._state.tiers.slots.items()}

    def residency(self) -> tuple[list[AdapterRef], list[AdapterRef]]:
        """Adapters that admit requests: those in written slots (by slot), and all of them (in load order)."""
        with self._state.lock:
            return self._in_slots(), self._loaded()

    def in_host_memory(self) -> list[AdapterRef]:
        """Adapters that admit requests and whose tensors are in host memory, in load order."""
        with self._state.lock:
            return self._in_memory()

    def status(self, name: str) -> AdapterStatus:
        """How the adapter of `name` is held. Raises AdapterNotFound."""
        with self._state.lock:
            return self._status(self._state.loaded.named(name))

    def statuses(self) -> list[AdapterStatus]:
        """How every adapter that admits requests is held, in load order."""
        with self._state.lock:
            return [self._status(ref) for ref in self._state.loaded.admitting().values()]

    def next_report(self) -> Residency | None:
        """What has changed since the last report; None if nothing has. One thread makes all reports.

        What is loaded, and what is in memory, is left out where it has not changed, and where it is much and has been
        told just before: a later report makes up for it.
        """
        state = self._state
        with state.lock:
            version, of_loaded = state.version, state.loaded_version
            of_memory = (of_loaded, state.tiers.host.version)
            has_lists = (of_loaded, of_memory) != (self._reported_loaded, self._reported_memory)
            tells_lists = has_lists and self._clock() >= self._lists_due_s
            if version == self._reported and not tells_lists:
                return None
            loaded = self._loaded() if tells_lists and of_loaded != self._reported_loaded else None
            in_memory = self._in_memory() if tells_lists and of_memory != self._reported_memory else None
            self._reported = version
            if tells_lists:
                self._reported_loaded, self._reported_memory = of_loaded, of_memory
                num_names = len(loaded or ()) + len(in_memory or ())
                self._lists_due_s = self._clock() + (SECONDS_PER_NAME * num_names if num_names > FEW else 0.0)
            self._sequence += 1
            on_their_way = dict.fromkeys([*state.tiers.on_their_way(), *state.warming])
            return Residency(
                sequence=self._sequence,
                resident=self._in_slots(),
                loaded=loaded,
                in_memory=in_memory,
                loading=[ref for ref in on_their_way if self._admits(ref)],
                num_slots_used=len(state.tiers.slots),
            )

    def slot_counts(self) -> SlotCounts:
        """Users and evictions since the start."""
        state = self._state
        with state.lock:
            return SlotCounts(
                num_hits=state.num_hits, num_misses=state.num_misses, num_evictions=state.tiers.num_evictions
            )

    # Below, the lock is held.

    def _admits(self, ref: AdapterRef) -> bool:
        return self._state.loaded.find(ref.name) == ref

    def _in_slots(self) -> list[AdapterRef]:
        tiers = self._state.tiers
        in_slots = ((slot, ref) for ref, (_, slot) in tiers.slots.items() if not tiers.is_writing(ref))
        return [ref for _, ref in sorted(in_slots) if self._admits(ref)]

    def _loaded(self) -> list[AdapterRef]:
        return list(self._state.loaded.admitting().values())

    def _in_memory(self) -> list[AdapterRef]:
        return [ref for ref in self._state.loaded.admitting().values() if ref in self._state.tiers.host]

    def _status(self, ref: AdapterRef) -> AdapterStatus:
        state = self._state
        in_slot = state.tiers.written_slot(ref) is not None
        return AdapterStatus(
            name=ref.name,
            generation=ref.generation,
            tier="slot" if in_slot else "host" if ref in state.tiers.host else "disk",
            pinned=ref in state.pinned,
            num_users=state.loaded[ref].num_users,
            draining=[old.generation for old in state.loaded.retired() if old.name == ref.name],
            report=state.loaded[ref].record.report(ref.generation),
        )
