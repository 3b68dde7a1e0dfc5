"""The fleets that `make bench-affinity` compares: the same replicas, with other ways to choose among them."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.fleet import ROUTER_ACTOR, SlotWishes
from cluster.rendezvous import hash_order
from cluster.schema import parse_settings
from deployments.app import router_settings
from deployments.generation import GenerateCall, GenerateChunk, Refusal
from deployments.ray_internals import ExactRequestRouter, PendingRequest, RunningReplica
from deployments.replica import EngineReplica
from deployments.request_router import AffinityRequestRouter
from deployments.router import AdapterRouter
from deployments.router_client import RouterClient
from lora_core.workload import SlotCounts, Workload

OURS, POW2, MULTIPLEX, HRW = "ours", "pow2", "multiplex", "hrw"
ARMS = (OURS, POW2, MULTIPLEX, HRW)

WARM, COLD = "warm", "cold"
"""Text of a first chunk: whether the adapter was in a slot when the request came to the replica."""


class BenchReplica(EngineReplica):
    """A replica that says how it found each request's adapter."""

    engine_module = "tests.bench.affinity_engine"

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk | Refusal, None]:
        found = WARM if self._snapshot is not None and call.lora_name in self._snapshot.resident else COLD
        is_first = True
        await self.prepare(call)
        async for chunk in super().generate(call):
            if is_first and isinstance(chunk, GenerateChunk):
                chunk = msgspec.structs.replace(chunk, text=found)
                is_first = False
            yield chunk

    async def prepare(self, call: GenerateCall) -> None:
        """What an application of this kind does before it passes a request on."""

    async def slot_counts(self) -> SlotCounts:
        """What came of adapters and slots since the start."""
        assert self._client is not None
        return self._client.workload.slots


class NoWishes(RouterClient):
    """Leaves the slots to the requests that come."""

    async def report_work(self, replica_id: str, work: Workload) -> SlotWishes:
        return SlotWishes()

    async def wait_wishes(self, replica_id: str, version: int, timeout_s: float) -> SlotWishes:
        await asyncio.sleep(timeout_s if version == 0 else 0)
        return SlotWishes()


class PlainReplica(BenchReplica):
    """A replica of a fleet that nobody plans."""

    router_client = NoWishes


def multiplex_replica(num_slots: int) -> type[PlainReplica]:
    """A replica that loads adapters, and tells Ray which it has, as an application of `@serve.multiplexed` does.

    An adapter is loaded by a request of one token, within Ray's own wrapper: one at a time, least recently used out.
    """

    class MultiplexReplica(PlainReplica):
        async def prepare(self, call: GenerateCall) -> None:
            assert call.lora_name is not None
            await self.adapter(call.lora_name)

        @serve.multiplexed(max_num_models_per_replica=num_slots)  # type: ignore[untyped-decorator]
        async def adapter(self, name: str) -> str:
            load = GenerateCall(request_id=f"load {name}", lora_name=name, prompt_token_ids=[0], max_tokens=1)
            async for _ in EngineReplica.generate(self, load):
                pass
            return name

    return MultiplexReplica


class HashRouter(ExactRequestRouter):
    """Sends each adapter's requests to the replica that its hash prefers."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_id[name]] for name in hash_order(pending_request.metadata.multiplexed_model_id, by_id)]


def deploy(arm: str, settings: Mapping[str, Any], num_replicas: int) -> DeploymentHandle:
    """Deploy a fleet; returns when all its replicas take requests."""
    app = parse_settings(dict(settings))
    num_slots = app.lora_config.max_num_loras
    kinds = {OURS: BenchReplica, MULTIPLEX: multiplex_replica(num_slots)}
    routers = {OURS: AffinityRequestRouter, HRW: HashRouter}
    options: dict[str, Any] = {}
    if arm in routers:
        options["request_router_config"] = RequestRouterConfig(request_router_class=routers[arm])
    replica = serve.deployment(
        kinds.get(arm, PlainReplica),
        name="EngineReplica",
        num_replicas=num_replicas,
        max_ongoing_requests=256,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=2,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": 0.1},
        deployment_actors=[
            DeploymentActorConfig(
                name=ROUTER_ACTOR,
                actor_class=ray.remote(AdapterRouter),
                init_kwargs={"settings": {**router_settings(app), "journal": ":memory:"}},
                actor_options={"num_cpus": 0, "max_concurrency": 1000},
            )
        ],
        **options,
    )
    return serve.run(replica.bind(app.model_dump(mode="json")), name=arm, route_prefix=None)
