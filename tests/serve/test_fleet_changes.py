"""Replicas that come and go with the load, on real Ray Serve: none, one, two, and one again."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.exceptions import RayTaskError

from deployments.local_cluster import LocalCluster
from lora_core.errors import NoReplica
from tests.serve.slot_engine import TOKEN_S, eventually
from tests.serve.slot_fleet import APP, SlotFleet, deploy

# Ray compares it with a setting that the environment below has taken the place of.
pytestmark = pytest.mark.filterwarnings("ignore:.look_back_period_s:FutureWarning")

NUM_SLOTS = 4
NAMES = [f"adapter-{index}" for index in range(NUM_SLOTS)]
AUTOSCALING = {
    "min_replicas": 0,
    "initial_replicas": 0,
    "max_replicas": 2,
    "target_ongoing_requests": 4,
    "upscale_delay_s": 0.2,
    "downscale_delay_s": 5,
    "downscale_to_zero_delay_s": 60,
    "look_back_period_s": 2,
}
FAST = {
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[SlotFleet]:
    with LocalCluster(num_cpus=4, environment=FAST) as cluster:
        # Workers import this project by name.
        root = str(Path(__file__).parents[2])
        ray.init(
            address=cluster.address,
            namespace="serve",
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": root}},
        )
        try:
            serve.start(proxy_location="Disabled")
            yield deploy(
                start_s=4,
                num_slots=NUM_SLOTS,
                replica_wait_s=2,
                graceful_shutdown_timeout_s=60,
                autoscaling_config=AUTOSCALING,
            )
            serve.shutdown()
        finally:
            ray.shutdown()


def num_in_state(state: str) -> int:
    """Replicas that Serve has in a state."""
    return int(serve.status().applications[APP].deployments["SlotEngine"].replica_states.get(state, 0))


def leaving(fleet: SlotFleet) -> list[str]:
    """Replicas that have told that they get no more requests."""
    return [name for name, row in fleet.table().replicas.items() if row.is_leaving]


def test_a_request_without_any_replica_waits_and_makes_one_start(fleet: SlotFleet) -> None:
    assert fleet.fan.starts_on_demand.remote().result(timeout_s=30), "a fleet of none is healthy"
    router_name = fleet.fan.router_name.remote().result(timeout_s=30)
    assert ray.get(ray.get_actor(router_name, namespace="serve").num_joined.remote(), timeout=30) == 0
    with pytest.raises(NoReplica, match="within 2 s") as caught:
        fleet.where()
    assert caught.value.retry_after_s > 0

    def answered() -> bool:
        with contextlib.suppress(NoReplica, RayTaskError):
            fleet.fan.wake.remote().result(timeout_s=30)
            return bool(fleet.where())
        return False

    eventually(answered, 60)
    assert fleet.router_name == router_name


def test_a_replica_that_comes_has_its_share_in_slots_before_its_first_request(fleet: SlotFleet) -> None:
    for name in NAMES:
        fleet.load(name)
    (first,) = fleet.replicas(1)
    # Asked for, so that there is a share for whoever comes.
    assert {answer[0] for name in NAMES for answer in fleet.stream(name, 1).result()} == {first}
    load = fleet.stream("", round(20 / TOKEN_S), 12)
    new = next(name for name in fleet.replicas(2, 60) if name != first)
    eventually(lambda: any(answer[0] == new for name in NAMES for answer in fleet.stream(name, 1).result()), 60)
    warm = fleet.ask("at_first_request", session=f"replica:{new}")
    assert 0 < len(warm) <= NUM_SLOTS
    load.result(timeout_s=60)


def test_many_requests_for_one_cold_adapter_load_it_once_on_a_replica(fleet: SlotFleet) -> None:
    replicas = fleet.replicas(2)

    def num_loads(name: str) -> list[int]:
        return [fleet.ask("num_loads", session=f"replica:{replica}").get(name, 0) for replica in replicas]

    fleet.load("cold")
    answers = fleet.stream("cold", 1, 6).result(timeout_s=30)
    homes = {replica for replica, _ in answers}
    assert all(count <= 1 for count in num_loads("cold"))
    assert len(homes) == sum(num_loads("cold"))


def test_a_replica_that_goes_ends_its_streams_first(fleet: SlotFleet) -> None:
    # Enough for two replicas at first.
    crowd = fleet.stream("", round(5 / TOKEN_S), 12)
    eventually(lambda: num_in_state("RUNNING") == 2, 60)
    before = fleet.replicas(2)
    # Few enough for one, and long enough to outlast the decision that the other one can go.
    num_tokens = round(25 / TOKEN_S)
    streams = [fleet.fan.stream_on.remote(replica, num_tokens) for replica in before]
    assert len(crowd.result(timeout_s=60)) == 12
    eventually(lambda: num_in_state("STOPPING") == 1, 20)
    assert num_in_state("RUNNING") == 1
    # Long before its streams have ended it is no longer planned with.
    eventually(lambda: len(leaving(fleet)) == 1, 10)
    (gone,) = leaving(fleet)
    eventually(lambda: all(gone not in ids for ids in fleet.table().copies.values()), 10)
    assert num_in_state("STOPPING") == 1
    assert [stream.result(timeout_s=60) for stream in streams] == [(replica, num_tokens) for replica in before]
    (left,) = fleet.replicas(1, 60)
    assert left in before
    assert left != gone
    assert fleet.where() == left
