"""Routing by adapter on a real Ray Serve application: two replicas, their router actor, and handles.

The replicas stand in for engines, since the subject is where requests go; they follow the router actor with the
product's own `AdapterFollower`.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import ray
from ray import serve

from deployments.local_cluster import LocalCluster
from lora_core.errors import InvalidRequest
from tests.serve.slot_engine import eventually
from tests.serve.slot_fleet import SlotFleet, deploy


@pytest.fixture(scope="module")
def application() -> Iterator[SlotFleet]:
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


def replicas(application: SlotFleet) -> list[str]:
    return application.replicas(2)


def test_a_load_is_on_both_replicas_when_it_is_answered(application: SlotFleet) -> None:
    application.load("everywhere", "/everywhere")
    for replica in replicas(application):
        assert application.where("everywhere", session=f"replica:{replica}") == replica
    application.unload("everywhere")


def test_a_fleet_that_should_have_replicas_starts_none_on_demand(application: SlotFleet) -> None:
    assert not application.fan.starts_on_demand.remote().result(timeout_s=30)
    assert application.fan.router_name.remote().result(timeout_s=30) == application.router_name


def test_requests_follow_the_adapter(application: SlotFleet) -> None:
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


def test_concurrent_calls_made_inside_one_request_all_return(application: SlotFleet) -> None:
    application.load("fan", "/fan")
    for adapter in ("fan", ""):
        ids = application.fan.gather.remote(adapter, 16).result(timeout_s=30)
        assert len(ids) == 16
        assert set(ids) <= set(replicas(application))


def test_a_replica_that_is_not_there_is_refused_and_nobody_waits(application: SlotFleet) -> None:
    with pytest.raises(InvalidRequest, match="no replica 'nobody' takes requests") as refused:
        application.where(session="replica:nobody")
    assert all(replica in str(refused.value) for replica in replicas(application))
    assert application.where() in replicas(application)


def test_a_bad_adapter_is_nowhere(application: SlotFleet) -> None:
    with pytest.raises(AssertionError, match="bad adapter"):
        application.load("bad", "/bad")
    assert "bad" not in application.table().adapters


def test_routing_survives_the_router_actor_which_returns_with_its_journal(application: SlotFleet) -> None:
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


def test_loads_and_unloads_under_way_survive_the_router_actor(application: SlotFleet) -> None:
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


def test_a_replacement_replica_holds_what_the_others_hold(application: SlotFleet) -> None:
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
        with suppress(InvalidRequest):
            return application.where("inherited", session=f"replica:{replacement}") == replacement
        return False

    eventually(serves)


def test_a_redeployed_application_serves_what_was_loaded_before(application: SlotFleet) -> None:
    application.load("before", "/before")
    before, router_name = application.table(), application.router_name
    redeployed = deploy()
    eventually(lambda: redeployed.router_name != router_name)
    eventually(lambda: len(redeployed.table().replicas) == 2)
    after = redeployed.table()
    assert after.adapters == before.adapters
    assert set(after.replicas).isdisjoint(before.replicas)
    eventually(lambda: redeployed.where("before") in after.replicas)
