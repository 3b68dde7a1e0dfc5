"""Host memory for adapters' tensors: bounded in bytes, least recently used goes first, claimed ones never go."""

from collections import OrderedDict
from collections.abc import Container, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


class HostMemory(Generic[K, M]):
    """Adapters whose tensors are in host memory, and room set aside for those about to be read.

    A claimed entry stays until it is released or removed. Together, entries and reservations never exceed the capacity.

    Not thread-safe: its owner serialises calls.

    Attributes:
        capacity_bytes: What it may hold.
        num_bytes: What it holds, reservations included.
        version: Rises with every change of what is here, and never otherwise.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self.version = 0
        self._entries: OrderedDict[K, tuple[M, int]] = OrderedDict()
        self._reserved: dict[K, int] = {}
        self._claimed: set[K] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def get(self, key: K) -> M | None:
        """The tensors of `key`, which becomes the most recently used; None if they are not here."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def keys(self) -> list[K]:
        """Keys of the entries, from least to most recently used."""
        return list(self._entries)

    def reserved(self) -> set[K]:
        """Keys that room is set aside for."""
        return set(self._reserved)

    def can_reserve(self, num_bytes: int) -> bool:
        """Whether `reserve` would find room now."""
        evictable = sum(size for key, (_, size) in self._entries.items() if key not in self._claimed)
        return self.num_bytes - evictable + num_bytes <= self.capacity_bytes

    def reserve(self, key: K, num_bytes: int, last: Container[K] = ()) -> bool:
        """Set room aside for tensors about to be read, evicting what is neither claimed nor, at first, in `last`.

        Returns:
            Whether there is room; if not, nothing was evicted.
        """
        assert key not in self._entries, f"{key} is reserved while it is here"
        assert key not in self._reserved, f"{key} is reserved twice"
        if not self.can_reserve(num_bytes):
            return False
        unclaimed = [other for other in self._entries if other not in self._claimed]
        # A stable sort: within both groups the least recently used one stays first.
        for other in sorted(unclaimed, key=lambda other: other in last):
            if self.num_bytes + num_bytes <= self.capacity_bytes:
                break
            self.remove(other)
        self._reserved[key] = num_bytes
        self.num_bytes += num_bytes
        return True

    def fill(self, key: K, tensors: M) -> None:
        """Turn a reservation into an entry, the most recently used one."""
        self._entries[key] = (tensors, self._reserved.pop(key))
        self.version += 1

    def cancel(self, key: K) -> None:
        """Give a reservation's room back."""
        self.num_bytes -= self._reserved.pop(key)

    def put(self, key: K, tensors: M, num_bytes: int, last: Container[K] = ()) -> bool:
        """Reserve and fill at once; False if there is no room."""
        if not self.reserve(key, num_bytes, last):
            return False
        self.fill(key, tensors)
        return True

    def claim(self, key: K) -> None:
        """Keep an entry until it is released. Claiming it again changes nothing."""
        assert key in self._entries, f"{key} is claimed and not here"
        self._claimed.add(key)

    def release(self, key: K) -> None:
        """End a claim, if there is one."""
        self._claimed.discard(key)

    def is_claimed(self, key: K) -> bool:
        """Whether the entry may not be evicted."""
        return key in self._claimed

    def remove(self, key: K) -> None:
        """Forget an entry, if it is here, claimed or not."""
        if key in self._entries:
            self.num_bytes -= self._entries.pop(key)[1]
            self.version += 1
            self._claimed.discard(key)

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        held = sum(size for _, size in self._entries.values()) + sum(self._reserved.values())
        assert held == self.num_bytes, f"{held} bytes are held and {self.num_bytes} are counted"
        assert self.num_bytes <= self.capacity_bytes, f"{self.num_bytes} bytes of {self.capacity_bytes}"
        assert self._claimed <= self._entries.keys(), f"claims without an entry: {self._claimed - self._entries.keys()}"
        assert self._entries.keys().isdisjoint(self._reserved), "an entry is reserved too"
