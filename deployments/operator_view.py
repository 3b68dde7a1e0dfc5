"""`OperatorView`: what the router actor tells operators, and shows in metrics."""

import asyncio
import logging

from cluster.members import Members
from cluster.registry import AdapterRegistry
from cluster.status import AdapterReport, FleetReport, Page, Plan, adapter_report, fleet_report, page
from deployments.fleet_operations import FleetOperations
from deployments.fleet_slots import FleetSlots
from deployments.ray_internals import actor_name
from deployments.router_metrics import RouterMetrics

logger = logging.getLogger(__name__)

METRICS_PERIOD_S = 5.0


class OperatorView:
    """Reads what the router actor keeps, and changes nothing of it.

    Args:
        registry: The desired adapters.
        members: The live replicas.
        slots: What has been planned of their slots.
        operations: How the last changes ended.
    """

    def __init__(
        self, registry: AdapterRegistry, members: Members, slots: FleetSlots, operations: FleetOperations
    ) -> None:
        self._registry = registry
        self._members = members
        self._slots = slots
        self._operations = operations
        self._showing: asyncio.Task[None] | None = None

    def fleet(self, router_id: str) -> FleetReport:
        """The fleet as a whole."""
        return fleet_report(
            router_id,
            self._registry.epoch,
            self._registry.entries,
            self._members.live,
            self._plan,
            self._operations.last_errors,
        )

    def adapters(self, after: str, limit: int) -> Page:
        """The first `limit` desired adapters whose names come after `after`."""
        entries, failures = self._registry.entries, self._operations.last_errors
        return page(entries, self._members.live, self._plan, failures, after=after, limit=limit)

    def adapter(self, name: str) -> AdapterReport | None:
        """One desired adapter; None where there is none of this name."""
        entry, failure = self._registry.entries.get(name), self._operations.last_errors.get(name)
        if entry is None:
            return None
        return adapter_report(entry, self._registry.entries, self._members.live, self._plan, failure)

    def start(self, router_id: str) -> None:
        """Show metrics from now on, in the running event loop; outside a Ray actor there is nowhere to."""
        if self._showing is None and actor_name():
            self._showing = asyncio.get_running_loop().create_task(self._show(router_id), name="show-metrics")

    def close(self) -> None:
        """Show nothing any more."""
        if self._showing is not None:
            self._showing.cancel()

    @property
    def _plan(self) -> Plan:
        return Plan(self._slots.copies, self._slots.shares)

    async def _show(self, router_id: str) -> None:
        metrics = RouterMetrics()
        while True:
            try:
                metrics.take(self.fleet(router_id))
            except Exception:
                logger.exception("metrics were not shown")
            await asyncio.sleep(METRICS_PERIOD_S)
