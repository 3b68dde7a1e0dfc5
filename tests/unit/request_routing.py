"""A request router as a handle has it, without a cluster: replicas that answer probes, and a table from nowhere."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve._private.request_router.request_router import RequestRouter

from cluster.fleet import FleetTable, ReplicaState
from deployments.ray_internals import PendingRequest, ReplicaID
from deployments.router_client import RouterClient

DEPLOYMENT = DeploymentID(name="EngineReplica", app_name="test")
ROUTER = "the router actor"


class FakeReplica:
    """What a request router asks of a `RunningReplica`, which needs a live actor."""

    def __init__(self, name: str, *, queue_len: int = 0, capacity: int = 100) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.max_ongoing_requests = capacity
        self.queue_len = queue_len
        self.probes = 0
        self.multiplexed_model_ids: set[str] = set()
        self.replica_metadata = {"adapter_router": ROUTER, "replica_id": name}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.probes += 1
        await asyncio.sleep(0)
        return self.queue_len


class FakeSource:
    """Stands for the router actor: publishes one table and falls silent; keeps what it is told."""

    def __init__(self) -> None:
        self.table: FleetTable | None = None
        self.following = 0
        self.gone = asyncio.Event()
        self.loads: list[Mapping[str, Iterable[str]]] = []

    async def follow_table(self, callback: Callable[[FleetTable], None]) -> None:
        self.following += 1
        try:
            if self.table is not None:
                callback(self.table)
            await self.gone.wait()
        finally:
            self.following -= 1

    async def note_loads(self, loads: Mapping[str, Iterable[str]]) -> None:
        self.loads.append(loads)

    @classmethod
    def of_every_router(cls, monkeypatch: pytest.MonkeyPatch) -> "FakeSource":
        """The router actor of every `AffinityRequestRouter` made from now on in the test."""
        fake = cls()
        # Not the name in `deployments.request_router`: once Serve has unpickled the class, it no longer looks there.
        monkeypatch.setattr(RouterClient, "follow_table", lambda _, callback: fake.follow_table(callback))
        monkeypatch.setattr(RouterClient, "note_loads", lambda _, loads: fake.note_loads(loads))
        return fake


def make(kind: type[RequestRouter], replicas: Iterable[FakeReplica], **settings: Any) -> Any:
    router = kind(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(**settings)
    router.update_replicas(list(replicas))
    return router


def table_of(**states: ReplicaState) -> FleetTable:
    return FleetTable(version=1, epoch=1, adapters={}, replicas=states)


def holds(*adapters: str, num_slots: int = 4) -> ReplicaState:
    names = frozenset(adapters)
    return ReplicaState(resident=names, in_memory=names, num_slots=num_slots, num_slots_used=len(names), sequence=1)


def request(adapter: str = "", *, session: str = "", internal_id: str | None = None) -> PendingRequest:
    internal_id = internal_id or f"request-{time.monotonic_ns()}-{adapter}"
    metadata = RequestMetadata(
        request_id=internal_id,
        internal_request_id=internal_id,
        multiplexed_model_id=adapter,
        session_id=session,
    )
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


async def route(router: Any, pending: PendingRequest, timeout_s: float = 2) -> str:
    """Choose a replica as a handle does, and send the request there; returns the replica's name."""
    replica = await asyncio.wait_for(router._choose_replica_for_request(pending), timeout_s)
    router.on_send_request(replica.replica_id)
    name: str = replica.replica_id.unique_id
    return name


def finish(router: Any) -> None:
    """End every request that was sent."""
    for (replica_id, internal_id), models in list(router._sent_models.items()):
        for _ in list(models):
            router.on_request_completed(replica_id, internal_id)


async def settle() -> None:
    """Let first probes and followers run: a replica that is slow to say its queue length is passed over."""
    await asyncio.sleep(0.05)
