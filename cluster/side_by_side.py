"""Router actors of two versions side by side, as in a rolling update: a change reaches the replicas of one alone."""

from collections.abc import Mapping

from cluster.fleet import FleetTable


def behind(tables: Mapping[str, FleetTable]) -> dict[str, frozenset[str]]:
    """For each router actor, the adapters that another one serves at a later epoch, or alone.

    Its replicas would wait in vain for the epoch that requests for these need.

    Args:
        tables: Each router actor's, by its name.
    """
    if len(tables) < 2:
        return dict.fromkeys(tables, frozenset())
    newest: dict[str, int] = {}
    for table in tables.values():
        for name, entry in table.adapters.items():
            newest[name] = max(newest.get(name, entry.epoch), entry.epoch)
    return {
        router: frozenset(name for name, epoch in newest.items() if _epoch(table, name) < epoch)
        for router, table in tables.items()
    }


def _epoch(table: FleetTable, name: str) -> int:
    entry = table.adapters.get(name)
    return -1 if entry is None else entry.epoch
