"""`SimulatedHandle`: what a process that sends requests knows, and when it comes to know it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from cluster.board import Board
from cluster.fleet import ReplicaState
from cluster.hold_time import HoldTime
from cluster.placement import PlacementSettings
from cluster.simulated_router import HINT_MS


class SimulatedHandle:
    """One of several handles: it counts its own requests, hears a replica's queue length when that accepts one of them,
    its slots when a reply begins, and everything else when the router actor publishes it.
    """

    def __init__(self, settings: PlacementSettings, reads_slots: bool) -> None:
        self.board = Board(settings)
        self._reads_slots = reads_slots
        self._hints: dict[str, dict[str, float]] = {}
        self._claims: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._num_busy_others: Counter[str] = Counter()
        self._hold_time = HoldTime()

    def set_replicas(self, replica_ids: Iterable[str]) -> None:
        """The replicas Serve says there are."""
        self.board.set_replicas(dict.fromkeys(replica_ids, 1 << 30))

    def sent(self, replica_id: str, adapter: str, num_in_flight: int, now: float) -> None:
        """A replica accepted a request, and said how many it has."""
        self.board.set_in_flight(replica_id, num_in_flight)
        self._claims[replica_id][adapter] += 1
        self._hold_time.begin(now / 1e3)
        self._show_busy(replica_id)
        if self._reads_slots and not self.board.holds(adapter, replica_id):
            self._hints.setdefault(replica_id, {})[adapter] = now + HINT_MS
            self.board.set_hints(replica_id, frozenset(self._hints[replica_id]))

    def replied(self, replica_id: str, adapter: str, now: float) -> None:
        """A reply of this handle's has ended."""
        self._hold_time.end(now / 1e3)
        self._claims[replica_id] -= Counter([adapter])
        self._show_busy(replica_id)
        self.board.set_in_flight(replica_id, max(0, self.board.num_in_flight(replica_id) - 1))

    def hear(self, replica_id: str, state: ReplicaState, num_busy: int | None = None) -> None:
        """News of a replica's slots; from a reply, also how many adapters it is busy with."""
        if not self._reads_slots:
            return
        self.board.set_state(replica_id, state)
        if num_busy is not None:
            self._num_busy_others[replica_id] = max(0, num_busy - len(self._claims[replica_id]))
            self._show_busy(replica_id)

    def _show_busy(self, replica_id: str) -> None:
        if self._reads_slots:
            self.board.set_busy(replica_id, len(self._claims[replica_id]) + self._num_busy_others[replica_id])

    def take(self, states: Mapping[str, ReplicaState], routes: Mapping[str, tuple[str, ...]], now: float) -> None:
        """The router actor's table; loads that it shows done, or that are overdue, are hinted at no longer."""
        for replica_id, state in states.items():
            self.hear(replica_id, state)
            hints = self._hints.get(replica_id)
            if hints:
                for adapter in [name for name, until in hints.items() if until <= now or name in state.resident]:
                    del hints[adapter]
                self.board.set_hints(replica_id, frozenset(hints))
        self.board.set_copies(routes)
        hold_s = self._hold_time.mean_s
        if self._reads_slots and hold_s is not None:
            self.board.set_hold_ms(1e3 * hold_s)
