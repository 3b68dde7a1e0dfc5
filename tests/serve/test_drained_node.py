"""A node that is told to go, as `cluster/kuberay` tells it, ends what it has while its replica starts elsewhere."""

import asyncio
import subprocess
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deployments.local_cluster import ray_command
from tests.serve import test_nodes
from tests.serve.slot_engine import TOKEN_S, eventually
from tests.serve.slot_fleet import deploy

DRAIN = ["drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "it goes"]
DEADLINE_S = 60

cluster = test_nodes.cluster


@pytest.fixture
def spare_node(cluster: Cluster) -> Iterator[Cluster]:
    """Serve, on one more node than it has replicas."""
    test_nodes.add_node(cluster)
    cluster.wait_for_nodes()
    serve.start(proxy_location="Disabled")
    yield cluster
    serve.shutdown()


def test_a_node_that_is_drained_ends_its_answers_first(spare_node: Cluster) -> None:
    fleet = deploy(ray_actor_options={"num_cpus": 0.1, "resources": test_nodes.ENGINE}, graceful_shutdown_timeout_s=60)
    fleet.load("kept")
    nodes = {fleet.ask("node_id", session=f"replica:{name}"): name for name in fleet.replicas(2)}
    node, leaving = next(iter(nodes.items()))
    num_tokens = round(6 / TOKEN_S)

    async def drain() -> list[tuple[str, int]]:
        asking = asyncio.create_task(test_nodes.answers(fleet, 12, num_tokens))
        await asyncio.sleep(2)
        address = ray.get_runtime_context().gcs_address
        options = ["--address", address, "--node-id", node, "--deadline-remaining-seconds", str(DEADLINE_S)]
        await asyncio.to_thread(subprocess.run, [ray_command("ray"), *DRAIN, *options], check=True)
        return await asking

    told = asyncio.run(drain())
    assert [count for _, count in told] == [num_tokens] * 12
    assert {replica for replica, _ in told} == set(nodes.values()), "each answered what it had begun"

    def has_moved() -> bool:
        serving = {name for name, row in fleet.table().replicas.items() if row.sequence >= 0}
        return leaving not in serving and len(serving) == 2

    eventually(has_moved, 60)
    there = {fleet.ask("node_id", session=f"replica:{name}") for name in fleet.replicas(2)}
    assert node not in there
