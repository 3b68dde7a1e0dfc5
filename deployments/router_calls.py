"""What a replica asks of the router actor."""

from collections.abc import Collection, Mapping
from typing import Protocol

from cluster.changes import Change
from cluster.fleet import Outcome, Registration, SlotWishes
from lora_core.messages import Residency
from lora_core.workload import Workload


class Router(Protocol):
    """The router actor to a replica; `deployments.router_client.RouterClient` is one.

    All but `register` raise ReplicaUnknown when the replica has to register again.
    """

    async def register(
        self, replica_id: str, holding: Mapping[str, int] | None = None, pinned: Collection[str] = ()
    ) -> Registration: ...

    async def wait_changes(self, replica_id: str, since_epoch: int, timeout_s: float) -> list[Change]: ...

    async def acknowledge(self, replica_id: str, outcomes: list[Outcome]) -> list[Change]: ...

    async def report_residency(self, replica_id: str, residency: Residency, num_slots: int) -> None: ...

    async def report_work(self, replica_id: str, work: Workload) -> SlotWishes: ...

    async def wait_wishes(self, replica_id: str, version: int, timeout_s: float) -> SlotWishes: ...
