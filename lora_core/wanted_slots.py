"""Slots that are wanted for adapters whether or not requests use them: pins, warm-ups, protection."""

from collections.abc import Collection
from typing import Generic, TypeVar

from lora_core.adapter_state import AdapterState
from lora_core.readiness import Readiness
from lora_core.types import AdapterRef

M = TypeVar("M")


class WantedSlots(Generic[M]):
    """What is wanted of an engine's slots beside what its requests need. Thread-safe."""

    def __init__(self, state: AdapterState[M]) -> None:
        self._state = state

    # The operator's pins

    def pin(self, name: str) -> bool:
        """Let the adapter of `name` have the next slot and keep it; False if it was pinned already.

        Raises:
            AdapterNotFound: the name admits no requests.
            PinRefused: no slot would be left for the adapters that are not pinned.
        """
        state = self._state
        with state.lock:
            ref = state.loaded.named(name)
            state.pinned.try_again(ref)
            if ref in state.pinned:
                return False
            state.pinned.add(ref)
            if ref in state.tiers.slots:
                state.tiers.slots.pin(ref)
            return True

    def unpin(self, name: str) -> bool:
        """End the pin of `name`'s adapter; False if there was none. Raises AdapterNotFound as `pin` does."""
        state = self._state
        with state.lock:
            ref = state.loaded.named(name)
            was_pinned = ref in state.pinned
            state.end_operator_pin(ref)
            return was_pinned

    def is_pinned(self, ref: AdapterRef) -> bool:
        """Whether the operator has pinned it."""
        with self._state.lock:
            return ref in self._state.pinned

    def pinned_without_slot(self) -> list[AdapterRef]:
        """Pinned adapters on their way to a slot; not those whose files are lost, or are being read for long."""
        with self._state.lock:
            return self._pinned_without_slot()

    # Warm-ups

    def warm_up(self, name: str) -> Readiness:
        """Bring the adapter of `name` to host memory and, if one is to spare then, to a slot.

        Returns:
            READY or WRITING where it has a slot; READING where it is on its way; NO_SLOT where no slot is to spare,
            and nothing comes of it.

        Raises:
            AdapterNotFound: the name admits no requests.
        """
        state = self._state
        with state.lock:
            ref = state.loaded.named(name)
            if ref in state.tiers.slots:
                return Readiness.WRITING if state.tiers.is_writing(ref) else Readiness.READY
            if state.is_slow(ref) or (ref in state.tiers.host and not state.can_spare(ref)):
                return Readiness.NO_SLOT
            state.warming.add(ref)
            return Readiness.READING

    @property
    def is_warming(self) -> bool:
        """Whether adapters are on their way that were asked to be warmed up."""
        return len(self._state.warming) > 0

    def assign_warm_up(self) -> tuple[AdapterRef, int, M] | None:
        """Give an adapter that is to be warmed up, and is in memory, a slot that is to spare.

        That is a free one, or one of an adapter that has no requests, no pin and no protection. There is none while
        anybody waits for a slot. Those that no slot is to spare for are warmed up no further.

        Returns:
            The adapter, the slot, and what to write there now; None if there is nothing to write.
        """
        state, tiers = self._state, self._state.tiers
        with state.lock:
            for ref in state.warming:
                if ref in tiers.slots:
                    state.warming.end(ref)
                    continue
                tensors = tiers.host.get(ref)
                if tensors is None:
                    continue
                if self._is_awaited():
                    return None
                slot = state.assign_spare(ref)
                state.warming.end(ref)
                if slot is not None:
                    # What was to be told of an attempt before is no longer so.
                    state.lost.pop(ref, None)
                    return ref, slot, tensors
            return None

    def can_wait(self, ref: AdapterRef) -> bool:
        """Whether nobody waits for this adapter's slot to be written, nor for any other one."""
        state = self._state
        with state.lock:
            if ref not in state.loaded or state.loaded[ref].num_users or ref in state.pinned:
                return False
            return not self._is_awaited()

    # Protection

    def protect(self, names: Collection[str]) -> None:
        """From now on let the adapters of these names lose their slots last, and no others; unknown names do not
        matter.
        """
        with self._state.lock:
            self._state.protect(names)

    # Below, the lock is held.

    def _pinned_without_slot(self) -> list[AdapterRef]:
        state = self._state
        return [
            ref for ref in state.pinned.wanted() if state.tiers.written_slot(ref) is None and not state.is_slow(ref)
        ]

    def _is_awaited(self) -> bool:
        return self._state.tiers.is_awaited or bool(self._pinned_without_slot())
