"""`SimulatedRouter`: the router actor's part in placement, period by period."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cluster.copies import CopySettings, Host, Plan, plan
from cluster.fleet import ReplicaState
from cluster.popularity import Popularity
from cluster.simulated_replica import SimulatedReplica
from cluster.workloads import MEAN_TOKENS

HINT_MS = 2000.0
"""A load that a request brings about is believed for this long, unless the replica's slots show it done."""


class SimulatedRouter:
    """Adds up what replicas report, plans copies from it, and shows all handles the loads that one has told of."""

    def __init__(self, settings: CopySettings) -> None:
        self.plan = Plan()
        self.num_moves = 0
        """Slots promised where they were not promised before."""
        self._settings = settings
        self._popularity = Popularity()
        self._work: defaultdict[str, float] = defaultdict(float)
        self._is_first = True
        self._loads: defaultdict[str, dict[str, float]] = defaultdict(dict)

    def note_load(self, replica_id: str, adapter: str, now_ms: float) -> None:
        """A handle's request brings this adapter into a slot of this replica."""
        self._loads[replica_id][adapter] = now_ms + HINT_MS

    def rows(self, states: Mapping[str, ReplicaState], now_ms: float) -> dict[str, ReplicaState]:
        """What the table says of each replica."""
        return {replica_id: self._row(replica_id, state, now_ms) for replica_id, state in states.items()}

    def _row(self, replica_id: str, state: ReplicaState, now_ms: float) -> ReplicaState:
        loads = self._loads[replica_id]
        for name in [name for name, until in loads.items() if until <= now_ms or name in state.resident]:
            del loads[name]
        return msgspec.structs.replace(state, loading=state.loading | loads.keys()) if loads else state

    def note(self, work: Iterable[tuple[str, float]]) -> None:
        """Tokens that adapters have come to."""
        for name, tokens in work:
            self._work[name] += tokens

    def make_plan(self, replicas: Sequence[SimulatedReplica], now_ms: float) -> None:
        """Plan the next period for these replicas, and tell them what to keep."""
        self._popularity.add(self._work, total=sum(self._work.values()), now=now_ms / 1e3, grain=MEAN_TOKENS)
        self._work.clear()
        hosts = [
            Host(replica.replica_id, state.num_slots, resident=state.resident)
            for replica, state in [(replica, replica.state()) for replica in replicas]
        ]
        shares = self._popularity.shares()
        if not shares:
            return
        before = self.plan.slots
        self.plan = plan(shares, hosts, self._settings, None if self._is_first else self.plan)
        self._is_first = False
        self.num_moves += sum(len(set(ids) - set(before.get(name, ()))) for name, ids in self.plan.slots.items())
        for replica in replicas:
            replica.wish(self.plan.warm(replica.replica_id), frozenset(self.plan.keep(replica.replica_id)))
