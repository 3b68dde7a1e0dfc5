"""`AffinityRequestRouter`: sends each request to the replica best placed for its adapter.

Ray Serve makes one in every process that holds a handle, on an event loop it shares with all handles of the process,
and pickles this module by value: what must be one per process lives in the modules it imports.
"""

import dataclasses
import logging
import math
import time
from typing import Any

from cluster.board import Board, Order
from cluster.fleet import ROUTER_ACTOR
from cluster.names import listed
from cluster.placement import PlacementSettings
from deployments.fleet_view import FleetView
from deployments.generation import SlotSnapshot
from deployments.load_notes import ReplicaKey
from deployments.ray_internals import ExactRequestRouter, PendingRequest, ReplicaID, RunningReplica
from deployments.router_client import RouterClient
from deployments.routing_metrics import RoutingMetrics
from lora_core.errors import InvalidRequest

logger = logging.getLogger(__name__)

EXACT_REPLICA = "replica:"
"""A session id of this and a replica's unique id sends the request to that replica and no other."""

SHOWN_ID = 64
"""Characters of an unknown replica's id that an answer repeats."""

RECOUNT_S = 1.0
"""Requests in flight are counted anew on every replica this often: what a replica once said of itself grows old. So
does what it said of other handles' requests."""


class AffinityRequestRouter(ExactRequestRouter):
    """Asks a `cluster.board.Board` for the order of the replicas.

    A request's adapter is its `multiplexed_model_id`; empty is the base model. What the replicas hold comes from the
    table that their router actor publishes, found by the name in their metadata, and from their replies; without a
    table, or when the actor is gone, requests are routed all the same.

    Nothing here may raise or return no replica: Serve would log it, and leave the caller waiting for ever.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Take `request_router_kwargs`: the fields of `PlacementSettings`, and `replica_wait_s`, the seconds that a
        request waits where there is no replica. Wrong ones are logged and left out."""
        self.replica_wait_s = _seconds(settings.pop("replica_wait_s", math.inf))
        self._settings = placement_settings(settings)
        self._board = Board(self._settings)
        self._fleet = FleetView(lambda name: RouterClient(_locate(name)), self._board)
        self._keys: dict[ReplicaID, ReplicaKey] = {}
        self._by_id: dict[str, RunningReplica] = {}
        self._metrics = RoutingMetrics()
        self._recounted_at = 0.0

    def on_replicas(self) -> None:
        try:
            replicas = list(self.curr_replicas.values())
            self._keys = {replica.replica_id: replica_key(replica) for replica in replicas}
            self._by_id = {self._keys[replica.replica_id].replica_id: replica for replica in replicas}
            self._board.set_replicas({name: replica.max_ongoing_requests for name, replica in self._by_id.items()})
            self._fleet.follow(self._keys.values())
            self._recount()
        except Exception:
            logger.exception("cannot follow the fleet's table; requests are routed without news")

    def take_snapshot(self, snapshot: SlotSnapshot) -> None:
        """Take what a reply says of its replica's slots."""
        try:
            self._fleet.take_snapshot(snapshot)
        except Exception:
            logger.exception("news of slots were not understood; they will come with the table")

    @property
    def fleet(self) -> FleetView:
        """What this handle knows of the replicas."""
        return self._fleet

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
            began = time.perf_counter()
            ranks = self._ranks(pending_request.metadata.multiplexed_model_id or None)
            self._metrics.observe_decision(time.perf_counter() - began)
            return ranks or [candidate_replicas]
        except Exception:
            logger.exception("ordering the replicas failed; the request goes to any")
            return [candidate_replicas]

    def on_load(self, replica_id: ReplicaID) -> None:
        key = self._keys.get(replica_id)
        if key is not None:
            self._board.set_in_flight(key.replica_id, self.num_in_flight(replica_id))

    def on_assigned(self, replica_id: ReplicaID, model: str) -> None:
        self._noting(self._fleet.claim, replica_id, model)

    def on_ended(self, replica_id: ReplicaID, model: str) -> None:
        self._noting(self._fleet.release, replica_id, model)

    def _noting(self, note: Any, replica_id: ReplicaID, model: str) -> None:
        key = self._keys.get(replica_id)
        try:
            if model and key is not None:
                note(key, model)
        except Exception:
            logger.exception("noting a load failed; the next requests do not know of it")

    def _exactly(
        self, unique_id: str, replicas: list[RunningReplica], pending_request: PendingRequest
    ) -> list[list[RunningReplica]]:
        """That one replica; where it is gone the request fails, and the ranks returned are not used."""
        found = [replica for replica in replicas if replica.replica_id.unique_id == unique_id]
        if not found and not pending_request.future.done():
            running = listed(replica.replica_id.unique_id for replica in replicas)
            pending_request.future.set_exception(
                InvalidRequest(f"no replica {unique_id[:SHOWN_ID]!r} takes requests; those that do: {running}")
            )
        return [found or replicas]

    def _ranks(self, adapter: str | None) -> list[list[RunningReplica]]:
        if time.monotonic() - self._recounted_at > RECOUNT_S:
            self._recount()
        mib = self._mib(adapter)
        order = self._board.order(adapter, mib=mib)
        if logger.isEnabledFor(logging.DEBUG):
            self._explain(adapter, mib, order)
        by_id = self._by_id
        # Serve keeps the order of ranks, and within a rank takes the shortest queue.
        ranks = [[by_id[replica_id]] for replica_id in order.open if replica_id in by_id]
        full = [by_id[replica_id] for replica_id in order.full if replica_id in by_id]
        if full and not ranks and adapter is not None:
            self._fleet.wait_for_load(self._keys[full[0].replica_id], adapter)
        return [*ranks, full] if full else ranks

    def _mib(self, adapter: str | None) -> float:
        """What the adapter takes in a slot; 0 where that is not known."""
        entry = None if adapter is None else self._fleet.entry(adapter)
        return 0.0 if entry is None else entry.slot_bytes / 2**20

    def _explain(self, adapter: str | None, mib: float, order: Order) -> None:
        scores = [(replica_id, *self._board.terms(adapter, replica_id, mib=mib)) for replica_id in order.open]
        logger.debug("adapter %r: %s, full: %s", adapter, scores, order.full)

    def _recount(self) -> None:
        self._recounted_at = time.monotonic()
        for replica_id in self._keys:
            self.on_load(replica_id)
        self._fleet.take_stock()
        age_s = self._fleet.table_age_s
        if age_s is not None:
            self._metrics.set_table_age(age_s)


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


def _seconds(value: Any) -> float:
    if isinstance(value, (int, float)) and value > 0:
        return float(value)
    logger.error("request_router_kwargs: replica_wait_s=%r is left out: expected a number of seconds above 0", value)
    return math.inf


def _locate(name: str) -> Any:
    async def locate() -> str:
        return name

    return locate
