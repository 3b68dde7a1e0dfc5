"""`OperatorView`: what the router actor tells operators, and shows in metrics."""

import asyncio
import logging
import time
from collections.abc import Iterable

from cluster.member import Member
from cluster.members import Members
from cluster.picture import FleetNow, FleetPicture, fleet_picture
from cluster.registry import AdapterRegistry
from cluster.slot_ages import SlotAges
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
        self._ages = SlotAges()
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

    def picture(self, router_id: str) -> FleetPicture:
        """What the live page shows of it."""
        registry, plan = self._registry, self._plan
        report = self.fleet(router_id)
        now = FleetNow(report, self._members.live, registry.entries, registry.served, plan.shares, self._ages)
        return fleet_picture(now, time.time())

    def note_slots(self, member: Member) -> None:
        """A replica has said what is in its slots."""
        self._ages.note(member.replica_id, member.resident)

    def drop(self, replica_ids: Iterable[str]) -> None:
        """These replicas are gone."""
        self._ages.drop(replica_ids)

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
