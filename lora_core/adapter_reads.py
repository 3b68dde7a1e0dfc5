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
            state.overdue.pop(ref, None)
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
            state.overdue.pop(ref, None)
            state.tiers.drop_read(ref)
            if ref not in state.loaded:
                return
            if state.tiers.is_staged(ref) and state.loaded[ref].num_users > 0:
                state.lost[ref] = error
            state.tiers.unstage(ref)
            state.pinned.give_up(ref)
            state.warming.end(ref)

    def give_up(self, ref: AdapterRef, reason: str) -> None:
        """Let nobody wait for a read that may never end, nor memory for its outcome; nothing happens if it has ended.

        Whoever asks for the adapter before it ends is told the reason, by AdapterLost.
        """
        state = self._state
        with state.lock:
            if ref in state.overdue or not state.tiers.is_reading(ref):
                return
            state.overdue[ref] = reason
            state.tiers.free_reservation(ref)
            if ref in state.loaded:
                state.tiers.unstage(ref)
                state.warming.end(ref)

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

    def _next_warm_up(self) -> AdapterRef | None:
        """The lock is held."""
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
