"""`PublishedTable`: the fleet's table as the router actor publishes it, version after version."""

from collections import deque
from collections.abc import Mapping

from cluster.entry import AdapterEntry
from cluster.fleet import Alias, FleetTable, ReplicaState
from cluster.table_changes import RowChange, TableDelta, applied, differences, row_change

MAX_DELTAS_KEPT = 1000
"""Versions that a reader may be behind and still be told only what changed: 20 s of changes at the fastest."""


class PublishedTable:
    """The newest version, and what led to it from those before. Its cost is that of what changes, not of what there is.

    Args:
        router_id: Tells this router's versions from those of another one.
    """

    def __init__(self, router_id: str) -> None:
        self.table = FleetTable(version=1, epoch=0, adapters={}, replicas={}, router_id=router_id)
        self._deltas: deque[TableDelta] = deque(maxlen=MAX_DELTAS_KEPT)

    def update(
        self,
        epoch: int,
        *,
        adapters: Mapping[str, AdapterEntry | None] | None = None,
        replicas: Mapping[str, ReplicaState | None] | None = None,
        copies: Mapping[str, tuple[str, ...] | None] | None = None,
        aliases: Mapping[str, Alias | None] | None = None,
    ) -> bool:
        """Publish a new version where any of these differs from the newest; None is given for what is gone.

        Returns:
            Whether there is a new version.
        """
        last = self.table
        delta = TableDelta(
            version=last.version + 1,
            epoch=epoch,
            adapters=differences(last.adapters, adapters or {}),
            replicas=self._row_changes(replicas or {}),
            copies=differences(last.copies, copies or {}),
            aliases=differences(last.aliases, aliases or {}),
        )
        if delta.is_empty:
            return False
        self.table = applied(last, [delta])
        self._deltas.append(delta)
        return True

    def since(self, version: int, router_id: str) -> FleetTable | list[TableDelta]:
        """What a reader needs that has a version of a router's table: what changed since, or the whole where that is no
        longer known."""
        last = self.table
        oldest = last.version - len(self._deltas)
        if router_id != last.router_id or not oldest <= version <= last.version:
            return last
        return [delta for delta in self._deltas if delta.version > version]

    def _row_changes(self, replicas: Mapping[str, ReplicaState | None]) -> dict[str, ReplicaState | RowChange | None]:
        last = self.table.replicas
        changes: dict[str, ReplicaState | RowChange | None] = {}
        for replica_id, row in differences(last, replicas).items():
            old = last.get(replica_id)
            changes[replica_id] = row if row is None or old is None else row_change(old, row)
        return changes
