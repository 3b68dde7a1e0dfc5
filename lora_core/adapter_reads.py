"""Reads of adapters' files: which one is next, and what becomes of it."""

from typing import Generic, TypeVar

from lora_core.adapter_record import AdapterRecord
from lora_core.adapter_state import AdapterState
from lora_core.errors import AdapterLost
from lora_core.types import AdapterRef

M = TypeVar("M")


class AdapterReads(Generic[M]):
    """The reads of an engine's adapters, for those who do them. Thread-safe; no method waits."""

    def __init__(self, state: AdapterState[M]) -> None:
        self._state = state

    def next(self) -> tuple[AdapterRef, AdapterRecord] | None:
        """Begin to read the adapter whose turn it is, with room for it set aside.

        Those that somebody waits for come first, in the order of asking: None if there is no room for the first one; a
        smaller one does not overtake it. Then those to be warmed up, one at a time.
        """
        state = self._state
        with state.lock:
            ref = state.tiers.next_unread()
            if ref is None:
                ref = self._next_warm_up()
            if ref is None:
                return None
            record = state.loaded[ref].record
            if not state.tiers.host.reserve(ref, record.num_bytes, state.kept()):
                # A warm-up that finds no room has no effect.
                state.warming.end(ref)
                return None
            state.tiers.begin_read(ref, is_reserved=True)
            return ref, record

    def begin(self, ref: AdapterRef) -> AdapterRecord | None:
        """Begin to read an adapter at once, with no room set aside; None if it is being read or in memory.

        Raises:
            KeyError: the generation is not loaded.
        """
        state = self._state
        with state.lock:
            record = state.loaded[ref].record
            if state.tiers.is_reading(ref) or ref in state.tiers.host:
                return None
            state.tiers.begin_read(ref, is_reserved=False)
            return record

    def end(self, ref: AdapterRef, tensors: M, seconds: float = 0.0) -> None:
        """Keep what was read in so many seconds, if the adapter is still loaded and there is room."""
        state = self._state
        with state.lock:
            self._end(ref)
            if ref not in state.loaded:
                state.tiers.drop_read(ref)
                return
            state.tiers.end_read(ref, tensors, state.loaded[ref].record.num_bytes, state.kept())
            state.loaded[ref].read_s = seconds
            state.pinned.try_again(ref)
            state.unstage_if_unwanted(ref)

    def fail(self, ref: AdapterRef, error: AdapterLost) -> None:
        """Take note that an adapter could not be read: those who wait for it are told, later ones try again."""
        state = self._state
        with state.lock:
            is_awaited = self._end(ref) or state.tiers.is_staged(ref)
            state.tiers.drop_read(ref)
            if ref not in state.loaded or ref in state.tiers.host or ref in state.tiers.slots:
                # Gone, or come from elsewhere meanwhile.
                return
            if is_awaited and state.loaded[ref].num_users > 0:
                state.lost[ref] = error
            state.tiers.unstage(ref)
            state.pinned.give_up(ref)
            state.warming.end(ref)

    def step_aside(self, ref: AdapterRef) -> None:
        """Let others by a read that takes long: it keeps no place on the way to the slots, and no memory, from them.

        Those who wait for the adapter go on waiting. Nothing happens if the read has ended.
        """
        with self._state.lock:
            self._step_aside(ref)

    def give_up(self, ref: AdapterRef, reason: str) -> None:
        """Let nobody wait any more for a read that may never end; nothing happens if it has ended.

        Whoever asks for the adapter before it ends is told the reason, by AdapterLost.
        """
        state = self._state
        with state.lock:
            if ref not in state.overdue and self._step_aside(ref):
                state.overdue[ref] = reason

    def take_seconds(self, ref: AdapterRef) -> float | None:
        """How long an adapter was read for since this was last asked; None if it was not read, or is gone."""
        loaded = self._state.loaded
        with self._state.lock:
            if ref not in loaded:
                return None
            seconds, loaded[ref].read_s = loaded[ref].read_s, None
            return seconds

    def is_under_way(self, ref: AdapterRef) -> bool:
        """Whether the adapter's files are being read."""
        with self._state.lock:
            return self._state.tiers.is_reading(ref)

    # Below, the lock is held.

    def _step_aside(self, ref: AdapterRef) -> bool:
        """Whether there is a read, which then is a slow one."""
        state = self._state
        if not state.tiers.is_reading(ref):
            return False
        if ref not in state.slow:
            state.slow.add(ref)
            state.tiers.free_reservation(ref)
            if ref in state.loaded:
                state.tiers.unstage(ref)
                state.warming.end(ref)
        return True

    def _end(self, ref: AdapterRef) -> bool:
        """Take note that a read has ended; whether some have waited for it as for a slow one."""
        state = self._state
        is_awaited = ref in state.slow and ref not in state.overdue
        state.slow.discard(ref)
        state.overdue.pop(ref, None)
        return is_awaited

    def _next_warm_up(self) -> AdapterRef | None:
        state = self._state
        if any(map(state.tiers.is_reading, state.warming)):
            return None
        for ref in state.warming:
            if state.tiers.is_nowhere(ref):
                if state.warming.begin_read(ref):
                    return ref
                # It was read, and had to leave memory before it came to a slot.
                state.warming.end(ref)
        return None
