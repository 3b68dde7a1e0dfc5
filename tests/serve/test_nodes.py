"""A fleet over several nodes: one is lost with its replica, and another one takes its place."""

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.engine_handle import EngineHandle
from deployments.generation import GenerateCall
from deployments.ray_internals import forget_cluster
from lora_core.errors import EngineDead, InvalidRequest
from tests.serve.slot_engine import TOKEN_S, eventually
from tests.serve.slot_fleet import SlotFleet, deploy

ENGINE = {"engine": 1}
"""What a node with room for one replica has; the head has none."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes for replicas, all on this machine's loopback interface."""
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": 80_000_000})
    try:
        for _ in range(2):
            add_node(cluster)
        # Workers import this project by name.
        root = str(Path(__file__).parents[2])
        ray.init(
            address=cluster.address,
            namespace="serve",
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": root}},
        )
        cluster.wait_for_nodes()
        yield cluster
    finally:
        forget_cluster()
        cluster.shutdown()


def add_node(cluster: Cluster) -> None:
    cluster.add_node(num_cpus=1, resources=ENGINE, object_store_memory=80_000_000, node_ip_address="127.0.0.1")


async def answers(fleet: SlotFleet, num_calls: int, num_tokens: int) -> list[tuple[str, int]]:
    """Whole answers, as an ingress has them: for each the replica that gave it, and how many tokens came."""
    handle = EngineHandle(fleet.engine)

    async def one() -> tuple[str, int]:
        call = GenerateCall(request_id=uuid.uuid4().hex, lora_name="kept", max_tokens=num_tokens, prompt="hi")
        chunks = await handle.collect(call)
        return chunks[0].text, len(chunks)

    return list(await asyncio.gather(*(one() for _ in range(num_calls))))


def test_a_lost_node_costs_no_whole_answer_and_a_new_one_takes_its_place(cluster: Cluster) -> None:
    serve.start(proxy_location="Disabled")
    fleet = deploy(ray_actor_options={"num_cpus": 0.1, "resources": ENGINE})
    fleet.load("kept")
    nodes = {fleet.ask("node_id", session=f"replica:{name}"): name for name in fleet.replicas(2)}
    assert len(nodes) == 2, "one replica for each node"
    num_tokens = round(4 / TOKEN_S)

    async def lose_a_node() -> tuple[str, list[tuple[str, int]]]:
        asking = asyncio.create_task(answers(fleet, 12, num_tokens))
        await asyncio.sleep(2)
        victim = next(node for node in cluster.worker_nodes if node.node_id in nodes)
        await asyncio.to_thread(cluster.remove_node, victim, allow_graceful=False)
        return nodes[victim.node_id], await asking

    lost, told = asyncio.run(lose_a_node())
    assert [count for _, count in told] == [num_tokens] * 12
    (survivor,) = set(nodes.values()) - {lost}
    assert {replica for replica, _ in told} == {survivor}, "what the lost one had begun was begun anew"
    assert asyncio.run(answers(fleet, 4, 1)) == [(survivor, 1)] * 4
    add_node(cluster)
    wanted = {name: entry.generation for name, entry in fleet.table().adapters.items()}

    def is_replaced() -> bool:
        for name in set(fleet.table().replicas) - {survivor, lost}:
            # The router actor knows the new replica a moment before the handle does.
            with contextlib.suppress(EngineDead, InvalidRequest):
                return bool(fleet.ask("holding", session=f"replica:{name}") == wanted)
        return False

    eventually(is_replaced, 90)
    serve.shutdown()
