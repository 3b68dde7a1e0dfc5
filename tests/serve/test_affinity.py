"""Routing by adapter on a real Ray Serve application: two replicas, their router actor, and handles.

The replicas stand in for engines, since the subject is where requests go; they follow the router actor with the
product's own `AdapterFollower`.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from cluster.fleet import ROUTER_ACTOR, FleetTable
from deployments.adapter_follower import AdapterFollower
from deployments.local_cluster import LocalCluster
from deployments.request_router import AffinityRequestRouter
from deployments.router import AdapterRouter
from deployments.router_client import RouterClient
from lora_core.errors import EngineDead
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus

NUM_SLOTS = 2


class SlotEngine:
    """A replica without a model: adapters are names, and slots a list with the last used at its end."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        self._id = serve.get_replica_context().replica_id.unique_id
        self._loaded: dict[str, int] = {}
        self._slots: list[str] = []
        self._sequence = 0
        self._follower = AdapterFollower(RouterClient(), self._apply, self._id, NUM_SLOTS)
        await self._follower.join()
        self._report()

    async def _apply(self, request: LoRARequest) -> LoRAResponse:
        if request.lora_name.startswith("slow"):
            await asyncio.sleep(1.0)
        if request.operation is LoRAOperation.UNLOAD:
            self._loaded.pop(request.lora_name, None)
            self._slots = [name for name in self._slots if name != request.lora_name]
        elif request.lora_path == "/bad":
            return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, "bad adapter")
        else:
            assert request.generation is not None
            self._loaded[request.lora_name] = request.generation
        self._report()
        return LoRAResponse(LoRAStatus.SUCCESS, "done")

    def _report(self) -> None:
        def refs(names: Any) -> list[AdapterRef]:
            return [AdapterRef(name, self._loaded[name]) for name in names]

        self._sequence += 1
        self._follower.report(Residency(self._sequence, refs(self._slots), refs(self._loaded), refs(self._loaded)))

    async def where(self) -> str:
        """Take a request, as an engine does: its adapter gets a slot. Returns this replica's id."""
        adapter = serve.get_multiplexed_model_id()
        if adapter:
            assert adapter in self._loaded, f"{adapter!r} is not loaded here"
            self._slots = [*[name for name in self._slots if name != adapter], adapter][-NUM_SLOTS:]
            self._report()
        return str(self._id)

    async def router_name(self) -> str:
        return self._follower.router_name

    async def holding(self) -> dict[str, int]:
        return self._loaded

    async def pid(self) -> int:
        return os.getpid()

    def record_replica_metadata(self) -> dict[str, Any]:
        return {ROUTER_ACTOR: self._follower.router_name, "replica_id": self._id}


