"""`AffinityRequestRouter`: sends each request to the replica best placed for its adapter.

Ray Serve makes one in every process that holds a handle, on an event loop it shares with all handles of the process,
and pickles this module by value: what must be one per process lives in the modules it imports.
"""

import dataclasses
import logging
from typing import Any

from cluster.fleet import ROUTER_ACTOR
from cluster.placement import PlacementSettings, ReplicaView, rank, terms
from deployments.fleet_view import FleetView, ReplicaKey
from deployments.ray_internals import ExactRequestRouter, PendingRequest, ReplicaID, RunningReplica
from deployments.router_client import RouterClient
from lora_core.errors import EngineDead

logger = logging.getLogger(__name__)

EXACT_REPLICA = "replica:"
"""A session id of this and a replica's unique id sends the request to that replica and no other."""


class AffinityRequestRouter(ExactRequestRouter):
    """Asks `cluster.placement.rank` for the order of the replicas.

    A request's adapter is its `multiplexed_model_id`; empty is the base model. What the replicas hold comes from the
    table that their router actor publishes, found by the name in their metadata; without it, or when the actor is
    gone, requests are routed all the same.

    Nothing here may raise or return no replica: Serve would log it, and leave the caller waiting for ever.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Take `request_router_kwargs`, the fields of `PlacementSettings`; wrong ones are logged and left out."""
        self._settings = placement_settings(settings)
        self._fleet = FleetView(lambda name: RouterClient(_locate(name)))
        self._keys: dict[ReplicaID, ReplicaKey] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        try:
            self._keys = {replica.replica_id: replica_key(replica) for replica in replicas}
            self._fleet.follow(self._keys.values())
        except Exception:
            logger.exception("cannot follow the fleet's table; requests are routed without news")

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Order the replicas for one request: ranks of one, then the full ones as one rank."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        # Serve's default is to try again at once, for ever, without yielding to anyone.
        pending_request.routing_context.should_backoff = True
        try:
            target = pending_request.metadata.session_id
            if target.startswith(EXACT_REPLICA):
                return self._exactly(target[len(EXACT_REPLICA) :], candidate_replicas, pending_request)
            return self._ordered(pending_request.metadata.multiplexed_model_id or None, candidate_replicas)
        except Exception:
            logger.exception("ordering the replicas failed; the request goes to any")
            return [candidate_replicas]

    def on_assigned(self, pending_request: PendingRequest, replica_id: ReplicaID) -> None:
        adapter, key = pending_request.metadata.multiplexed_model_id, self._keys.get(replica_id)
        try:
            if adapter and key is not None:
                self._fleet.hint(key, adapter)
        except Exception:
            logger.exception("noting a load failed; the next requests do not know of it")

    def _exactly(
        self, unique_id: str, replicas: list[RunningReplica], pending_request: PendingRequest
    ) -> list[list[RunningReplica]]:
        """That one replica; where it is gone the request fails, and the ranks returned are not used."""
        found = [replica for replica in replicas if replica.replica_id.unique_id == unique_id]
        if not found and not pending_request.future.done():
            pending_request.future.set_exception(EngineDead(f"replica {unique_id!r} is not running"))
        return [found or replicas]

    def _ordered(self, adapter: str | None, replicas: list[RunningReplica]) -> list[list[RunningReplica]]:
        views = [self._view(replica) for replica in replicas]
        order = rank(adapter, views, self._settings)
        if logger.isEnabledFor(logging.DEBUG):
            scores = {view.replica_id: terms(adapter, view, self._settings) for view in views}
            logger.debug("adapter %r: %s", adapter, [(replica_id, *scores[replica_id]) for replica_id in order])
        full = {view.replica_id for view in views if view.in_flight >= view.capacity}
        # A replica that cannot serve the adapter is no refuge from one that is merely full.
        refused = {view.replica_id for view in views if adapter in view.refused}
        if len(refused) < len(views):
            order = [replica_id for replica_id in order if replica_id not in refused]
        by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        # Serve keeps the order of ranks, and within a rank takes the shortest queue.
        ranks = [[by_id[replica_id]] for replica_id in order if replica_id not in full]
        last = [by_id[replica_id] for replica_id in order if replica_id in full]
        return [*ranks, last] if last else ranks

    def _view(self, replica: RunningReplica) -> ReplicaView:
        key = self._keys.get(replica.replica_id) or replica_key(replica)
        state = self._fleet.state(key)
        return ReplicaView(
            replica_id=replica.replica_id.unique_id,
            in_flight=self.num_in_flight(replica.replica_id),
            capacity=replica.max_ongoing_requests,
            resident=state.resident,
            in_memory=state.in_memory,
            refused=state.refused,
            loading=self._fleet.loading(key),
            num_slots=state.num_slots,
            num_slots_used=state.num_slots_used,
        )


def replica_key(replica: RunningReplica) -> ReplicaKey:
    """Where a replica's row is found, from the metadata it published when it became ready."""
    metadata = replica.replica_metadata
    return ReplicaKey(
        str(metadata.get(ROUTER_ACTOR) or ""), str(metadata.get("replica_id") or replica.replica_id.unique_id)
    )


def placement_settings(given: dict[str, Any]) -> PlacementSettings:
    """Settings from keyword arguments, without those that are unknown or cannot work."""
    settings = PlacementSettings()
    for name, value in given.items():
        settings = _with(settings, name, value)
    return settings


def _with(settings: PlacementSettings, name: str, value: Any) -> PlacementSettings:
    try:
        return dataclasses.replace(settings, **{name: value})
    except (TypeError, ValueError) as error:
        known = ", ".join(field.name for field in dataclasses.fields(PlacementSettings))
        logger.error("request_router_kwargs: %s=%r is left out: %s; known keys: %s", name, value, error, known)
        return settings


def _locate(name: str) -> Any:
    async def locate() -> str:
        return name

    return locate
