"""`RouterClient` outside Ray; within it, see `tests/serve/test_affinity.py`."""

import asyncio

import pytest
import ray

from cluster.board import Board
from cluster.placement import PlacementSettings
from deployments.fleet_view import FleetView
from deployments.load_notes import ReplicaKey
from deployments.router_client import RouterClient
from lora_core.errors import EngineDead


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