class Fan:
    """Makes many calls to the engines inside one request, as an ingress does for several answers to one prompt."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine

    async def gather(self, adapter: str, num_calls: int) -> list[str]:
        handle = self._engine.options(multiplexed_model_id=adapter)
        return list(await asyncio.gather(*(handle.where.remote() for _ in range(num_calls))))


class Application:
    """The deployed application as the tests use it."""

    def __init__(self, engine: DeploymentHandle, fan: DeploymentHandle) -> None:
        self.engine, self.fan = engine, fan

    @property
    def router_name(self) -> str:
        return str(self.engine.router_name.remote().result(timeout_s=30))

    def where(self, adapter: str = "", session: str = "") -> str:
        """Send one request; returns the replica it went to."""
        handle = self.engine.options(multiplexed_model_id=adapter, session_id=session)
        return str(handle.where.remote().result(timeout_s=30))

    def load(self, name: str, path: str) -> None:
        outcome = self._ask(lambda router: router.load(name, path))
        assert outcome.status is LoRAStatus.SUCCESS, outcome

    def unload(self, name: str) -> None:
        assert self._ask(lambda router: router.unload(name)).status is LoRAStatus.SUCCESS

    def table(self) -> FleetTable:
        table: FleetTable = self._ask(lambda router: router.table())
        return table

    def _ask(self, question: Callable[[RouterClient], Any]) -> Any:
        async def locate() -> str:
            return str(await self.engine.router_name.remote())

        return asyncio.run(question(RouterClient(locate)))


def deploy() -> Application:
    """Deploy the application, anew each time: Serve gives unversioned code another version."""
    engine = serve.deployment(
        SlotEngine,
        num_replicas=2,
        max_ongoing_requests=64,
        health_check_period_s=1,
        graceful_shutdown_timeout_s=2,
        ray_actor_options={"num_cpus": 0.1},
        deployment_actors=[
            DeploymentActorConfig(
                name=ROUTER_ACTOR,
                actor_class=ray.remote(AdapterRouter),
                # Its journal is the one it has by default.
                init_kwargs={"settings": {"base_name": "base", "lease_s": 2.0}},
                actor_options={"num_cpus": 0},
            )
        ],
        request_router_config=RequestRouterConfig(request_router_class=AffinityRequestRouter),
    ).bind()
    fan = serve.deployment(Fan, ray_actor_options={"num_cpus": 0.1}).bind(engine)
    fan_handle = serve.run(fan, name="affinity", route_prefix=None)
    return Application(serve.get_deployment_handle("SlotEngine", "affinity"), fan_handle)


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    with LocalCluster(num_cpus=4, environment={"RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_PERIOD_S": "0.5"}) as cluster:
        # Workers import this module by name.
        root = str(Path(__file__).parents[2])
        ray.init(
            address=cluster.address,
            namespace="serve",
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": root}},
        )
        try:
            serve.start(proxy_location="Disabled")
            yield deploy()
            serve.shutdown()
        finally:
            ray.shutdown()


def eventually(condition: Callable[[], bool], timeout_s: float = 15) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.05)


def replicas(application: Application) -> list[str]:
    eventually(lambda: len(application.table().replicas) == 2)
    return sorted(application.table().replicas)


def test_a_load_is_on_both_replicas_when_it_is_answered(application: Application) -> None:
    application.load("everywhere", "/everywhere")
    for replica in replicas(application):
        assert application.where("everywhere", session=f"replica:{replica}") == replica
    application.unload("everywhere")


def test_requests_follow_the_adapter(application: Application) -> None:
    names = [f"follow-{i}" for i in range(4)]
    for name in names:
        application.load(name, f"/{name}")
    one, two = replicas(application)
    # Put each adapter where neither chance nor its hash need have put it.
    homes = dict(zip(names, (one, one, two, two), strict=True))
    for name, home in homes.items():
        assert application.where(name, session=f"replica:{home}") == home
    resident = {one: set(names[:2]), two: set(names[2:])}
    eventually(
        lambda: {replica: set(state.resident) for replica, state in application.table().replicas.items()} == resident
    )
    time.sleep(1.0)  # for the table to reach the handle
    for _ in range(5):
        assert {name: application.where(name) for name in names} == homes
    swapped = {name: two if home == one else one for name, home in homes.items()}
    for name, home in swapped.items():
        application.where(name, session=f"replica:{home}")
    resident = {one: set(names[2:]), two: set(names[:2])}
    eventually(
        lambda: {replica: set(state.resident) for replica, state in application.table().replicas.items()} == resident
    )
    time.sleep(1.0)  # for the table to reach the handle
    assert {name: application.where(name) for name in names} == swapped


def test_concurrent_calls_made_inside_one_request_all_return(application: Application) -> None:
    application.load("fan", "/fan")
    for adapter in ("fan", ""):
        ids = application.fan.gather.remote(adapter, 16).result(timeout_s=30)
        assert len(ids) == 16
        assert set(ids) <= set(replicas(application))


def test_a_replica_that_is_not_there_is_refused_and_nobody_waits(application: Application) -> None:
    with pytest.raises(EngineDead, match="is not running"):
        application.where(session="replica:nobody")
    assert application.where() in replicas(application)


def test_a_bad_adapter_is_nowhere(application: Application) -> None:
    with pytest.raises(AssertionError, match="bad adapter"):
        application.load("bad", "/bad")
    assert "bad" not in application.table().adapters


def test_routing_survives_the_router_actor_which_returns_with_its_journal(application: Application) -> None:
    application.load("kept", "/kept")
    application.load("dropped", "/dropped")
    home = application.where("kept")
    eventually(lambda: "kept" in application.table().replicas[home].resident)
    before = application.table()
    ray.kill(ray.get_actor(application.router_name, namespace="serve"), no_restart=True)
    for _ in range(20):
        assert application.where("kept") == home, "the last table stays in use"
        assert application.where() in before.replicas
    # Its successor is waited for, finds both adapters in its journal, and both replicas register with it.
    application.unload("dropped")
    eventually(lambda: set(application.table().replicas) == set(before.replicas))
    after = application.table()
    assert after.router_id != before.router_id
    assert after.adapters == {name: entry for name, entry in before.adapters.items() if name != "dropped"}
    eventually(lambda: "kept" in application.table().replicas[home].resident)
    assert "kept" in after.replicas[home].in_memory
    application.load("later", "/later")
    for replica in replicas(application):
        handle = application.engine.options(session_id=f"replica:{replica}")
        held = handle.holding.remote().result(timeout_s=30)
        assert held == {name: entry.generation for name, entry in application.table().adapters.items()}


def test_loads_and_unloads_under_way_survive_the_router_actor(application: Application) -> None:
    application.load("slow-unload", "/slow-unload")
    with ThreadPoolExecutor() as threads:
        load = threads.submit(application.load, "slow-load", "/slow-load")
        unload = threads.submit(application.unload, "slow-unload")
        eventually(lambda: "slow-unload" not in application.table().adapters)
        ray.kill(ray.get_actor(application.router_name, namespace="serve"), no_restart=True)
        unload.result(timeout=60)
        load.result(timeout=60)
    table = application.table()
    assert "slow-load" in table.adapters
    assert "slow-unload" not in table.adapters
    for replica in replicas(application):
        assert application.where("slow-load", session=f"replica:{replica}") == replica


def test_a_replacement_replica_holds_what_the_others_hold(application: Application) -> None:
    application.load("inherited", "/inherited")
    victim, survivor = replicas(application)
    pid = application.engine.options(session_id=f"replica:{victim}").pid.remote().result(timeout_s=30)
    os.kill(pid, 9)
    answers = [application.where("inherited") for _ in range(5)]
    assert set(answers) == {survivor}
    eventually(lambda: set(replicas(application)) >= {survivor} and victim not in replicas(application))
    (replacement,) = set(replicas(application)) - {survivor}

    def serves() -> bool:
        # The router actor knows the replica a moment before the handle does.
        with suppress(EngineDead):
            return application.where("inherited", session=f"replica:{replacement}") == replacement
        return False

    eventually(serves)


def test_a_redeployed_application_serves_what_was_loaded_before(application: Application) -> None:
    application.load("before", "/before")
    before, router_name = application.table(), application.router_name
    redeployed = deploy()
    eventually(lambda: redeployed.router_name != router_name)
    eventually(lambda: len(redeployed.table().replicas) == 2)
    after = redeployed.table()
    assert after.adapters == before.adapters
    assert set(after.replicas).isdisjoint(before.replicas)
    eventually(lambda: redeployed.where("before") in after.replicas)
