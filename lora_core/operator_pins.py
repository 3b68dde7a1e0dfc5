"""Adapters that an operator wants in slots, whether or not requests use them."""

from collections.abc import Collection, Iterator

from lora_core.errors import AdapterError
from lora_core.types import AdapterRef


class PinRefused(AdapterError):
    """Another pin would leave no slot for adapters that are not pinned."""


class OperatorPins:
    """Pinned adapters, in the order of their pins; a slot is left for the others.

    Not thread-safe: its owner serialises calls.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._pinned: dict[AdapterRef, None] = {}
        # Those that could not be brought into a slot, and are not tried again before somebody asks.
        self._given_up: set[AdapterRef] = set()

    def __contains__(self, ref: object) -> bool:
        return ref in self._pinned

    def __iter__(self) -> Iterator[AdapterRef]:
        return iter(self._pinned)

    def add(self, ref: AdapterRef) -> None:
        """Pin an adapter that is not pinned. Raises PinRefused."""
        if len(self._pinned) >= self._num_slots - 1:
            raise PinRefused(
                f"{len(self._pinned)} adapter(s) are pinned, and of {self._num_slots} slot(s) at most "
                f"{self._num_slots - 1} can be, so that others can be served; unpin one, or raise max_num_loras"
            )
        self._pinned[ref] = None

    def end(self, ref: AdapterRef) -> None:
        """End a pin."""
        del self._pinned[ref]
        self._given_up.discard(ref)

    def give_up(self, ref: AdapterRef) -> None:
        """Try no more to bring an adapter into a slot, if it is pinned."""
        if ref in self._pinned:
            self._given_up.add(ref)

    def try_again(self, ref: AdapterRef) -> None:
        """End `give_up`."""
        self._given_up.discard(ref)

    def wanted(self) -> list[AdapterRef]:
        """Pinned adapters that are not given up."""
        return [ref for ref in self._pinned if ref not in self._given_up]

    def check(self, admitting: Collection[AdapterRef]) -> None:
        """Assert what must hold between any two calls, of the adapters that admit requests."""
        assert self._pinned.keys() <= set(admitting), "a pinned adapter admits no requests"
        assert len(self._pinned) <= max(0, self._num_slots - 1), f"{len(self._pinned)} adapters are pinned"
        assert self._given_up <= self._pinned.keys()
