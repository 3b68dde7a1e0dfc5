"""Adapters that are to be in slots before requests come for them."""

from collections.abc import Iterator

from lora_core.types import AdapterRef


class WarmUps:
    """Warm-ups that were asked for, in the order of asking. Each has its adapter's files read once at most.

    Not thread-safe: its owner serialises calls.

    Attributes:
        version: Rises with every change of which adapters are here.
    """

    def __init__(self) -> None:
        self.version = 0
        # Whether its files have been read, or are being read, for its sake.
        self._was_read: dict[AdapterRef, bool] = {}

    def __contains__(self, ref: object) -> bool:
        return ref in self._was_read

    def __iter__(self) -> Iterator[AdapterRef]:
        return iter(list(self._was_read))

    def __len__(self) -> int:
        return len(self._was_read)

    def add(self, ref: AdapterRef) -> bool:
        """Ask for an adapter; False if that was done before and has not ended."""
        if ref in self._was_read:
            return False
        self._was_read[ref] = False
        self.version += 1
        return True

    def end(self, ref: AdapterRef) -> None:
        """The adapter has its slot, or will not get one for the asking."""
        if self._was_read.pop(ref, None) is not None:
            self.version += 1

    def begin_read(self, ref: AdapterRef) -> bool:
        """Whether the adapter's files may be read for its sake: not a second time."""
        was_read, self._was_read[ref] = self._was_read[ref], True
        return not was_read
