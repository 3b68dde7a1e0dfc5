"""`SlotAges`: since when replicas have had what is in their slots."""

import time
from collections.abc import Callable, Iterable, Mapping


class SlotAges:
    """As far as their reports tell: what a replica held when it was first heard of may be older.

    Args:
        clock: Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since: dict[str, dict[tuple[str, int], float]] = {}

    def note(self, replica_id: str, resident: Mapping[str, int]) -> None:
        """Take what is in a replica's slots now: name -> generation. Another generation is another content."""
        known, now = self._since.get(replica_id, {}), self._clock()
        self._since[replica_id] = {item: known.get(item, now) for item in resident.items()}

    def since(self, replica_id: str, name: str, generation: int) -> float | None:
        """When it came into a slot there, in seconds since 1970; None where it is in none."""
        return self._since.get(replica_id, {}).get((name, generation))

    def drop(self, replica_ids: Iterable[str]) -> None:
        """These replicas are gone."""
        for replica_id in replica_ids:
            self._since.pop(replica_id, None)
