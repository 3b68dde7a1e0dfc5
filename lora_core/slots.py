"""Which adapter is in which slot: least recently used goes first, protected ones last, adapters in use never."""

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from lora_core.errors import AdapterError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class NoFreeSlot(AdapterError):
    """Every slot holds an adapter that is in use or pinned; one becomes free when a request ends, or a pin."""


class _LoRALRUCache(Generic[K, V]):
    """Adapters in slots `0..max_size-1`, with pins that keep an adapter in its slot.

    Not thread-safe: its owner serialises calls.

    Attributes:
        version: Rises with every change of which key is in which slot, and never otherwise.
    """

    def __init__(self, max_size: int) -> None:
        if max_size < 0:
            raise ValueError(f"max_size is {max_size}, expected at least 0 slots")
        self.version = 0
        self._max_size = max_size
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._free_slots = set(range(max_size))
        self._pins: dict[K, int] = {}
        self._protected: frozenset[K] = frozenset()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def get(self, key: K) -> tuple[V, int] | tuple[None, None]:
        """Value and slot of `key`, which becomes the most recently used; `(None, None)` if it has no slot."""
        if key not in self._entries:
            return None, None
        self._entries.move_to_end(key)
        return self._entries[key]

    def get_slot(self, key: K) -> int | None:
        """Slot of `key`, or None; recency stays as it is."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def next_slot(self) -> int | None:
        """The lowest free slot, or None if all are taken."""
        return min(self._free_slots, default=None)

    def can_put(self, key: K, *, sparing: Collection[K] = ()) -> bool:
        """Whether `put(key, ...)`, sparing the same keys, would succeed now."""
        if key in self._entries or self._free_slots:
            return True
        return self._victim(sparing) is not None if sparing else len(self._pins) < len(self._entries)

    def put(self, key: K, value: V, *, sparing: Collection[K] = ()) -> tuple[K | None, int]:
        """Give `key` a slot and make it the most recently used.

        A key that has a slot keeps it. Otherwise it gets the lowest free slot, or else that of the least recently used
        key without a pin, which is evicted: a protected one only where no other is left, and none of `sparing`.

        Returns:
            The evicted key (None if there was none) and the slot of `key`.

        Raises:
            NoFreeSlot: all slots are pinned or spared.
        """
        if key in self._entries:
            slot = self._entries[key][1]
            self._entries[key] = (value, slot)
            self._entries.move_to_end(key)
            return None, slot
        evicted = None if self._free_slots else self._evict(sparing)
        slot = min(self._free_slots)
        self._free_slots.remove(slot)
        self._entries[key] = (value, slot)
        self.version += 1
        return evicted, slot

    def remove(self, key: K) -> tuple[bool, int | None]:
        """Free the slot of `key`.

        Returns:
            Whether `key` had a slot, and which.

        Raises:
            ValueError: `key` is pinned.
        """
        if key not in self._entries:
            return False, None
        self._refuse_pinned([key])
        return True, self._free(key)

    def clear(self) -> None:
        """Free all slots.

        Raises:
            ValueError: a key is pinned; nothing is freed then.
        """
        self._refuse_pinned(list(self._pins))
        for key in list(self._entries):
            self._free(key)

    def pin(self, key: K) -> None:
        """Keep `key` in its slot until as many `unpin` calls as there were `pin` calls.

        Raises:
            KeyError: `key` has no slot.
        """
        if key not in self._entries:
            raise KeyError(key)
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: K) -> None:
        """Take back one `pin`.

        Raises:
            KeyError: `key` is not pinned.
        """
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]

    def num_pins(self, key: K) -> int:
        """How many `unpin` calls it takes until `key` may be evicted."""
        return self._pins.get(key, 0)

    def is_pinned(self, key: K) -> bool:
        """Whether `key` may not be evicted or removed."""
        return key in self._pins

    def protect(self, keys: Collection[K]) -> None:
        """From now on evict these keys, and no others, only after all the rest; they need not have slots."""
        self._protected = frozenset(keys)

    def keys(self) -> list[K]:
        """Keys, from least to most recently used."""
        return list(self._entries)

    def values(self) -> list[tuple[V, int]]:
        """Values with their slots, from least to most recently used."""
        return list(self._entries.values())

    def items(self) -> list[tuple[K, tuple[V, int]]]:
        """Keys, each with its value and slot, from least to most recently used."""
        return list(self._entries.items())

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        taken = [slot for _, slot in self._entries.values()]
        assert len(set(taken)) == len(taken), f"two keys share a slot: {self._entries}"
        assert self._free_slots.isdisjoint(taken), f"slots both free and taken: {self._free_slots & set(taken)}"
        assert self._free_slots | set(taken) == set(range(self._max_size)), "a slot is lost"
        assert self._pins.keys() <= self._entries.keys(), f"pins without a slot: {self._pins}"
        assert all(count > 0 for count in self._pins.values()), f"pin counts: {self._pins}"

    def _evict(self, sparing: Collection[K]) -> K:
        key = self._victim(sparing)
        if key is None:
            raise NoFreeSlot(
                f"all {self._max_size} adapter slots are in use by running requests or pinned; "
                "wait for a request to end, or raise max_num_loras"
            )
        self._free(key)
        return key

    def _victim(self, sparing: Collection[K]) -> K | None:
        """Whose slot to take; None if there is none that may be."""
        may_go = [key for key in self._entries if key not in self._pins and key not in sparing]
        return next((key for key in may_go if key not in self._protected), next(iter(may_go), None))

    def _free(self, key: K) -> int:
        _, slot = self._entries.pop(key)
        self._free_slots.add(slot)
        self.version += 1
        return slot

    def _refuse_pinned(self, keys: list[K]) -> None:
        pinned = [key for key in keys if key in self._pins]
        if pinned:
            raise ValueError(f"{pinned} cannot leave their slots while pinned; unpin them first")
