"""`KnownReplica`: what one handle knows of one replica, from three sources of different age."""

from collections import Counter

import msgspec

from cluster.fleet import ReplicaState
from deployments.generation import SlotSnapshot

UNKNOWN = ReplicaState()


class KnownReplica:
    """One replica as the router actor's table shows it, as its own replies do, and by the requests sent to it.

    A reply tells of slots sooner than the table does; whichever has the higher sequence number counts. An adapter that
    requests are on their way for, and that is in no slot there by all that is known, is being loaded: that is the
    *claim* of each such request, and ends with it.
    """

    def __init__(self) -> None:
        self._row = UNKNOWN
        self._behind: frozenset[str] = frozenset()
        self._told: SlotSnapshot | None = None
        self._claims: Counter[str] = Counter()
        self._num_busy_others = 0
        self._is_told_of_others = False
        self.state = UNKNOWN
        """What the replica says of itself, claims left aside; the same object until that changes. It is made there, as
        other threads read it."""

    @property
    def hints(self) -> frozenset[str]:
        """Adapters that this handle's requests have the replica load, of which it has not told yet."""
        state = self.state
        return frozenset(self._claims.keys() - state.resident - state.loading)

    @property
    def num_busy(self) -> int:
        """Adapters whose slots no other can have now: those of this handle's requests, and as many more as the replica
        last said that it had."""
        return len(self._claims) + self._num_busy_others

    def num_claims(self, adapter: str | None = None) -> int:
        """Requests on their way or there, of this handle: those for an adapter, or for all."""
        return self._claims.total() if adapter is None else self._claims[adapter]

    def take_row(self, row: ReplicaState) -> bool:
        """Take the replica's row of a newer table; whether it is another one."""
        if row is self._row:
            return False
        self._row = row
        if self._told is not None and self._told.sequence <= row.sequence:
            self._told = None
        self.state = self._merged()
        return True

    def take_behind(self, adapters: frozenset[str]) -> bool:
        """Take which adapters it cannot have been told of; whether these are others than before."""
        if adapters == self._behind:
            return False
        self._behind = adapters
        self.state = self._merged()
        return True

    def take_busy(self, num_busy: int) -> bool:
        """Take how many adapters a reply says are busy; whether that changes `num_busy`."""
        self._is_told_of_others = True
        return self._set_others(num_busy - len(self._claims))

    def doubt_busy(self) -> bool:
        """Forget what others had the replica do, if no reply has told of it since this was last asked; whether that
        changes `num_busy`."""
        was_told, self._is_told_of_others = self._is_told_of_others, False
        return not was_told and self._set_others(0)

    def _set_others(self, num_busy: int) -> bool:
        before, self._num_busy_others = self._num_busy_others, max(0, num_busy)
        return self._num_busy_others != before

    def take_snapshot(self, snapshot: SlotSnapshot) -> bool:
        """Take what a reply says of the slots; whether it is news: an older word than the last one is not."""
        if snapshot.sequence <= (self._row.sequence if self._told is None else self._told.sequence):
            return False
        self._told = snapshot
        self.state = self._merged()
        return True

    def claim(self, adapter: str) -> bool:
        """Count a request on its way; whether it is what makes the replica load the adapter, as far as is known."""
        is_first = adapter not in self._claims
        self._claims[adapter] += 1
        return is_first and adapter not in self.state.resident and adapter not in self.state.loading

    def release(self, adapter: str) -> bool:
        """Forget one claim: its request has ended, or never left. Whether that was the adapter's last one."""
        if adapter not in self._claims:
            return False
        self._claims[adapter] -= 1
        if self._claims[adapter]:
            return False
        del self._claims[adapter]
        return True

    def _merged(self) -> ReplicaState:
        row = self._row
        if self._behind:
            row = msgspec.structs.replace(row, refused=row.refused | self._behind)
        if self._told is None:
            return row
        return msgspec.structs.replace(
            row,
            resident=frozenset(self._told.resident),
            loading=frozenset(self._told.loading),
            num_slots_used=self._told.num_slots_used,
        )
