"""`RouterClient` outside Ray; within it, see `tests/serve/test_affinity.py`."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from cluster.board import Board
from cluster.fleet import FleetTable
from cluster.placement import PlacementSettings
from deployments import router_client
from deployments.fleet_view import FleetView
from deployments.load_notes import ReplicaKey
from deployments.router import AdapterRouter
from deployments.router_client import RouterClient
from lora_core.errors import EngineDead, LoRAFleetError, RequestTimeout
from lora_core.messages import Residency
from lora_core.types import LoRAStatus
from lora_core.workload import Workload
from tests.unit.router_fleet import Replica, fleet, make_router, settled


async def locate() -> str:
    return "a router actor"


@pytest.fixture(autouse=True)
def no_ray() -> None:
    assert not ray.is_initialized()


async def test_a_process_without_ray_is_told_so_and_none_is_started() -> None:
    # Ray's own calls would start a cluster here, as in a driver that has shut Ray down and still has a handle.
    for client in (RouterClient(locate), RouterClient()):
        with pytest.raises(EngineDead, match="not connected to Ray"):
            await asyncio.wait_for(client.table(), 1)
    assert not ray.is_initialized()


async def test_following_ends_when_the_process_is_not_in_ray() -> None:
    await asyncio.wait_for(RouterClient(locate).follow_table(lambda table: None), 1)
    view = FleetView(lambda name: RouterClient(locate), Board(PlacementSettings()))
    view.follow([ReplicaKey("a router actor", "r0")])
    (follower,) = view._followers.values()
    await asyncio.wait_for(follower, 1)
    assert not ray.is_initialized()


class Actor:
    """A router as a Ray actor's handle: what it raises arrives inside Ray's own exception."""

    def __init__(self, router: AdapterRouter) -> None:
        self.router = router

    def __getattr__(self, method: str) -> Any:
        return Method(getattr(self.router, method))


class Method:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def remote(self, *args: Any) -> Any:
        try:
            return await self._call(*args)
        except LoRAFleetError as error:
            raise RayTaskError("method", "its trace", error, pid=1, ip="127.0.0.1") from None


class Client(RouterClient):
    """Finds a router where it is told to look, and counts how often it looks."""

    def __init__(self, *routers: AdapterRouter, patience_s: float = 5) -> None:
        super().__init__(locate, patience_s)
        self.routers = list(routers)
        self.num_looks = 0

    async def _find(self) -> Any:
        if self._actor is None:
            self.num_looks += 1
            self._actor = Actor(self.routers.pop(0) if len(self.routers) > 1 else self.routers[0])
        return self._actor


@pytest.fixture
def in_ray(no_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


@pytest.mark.parametrize("change", ["load", "unload", "pin", "set_min_copies", "set_alias", "roll_back_alias"])
async def test_a_change_that_a_replaced_router_refuses_is_asked_of_its_successor(
    change: str, in_ray: None, tmp_path: Path
) -> None:
    settings = {"journal": str(tmp_path / "journal.sqlite"), "num_slots": 4}
    old = make_router(**settings)
    async with fleet(old, Replica(old, "r0"), Replica(old, "r3")):
        for name in ("a", "b"):
            await old.load(name, f"/{name}")
            await old.set_alias("x", {name: 1})
        new = make_router(**settings)
        async with fleet(new, Replica(new, "r1"), Replica(new, "r2")):
            # The old version's replicas still answer where the router is, once or twice.
            client = Client(old, old, new)
            args = {
                "load": ("c", "/c"),
                "set_min_copies": ("a", 2),
                "set_alias": ("y", {"a": 1}),
                "roll_back_alias": ("x",),
            }.get(change, ("a",))
            epoch = new._registry.epoch
            answer = await getattr(client, change)(*args)
            assert getattr(answer, "status", LoRAStatus.SUCCESS) is LoRAStatus.SUCCESS
            assert new._registry.epoch > epoch
            assert client.num_looks == 3


async def test_a_replaced_router_that_is_all_there_is_ends_the_patience(in_ray: None, tmp_path: Path) -> None:
    settings = {"journal": str(tmp_path / "journal.sqlite")}
    old = make_router(**settings)
    async with fleet(old, Replica(old, "r0")):
        new = make_router(**settings)
        with pytest.raises(RequestTimeout, match="RouterReplaced"):
            await Client(old, patience_s=0.2).load("a", "/a")
        await new.close()


async def test_a_router_whose_replicas_all_leave_is_left_for_another(in_ray: None) -> None:
    old, new = make_router(), make_router()
    async with fleet(old, Replica(old, "r0")), fleet(new, Replica(new, "r1")):
        for router, replica in ((old, "r0"), (new, "r1")):
            await router.report_residency(replica, Residency(1, [], [], []), 2)
        client = Client(old, new)
        table = await client.watch(None, 0)
        assert (set(table.replicas), client.num_looks) == ({"r0"}, 1)
        assert (await client.watch(table, 0)) is table
        assert client.num_looks == 1
        await old.report_work("r0", Workload(is_leaving=True))
        table = await client.watch(table, 1)
        assert table.num_joined == 0
        table = await client.watch(table, 1)
        assert (set(table.replicas), client.num_looks) == ({"r1"}, 2)


async def test_a_router_without_news_is_heard_of_all_the_same(in_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "POLL_S", 0.02)
    router, tables = make_router(), list[FleetTable]()
    async with fleet(router, Replica(router, "r0")):
        await router.report_residency("r0", Residency(1, [], [], []), 2)
        following = asyncio.create_task(Client(router).follow_table(tables.append))
        await settled(lambda: len(tables) > 5 and tables[-1] is tables[-3])
        before = tables[-1]
        await router.load("a", "/a")
        await settled(lambda: "a" in tables[-1].adapters)
        assert tables[-1].replicas["r0"].resident is before.replicas["r0"].resident
        following.cancel()
