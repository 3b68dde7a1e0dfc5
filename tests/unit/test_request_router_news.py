"""What an `AffinityRequestRouter` hears and tells beyond the table, and requests that find no replica."""

import asyncio

import msgspec
import pytest

from cluster.fleet import FleetTable
from cluster.progress import BASE
from deployments.generation import SlotSnapshot
from deployments.load_notes import ReplicaKey
from deployments.ray_internals import ReplicaID
from deployments.request_router import AffinityRequestRouter
from lora_core.errors import NoReplica
from tests.unit.request_routing import (
    DEPLOYMENT,
    ROUTER,
    FakeReplica,
    FakeSource,
    finish,
    holds,
    make,
    request,
    route,
    settle,
    table_of,
)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    return FakeSource.of_every_router(monkeypatch)


# News


async def test_a_reply_tells_of_slots_before_the_table_does(source: FakeSource) -> None:
    source.table = table_of(r0=holds("a"), r1=holds("b"))
    router = make(AffinityRequestRouter, [FakeReplica("r0"), FakeReplica("r1")], without=["stray"])
    await settle()
    assert await route(router, request("a")) == "r0"
    finish(router)
    router.take_snapshot(SlotSnapshot(replica_id="r0", sequence=2, resident=("c",), num_slots_used=1))
    router.take_snapshot(SlotSnapshot(replica_id="r1", sequence=2, resident=("a",), num_slots_used=1))
    router.take_snapshot(SlotSnapshot(replica_id="gone", sequence=2, resident=("a",), num_slots_used=1))
    assert await route(router, request("a")) == "r1"
    assert await route(router, request("c")) == "r0"


async def test_the_router_actor_is_told_of_loads_and_not_of_what_is_in_a_slot(source: FakeSource) -> None:
    source.table = table_of(r0=holds("a"))
    router = make(AffinityRequestRouter, [FakeReplica("r0")])
    await settle()
    for adapter in ("a", "cold", "cold"):
        await route(router, request(adapter))
    await settle()
    assert source.loads == [{"r0": ["cold"]}]


async def test_a_request_in_front_of_full_replicas_has_its_load_begun(source: FakeSource) -> None:
    source.table = table_of(r0=holds("a"))
    router = make(AffinityRequestRouter, [FakeReplica("r0", queue_len=1, capacity=1)])
    await asyncio.sleep(0.05)
    waiting = [asyncio.create_task(route(router, request(adapter), 60)) for adapter in ("cold", "a", "")]
    await settle()
    assert source.loads == [{"r0": ["cold"]}]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_request_that_ends_takes_its_claim_with_it(source: FakeSource) -> None:
    source.table = table_of(r0=holds(num_slots=2), r1=holds(num_slots=2))
    router = make(AffinityRequestRouter, [FakeReplica("r0"), FakeReplica("r1")])
    await settle()
    first = await route(router, request("one"))
    home = router.fleet._replicas[ReplicaKey(ROUTER, first)]
    assert home.hints == {"one"}
    finish(router)
    assert home.hints == frozenset()


async def test_a_request_cancelled_between_its_choice_and_its_sending_takes_its_claim_with_it(
    source: FakeSource,
) -> None:
    router = make(AffinityRequestRouter, [FakeReplica("r0")])
    await settle()
    pending = request("a")
    choosing = asyncio.create_task(router._choose_replica_for_request(pending))
    # Its reader comes right after the choice, and before the sender.
    pending.future.add_done_callback(lambda _: choosing.cancel())
    await asyncio.gather(choosing, return_exceptions=True)
    assert choosing.cancelled()
    assert router.fleet._replicas[ReplicaKey(ROUTER, "r0")].hints == frozenset()
    assert router.num_in_flight(ReplicaID(unique_id="r0", deployment_id=DEPLOYMENT)) == 0


async def test_stalled_replicas_and_adapters_are_left_out_while_another_replica_is_there(source: FakeSource) -> None:
    stalled = msgspec.structs.replace(holds("a", "b"), is_stalled=True)
    stuck = msgspec.structs.replace(holds("a", "b"), stalled=frozenset(["a", BASE]))
    source.table = table_of(stalled=stalled, stuck=stuck, well=holds())
    router = make(AffinityRequestRouter, [FakeReplica(name) for name in ("stalled", "stuck", "well")])
    await settle()
    assert await route(router, request("a")) == "well"
    assert await route(router, request("")) == "well"
    assert await route(router, request("b")) == "stuck", "nothing is wrong with it there"
    router.update_replicas([FakeReplica("stalled")])
    assert await route(router, request("a")) == "stalled", "tried rather than lost"


async def test_requests_go_to_the_granted_copies_that_are_warm(source: FakeSource) -> None:
    source.table = FleetTable(
        version=1, epoch=1, adapters={}, copies={"hot": ("r0", "r1", "r2")},
        replicas={"r0": holds("hot"), "r1": holds("hot"), "r2": holds(), "r3": holds()},
    )  # fmt: skip
    router = make(AffinityRequestRouter, [FakeReplica(f"r{i}") for i in range(4)])
    await settle()
    homes = [await route(router, request("hot")) for _ in range(4)]
    assert sorted(homes) == ["r0", "r0", "r1", "r1"], "spread over the warm ones; the third one is not ready"


# Without replicas


async def test_a_request_waits_for_a_replica_and_no_longer_than_it_should(source: FakeSource) -> None:
    router = make(AffinityRequestRouter, [], replica_wait_s=0.2)
    with pytest.raises(NoReplica, match=r"within 0\.2 s \(queue\.replica_wait_s\)") as caught:
        await route(router, request("a"))
    assert caught.value.retry_after_s > 0
    waiting = [asyncio.create_task(route(router, request("a"))) for _ in range(3)]
    await asyncio.sleep(0.05)
    router.update_replicas([FakeReplica("r0")])
    assert await asyncio.gather(*waiting) == ["r0"] * 3
    await asyncio.sleep(0.3)
    assert await route(router, request("a")) == "r0", "what was refused before left nothing behind"


async def test_a_request_that_waits_when_the_last_replica_dies_is_refused_in_time_too(source: FakeSource) -> None:
    full = FakeReplica("r0", queue_len=1, capacity=1)
    router = make(AffinityRequestRouter, [full], replica_wait_s=0.2)
    await settle()
    waiting = asyncio.create_task(route(router, request("a"), 5))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    router.on_replica_actor_died(full.replica_id)
    with pytest.raises(NoReplica):
        await waiting
    assert router.curr_num_routing_tasks == 0


async def test_without_a_bound_it_waits_as_ray_does(source: FakeSource, caplog: pytest.LogCaptureFixture) -> None:
    router = make(AffinityRequestRouter, [], replica_wait_s="soon")
    assert "replica_wait_s='soon'" in caplog.text
    waiting = asyncio.create_task(route(router, request("a"), 5))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    router.update_replicas([FakeReplica("r0")])
    assert await waiting == "r0"
