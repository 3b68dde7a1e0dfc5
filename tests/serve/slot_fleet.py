"""An application of `SlotEngine`s, as tests deploy and use it."""

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.fleet import ROUTER_ACTOR, FleetTable
from deployments.request_router import AffinityRequestRouter
from deployments.router import AdapterRouter
from deployments.router_client import RouterClient
from lora_core.types import LoRAStatus
from tests.serve.slot_engine import Fan, SlotEngine, eventually

APP = "slots"


class SlotFleet:
    """The deployed application."""

    def __init__(self, engine: DeploymentHandle, fan: DeploymentHandle) -> None:
        self.engine, self.fan = engine, fan

    @property
    def router_name(self) -> str:
        return str(self.engine.router_name.remote().result(timeout_s=30))

    def where(self, adapter: str = "", session: str = "") -> str:
        """Send one request; returns the replica it went to."""
        return str(self.ask("where", adapter, session))

    def ask(self, method: str, adapter: str = "", session: str = "") -> Any:
        """Call a method of a replica."""
        handle = self.engine.options(multiplexed_model_id=adapter, session_id=session)
        return getattr(handle, method).remote().result(timeout_s=30)

    def stream(self, adapter: str, num_tokens: int, num_calls: int = 1) -> Any:
        """Begin streams; their `result` is a pair of each: the replica that answered it, and its number of tokens."""
        return self.fan.stream.remote(adapter, num_tokens, num_calls)

    def load(self, name: str, path: str = "") -> None:
        outcome = self.ask_router(lambda router: router.load(name, path or f"/{name}"))
        assert outcome.status is LoRAStatus.SUCCESS, outcome

    def unload(self, name: str) -> None:
        assert self.ask_router(lambda router: router.unload(name)).status is LoRAStatus.SUCCESS

    def table(self) -> FleetTable:
        table: FleetTable = self.ask_router(lambda router: router.table())
        return table

    def replicas(self, count: int, timeout_s: float = 15) -> list[str]:
        """Ids of the replicas that have joined, once they are so many."""

        def joined() -> list[str]:
            return sorted(name for name, row in self.table().replicas.items() if row.sequence >= 0)

        eventually(lambda: len(joined()) == count, timeout_s)
        return joined()

    def ask_router(self, question: Callable[[RouterClient], Any]) -> Any:
        async def locate() -> str:
            return str(await self.engine.router_name.remote())

        return asyncio.run(question(RouterClient(locate)))


def deploy(start_s: float = 0.0, num_slots: int = 2, replica_wait_s: float = 60.0, **options: Any) -> SlotFleet:
    """Deploy the application, anew each time: Serve gives unversioned code another version.

    Args:
        start_s: How long a replica takes to start.
        num_slots: Of each replica.
        replica_wait_s: How long a request waits where there is no replica.
        options: Of the engine deployment, beside or instead of two replicas.
    """
    if "autoscaling_config" not in options:
        options.setdefault("num_replicas", 2)
    engine: Any = serve.deployment(
        SlotEngine,
        max_ongoing_requests=64,
        health_check_period_s=1,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options=options.pop("ray_actor_options", {"num_cpus": 0.1}),
        graceful_shutdown_timeout_s=options.pop("graceful_shutdown_timeout_s", 2),
        deployment_actors=[
            DeploymentActorConfig(
                name=ROUTER_ACTOR,
                actor_class=ray.remote(AdapterRouter),
                # Its journal is the one it has by default.
                init_kwargs={"settings": {"base_name": "base", "lease_s": 2.0, "num_slots": num_slots}},
                actor_options={"num_cpus": 0},
            )
        ],
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRequestRouter,
            # Requests follow their adapters wherever tests put them, and not only where they belong.
            request_router_kwargs={"replica_wait_s": replica_wait_s, "without": ["stray"]},
        ),
        **options,
    )
    fan: Any = serve.deployment(Fan, ray_actor_options={"num_cpus": 0.1})
    fan_handle = serve.run(fan.bind(engine.bind(start_s, num_slots)), name=APP, route_prefix=None)
    return SlotFleet(serve.get_deployment_handle("SlotEngine", APP), fan_handle)
