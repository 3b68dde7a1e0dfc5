"""`TableFeed`: publishes the fleet's table to whoever watches it."""

import asyncio
import uuid

from cluster.fleet import FleetTable
from cluster.members import Members
from cluster.published_table import PublishedTable
from cluster.registry import AdapterRegistry
from cluster.table_changes import TableDelta
from deployments.bell import Bell
from deployments.fleet_slots import FleetSlots

COALESCE_S = 0.02
"""A table is published this long after a change, so that a burst of changes travels as one."""


class TableFeed:
    """Gathers what has changed when somebody asks, and not before.

    Args:
        registry: The desired adapters and aliases.
        members: The live replicas.
    """

    def __init__(self, registry: AdapterRegistry, members: Members) -> None:
        self._registry = registry
        self._members = members
        self._published = Bell()
        self._table = PublishedTable(uuid.uuid4().hex)
        # What is published may not be how things are.
        self._is_stale = True

    @property
    def router_id(self) -> str:
        """Changes when the router actor restarts."""
        return self._table.table.router_id

    def stir(self) -> None:
        """Note that something of the table may have changed."""
        self._is_stale = True
        self._published.ring()

    def table(self, slots: FleetSlots) -> FleetTable:
        """The fleet as it is now."""
        self._refresh(slots)
        return self._table.table

    async def watch(
        self, slots: FleetSlots, version: int, timeout_s: float, router_id: str
    ) -> FleetTable | list[TableDelta]:
        """See `AdapterRouter.watch`."""
        last = self._table.table
        known = version == last.version and router_id in ("", last.router_id)
        if known and not self._is_stale and await self._published.wait(timeout_s):
            await asyncio.sleep(COALESCE_S)
        self._refresh(slots)
        return self._table.since(version, router_id)

    def _refresh(self, slots: FleetSlots) -> None:
        """Publish what has changed since the last time."""
        if not self._is_stale:
            return
        self._is_stale = False
        served, names = self._registry.served, set(self._registry.changed)
        aliases, moved = self._registry.aliases, set(self._registry.aliases.changed)
        self._registry.changed.clear()
        aliases.changed.clear()
        self._members.names_changed(names)
        slots.forget([name for name in names if name not in served])
        self._table.update(
            self._registry.epoch,
            adapters={name: served[name].in_table() if name in served else None for name in names},
            replicas=self._members.take_changed(),
            copies=slots.take_changed_copies(),
            aliases={name: aliases.get(name) for name in moved},
        )
