"""`CopyIndex`: which replicas have a copy of an adapter, kept up to date by differences."""

from collections.abc import Set as AbstractSet

NOWHERE: frozenset[int] = frozenset()


class CopyIndex:
    """Names held by replicas `0..num_replicas-1`, found by name, and how many of a replica's no other has."""

    def __init__(self, num_replicas: int) -> None:
        self._held: list[AbstractSet[str]] = [frozenset()] * num_replicas
        self._holders: dict[str, set[int]] = {}
        self._num_last = [0] * num_replicas

    def holders(self, name: str) -> frozenset[int] | set[int]:
        """Replicas that hold the name."""
        return self._holders.get(name, NOWHERE)

    def of(self, index: int) -> AbstractSet[str]:
        """Names that a replica holds."""
        return self._held[index]

    def num_last(self, index: int) -> int:
        """Names that this replica holds and no other does."""
        return self._num_last[index]

    def set(self, index: int, names: AbstractSet[str]) -> set[int]:
        """Replace what a replica holds; returns the other replicas whose `num_last` has changed."""
        before, self._held[index] = self._held[index], names
        touched: set[int] = set()
        for name in before - names:
            holders = self._holders[name]
            holders.discard(index)
            if not holders:
                del self._holders[name]
                self._num_last[index] -= 1
            elif len(holders) == 1:
                touched.add(self._count(holders, 1))
        for name in names - before:
            holders = self._holders.setdefault(name, set())
            if not holders:
                self._num_last[index] += 1
            elif len(holders) == 1:
                touched.add(self._count(holders, -1))
            holders.add(index)
        return touched

    def _count(self, only: AbstractSet[int], change: int) -> int:
        (index,) = only
        self._num_last[index] += change
        return index
