"""Every private Ray name this project uses, checked against Ray 2.60.0, which is pinned for their sake.

`ExactRequestRouter` mends faults of Ray Serve's `RequestRouter` that a custom policy would otherwise inherit;
`tests/unit/test_request_router.py` shows each of them on the unmended class.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.serve import context as serve_context
from ray.serve._private.common import DeploymentStatus, DeploymentStatusInfo, ReplicaID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_DEPLOYMENT_ACTOR_PREFIX
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.generated.serve_pb2 import DeploymentStatusInfo as DeploymentStatusProto
from ray.util import list_named_actors

from lora_core.errors import NoReplica

SERVE_NAMESPACE = "serve"
"""Where Serve names its actors (`ray.serve._private.constants.SERVE_NAMESPACE`)."""

PROBE_REUSED_S = 0.02
"""A replica asked for its queue length is not asked again within this time."""

RETRY_WITHOUT_REPLICA_S = 5.0
"""When a request that found no replica is worth sending again: one more may be starting."""

__all__ = [
    "SERVE_NAMESPACE",
    "ExactRequestRouter",
    "PendingRequest",
    "ReplicaID",
    "RunningReplica",
    "actor_name",
    "call_on_loop",
    "deployment_actors",
    "forget_cluster",
    "is_leaving",
    "request_router_of",
    "session_folder",
    "session_name",
    "starts_on_demand",
]


def actor_name() -> str:
    """Ray name of the actor this code runs in; empty outside a named actor."""
    if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return ""
    return ray.get_runtime_context().get_actor_name() or ""


def is_leaving() -> bool:
    """Whether Serve has begun to end the replica this code runs in, which gets no more requests; False outside one."""
    worker = ray._private.worker.global_worker
    replica = getattr(worker.actors.get(worker.actor_id), "_replica_impl", None)
    return bool(getattr(replica, "_shutting_down", False))


def session_name() -> str:
    """Name of the Ray cluster's session, another one each time a cluster starts; empty outside Ray."""
    return str(ray.get_runtime_context().get_session_name()) if ray.is_initialized() else ""


def session_folder() -> Path | None:
    """The Ray session's folder on this machine, which no other session has; None outside Ray."""
    # Set by `ray.init` and, in a worker, before anything of ours runs; None in a Ray Client.
    node = ray._private.worker._global_node
    return Path(node.get_session_dir_path()) if ray.is_initialized() and node is not None else None


def forget_cluster() -> None:
    """Leave the Ray cluster this process joined as a driver, if it did, and all that Serve remembers of it.

    Serve keeps its controller's handle past `ray.shutdown`, and takes it for that of the next cluster if the number of
    the driver's job is the same there.
    """
    ray.shutdown()
    serve_context._disconnect()


async def deployment_actors(handle: Any, name: str) -> list[str]:
    """Ray names of a deployment's actor of this name: one for each version of the deployment that is there."""
    prefix, suffix = f"{SERVE_DEPLOYMENT_ACTOR_PREFIX}{handle.app_name}::{handle.deployment_name}::", f"::{name}"
    # Ray asks its control store and waits for the answer: not on the event loop.
    actors = await asyncio.to_thread(list_named_actors, all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == SERVE_NAMESPACE]
    return [found for found in names if found.startswith(prefix) and found.endswith(suffix)]


async def starts_on_demand(handle: Any) -> bool:
    """Whether a deployment may be without any replica, and Serve starts one for the next request.

    Not where the last ones could not start, or ended.
    """
    controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    config = await controller.get_deployment_config.remote(handle.deployment_id)
    autoscaling = None if config is None else config.autoscaling_config
    if autoscaling is None or autoscaling.min_replicas > 0:
        return False
    told = await controller.get_deployment_status.remote(handle.deployment_name, handle.app_name)
    status = DeploymentStatusInfo.from_proto(DeploymentStatusProto.FromString(told)).status
    return status not in (DeploymentStatus.UNHEALTHY, DeploymentStatus.DEPLOY_FAILED)


def request_router_of(handle: Any) -> RequestRouter | None:
    """The request router that serves a handle in this process; None before its first call, or outside Serve."""
    router = getattr(getattr(handle, "_router", None), "_asyncio_router", None)
    # Not the property of that name, which would make one, on whatever loop this is.
    return None if router is None else router._request_router


def call_on_loop(router: RequestRouter, method: Callable[[Any], None], argument: Any) -> None:
    """Call a method of a request router on the event loop it runs on, whichever that is; does not wait for it."""
    router._event_loop.call_soon_threadsafe(method, argument)


class ExactRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """A `RequestRouter` that gives each request the replica that was chosen for it.

    - Pending requests are told apart by their metadata object. Ray tells them apart by `internal_request_id`, which
      all calls made inside one request share: but one of them would ever be answered. Ray's own indices are left
      empty: the one by multiplexed model id is only ever cleared by `MultiplexMixin`.
    - As many are routed at a time as may wait, not two per replica: requests that wait for one full replica do not
      hold up the others. A replica's queue length is then asked for once for all of them.
    - Requests on their way to a replica are counted (`num_in_flight`) from the moment they are assigned, so that a
      burst does not find every queue empty.
    - A request waits `replica_wait_s` for a replica where there is none; Ray's would wait for ever.
    """

    max_num_routing_tasks_cap = 1024

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replica_wait_s = math.inf
        self._pending_by_metadata: dict[int, PendingRequest] = {}
        self._assigned_by_metadata: dict[int, ReplicaID] = {}
        self._num_assigned: Counter[ReplicaID] = Counter()
        self._num_sent: Counter[ReplicaID] = Counter()
        # Models of the calls that a replica has; those made inside one request share its internal id.
        self._sent_models: dict[tuple[ReplicaID, str], list[str]] = {}
        self._probes: dict[ReplicaID, asyncio.Task[Any]] = {}

    @property
    def max_num_routing_tasks(self) -> int:
        return self.max_num_routing_tasks_cap

    def num_in_flight(self, replica_id: ReplicaID) -> int:
        """Requests a replica has: what it last said or this handle has sent, and what is about to be sent."""
        cached = self._replica_queue_len_cache.get(replica_id) or 0
        return int(max(cached, self._num_sent[replica_id]) + self._num_assigned[replica_id])

    # For subclasses, which must not raise

    def on_load(self, replica_id: ReplicaID) -> None:
        """Called when `num_in_flight` of a replica may have changed."""

    def on_replicas(self) -> None:
        """Called when `curr_replicas` has changed."""

    def on_assigned(self, replica_id: ReplicaID, model: str) -> None:
        """Called when a request has got its replica, before it is sent there."""

    def on_ended(self, replica_id: ReplicaID, model: str) -> None:
        """Called when a request that got this replica has ended there, or was not sent after all."""

    # What Ray calls

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._num_sent[replica_id] += 1
        self.on_load(replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._num_sent[replica_id] = max(0, self._num_sent[replica_id] - 1)
        self.on_load(replica_id)
        models = self._sent_models.get((replica_id, internal_request_id), [])
        if models:
            # Which of them it was is not told; those of one request are as a rule of one model.
            self.on_ended(replica_id, models.pop())
        if not models:
            self._sent_models.pop((replica_id, internal_request_id), None)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self.on_load(replica_id)

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        self.on_load(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._replicas_changed()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        present = {replica.replica_id for replica in replicas}
        for counts in (self._num_sent, self._num_assigned):
            for gone in [replica_id for replica_id in counts if replica_id not in present]:
                del counts[gone]
        for sent in [sent for sent in self._sent_models if sent[0] not in present]:
            del self._sent_models[sent]
        self._replicas_changed()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        metadata = pending_request.metadata
        key = id(metadata)
        self._pending_by_metadata[key] = pending_request
        self._expect_replica(pending_request)
        replica = None
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
            return replica
        finally:
            # The caller sends the request, and Ray counts it, before anything else runs on this loop.
            self._pending_by_metadata.pop(key, None)
            assigned = self._assigned_by_metadata.pop(key, None)
            if assigned is not None:
                self._num_assigned[assigned] = max(0, self._num_assigned[assigned] - 1)
                if replica is not None:
                    sent = (assigned, metadata.internal_request_id)
                    self._sent_models.setdefault(sent, []).append(metadata.multiplexed_model_id)
                else:
                    self.on_load(assigned)
                    self.on_ended(assigned, metadata.multiplexed_model_id)

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        pass

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        pass

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        pending = self._pending_by_metadata.get(id(request_metadata))
        if pending is None or pending.future.done():
            return
        self._cancel_routing_task_for_pending_request(pending)
        self._record_queue_wait_time(pending)
        pending.future.set_result(replica)
        self._assigned_by_metadata[id(request_metadata)] = replica.replica_id
        self._num_assigned[replica.replica_id] += 1
        self.on_load(replica.replica_id)
        self.on_assigned(replica.replica_id, pending.metadata.multiplexed_model_id)

    # Inside

    def _replicas_changed(self) -> None:
        self.on_replicas()
        for pending in self._pending_by_metadata.values():
            self._expect_replica(pending)

    def _expect_replica(self, pending: PendingRequest) -> None:
        """Where there is no replica, refuse the request in time if there is still none then."""
        if not self._replicas and not pending.future.done() and math.isfinite(self.replica_wait_s):
            self._event_loop.call_later(self.replica_wait_s, self._refuse_without_replica, pending)

    def _refuse_without_replica(self, pending: PendingRequest) -> None:
        if self._replicas or pending.future.done():
            return
        pending.future.set_exception(
            NoReplica(
                f"no replica is there to take the request, and none has come within {self.replica_wait_s:g} s "
                "(queue.replica_wait_s); send it again",
                RETRY_WITHOUT_REPLICA_S,
            )
        )
        # It waits for a replica, too, and would for ever.
        self._cancel_routing_task_for_pending_request(pending)

    async def _probe_queue_lens(
        self, replicas: list[RunningReplica], backoff_index: int
    ) -> list[tuple[RunningReplica, int | None]]:
        probes = [self._probe(replica, backoff_index) for replica in replicas]
        answers = await asyncio.gather(*(asyncio.shield(probe) for probe in probes))
        return [pair for answer in answers for pair in answer]

    def _probe(self, replica: RunningReplica, backoff_index: int) -> "asyncio.Task[Any]":
        probe = self._probes.get(replica.replica_id)
        if probe is None:
            probe = self._event_loop.create_task(self._ask_queue_len(replica, backoff_index))
            self._probes[replica.replica_id] = probe
            probe.add_done_callback(lambda _: self._event_loop.call_later(PROBE_REUSED_S, self._forget_probe, replica))
        return probe

    async def _ask_queue_len(self, replica: RunningReplica, backoff_index: int) -> list[tuple[Any, int | None]]:
        answer: list[tuple[Any, int | None]] = await super()._probe_queue_lens([replica], backoff_index)
        self.on_load(replica.replica_id)
        return answer

    def _forget_probe(self, replica: RunningReplica) -> None:
        self._probes.pop(replica.replica_id, None)
