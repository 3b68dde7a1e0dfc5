"""`SimulatedRouter`: the router actor's part in placement, period by period."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from cluster.copies import CopySettings, Host, Plan, plan
from cluster.popularity import Popularity
from cluster.simulated_replica import SimulatedReplica
from cluster.workloads import MEAN_TOKENS


class SimulatedRouter:
    """Adds up what replicas report, and plans copies from it."""

    def __init__(self, settings: CopySettings) -> None:
        self.plan = Plan()
        self.num_moves = 0
        """Slots promised where they were not promised before."""
        self._settings = settings
        self._popularity = Popularity()
        self._work: defaultdict[str, float] = defaultdict(float)
        self._is_first = True

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
