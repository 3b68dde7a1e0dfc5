"""`ReplicaReports`: what one replica tells the router actor of itself, beside how changes ended."""

import asyncio

from cluster.fleet import SlotWishes
from deployments.router_calls import Router
from deployments.work_account import WorkAccount
from lora_core.errors import ReplicaUnknown
from lora_core.messages import Residency
from lora_core.workload import Workload


class ReplicaReports:
    """Where this replica's adapters are, told at once, and what work it has, told at a low rate.

    `tell_residency` and `tell_work` make one attempt each, which ends when something has been told. What could not be
    told is told by the next one.

    Args:
        router: The router actor.
        replica_id: Serve's unique id of this replica.
        num_slots: Adapter slots of its engine.
    """

    def __init__(self, router: Router, replica_id: str, num_slots: int) -> None:
        self._router = router
        self._replica_id = replica_id
        self._num_slots = num_slots
        self._residency: Residency | None = None
        self._residency_changed = asyncio.Event()
        # What the router actor knows, and in which registration of this replica it was told.
        self._known: Residency | None = None
        self._registration = 0
        self._work = WorkAccount()
        self._is_urgent = asyncio.Event()

    @property
    def residency(self) -> Residency | None:
        """What was last to be told."""
        return self._residency

    def begin(self) -> None:
        """Begin anew, with a router actor that knows nothing yet of what this replica holds."""
        self._registration += 1
        self._known = None
        self._residency_changed.set()
        self._work.begin()

    def set_residency(self, residency: Residency) -> None:
        """Have it told what the engine holds, in full and by the fleet's generations; only the newest matters."""
        self._residency = residency
        self._residency_changed.set()

    def add_work(self, work: Workload) -> None:
        """Have it told what the engine has done, and has to do."""
        self._work.add(work)

    def set_stalled(self, stalled: dict[str, str], fault: str) -> None:
        """Have it told, at once where it is news, what makes no progress: see `Workload.stalled`."""
        if self._work.set_stalled(stalled, fault):
            self._is_urgent.set()

    def set_leaving(self) -> None:
        """Have it told at once that this replica gets no more requests: see `Workload.is_leaving`."""
        self._work.set_leaving()
        self._is_urgent.set()

    async def tell_residency(self) -> None:
        """Wait for a change, and tell it."""
        await self._residency_changed.wait()
        self._residency_changed.clear()
        residency, registration = self._residency, self._registration
        if residency is None:
            return
        try:
            await self._router.report_residency(self._replica_id, residency.without(self._known), self._num_slots)
        except ReplicaUnknown:
            # Told again as soon as this replica is known again.
            return
        except BaseException:
            # Whether it was told is not known, nor therefore what the next report may leave out.
            self._known = None
            self._residency_changed.set()
            raise
        if registration == self._registration:
            self._known = residency

    async def tell_work(self, period_s: float) -> SlotWishes | None:
        """Wait for so long, less where it is urgent, and tell what there is; what is wished of the slots in return."""
        urgent = asyncio.ensure_future(self._is_urgent.wait())
        try:
            await asyncio.wait([urgent], timeout=period_s)
        finally:
            urgent.cancel()
        self._is_urgent.clear()
        if not self._work.has_news:
            return None
        work = self._work.take()
        try:
            return await self._router.report_work(self._replica_id, work)
        except ReplicaUnknown:
            self._work.put_back(work)
            return None
        except BaseException:
            self._work.put_back(work)
            raise
