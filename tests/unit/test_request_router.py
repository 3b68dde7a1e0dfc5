"""`AffinityRequestRouter` and the Ray Serve base class it mends, without a cluster.

Each `trap` is first shown on the unmended class: should Ray mend it, these tests say so.
"""

import asyncio
from typing import Any

import pytest
from ray.serve._private.request_router.request_router import RequestRouter

from cluster.fleet import ReplicaState
from cluster.placement import PlacementSettings, cap_on, hash_order
from deployments.fleet_view import FleetView
from deployments.generation import SlotSnapshot
from deployments.ray_internals import ExactRequestRouter, PendingRequest, RunningReplica
from deployments.request_router import AffinityRequestRouter
from lora_core.errors import InvalidRequest
from tests.unit.request_routing import (
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


class InOrder(RequestRouter):  # type: ignore[misc]
    """A policy as simple as can be, on Ray's own base class."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [[replica] for replica in candidate_replicas]


class Patient(InOrder):
    """Does not loop hot, so that other faults can be told from that one."""

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        pending_request.routing_context.should_backoff = True
        return await super().choose_replicas(candidate_replicas, pending_request)


class ExactInOrder(ExactRequestRouter):
    choose_replicas = InOrder.choose_replicas


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    return FakeSource.of_every_router(monkeypatch)


# The traps


@pytest.mark.parametrize(("kind", "num_answered"), [(Patient, 1), (ExactInOrder, 8), (AffinityRequestRouter, 8)])
async def test_trap_calls_that_share_a_request_are_all_answered(
    kind: type[RequestRouter], num_answered: int, source: FakeSource
) -> None:
    router = make(kind, [FakeReplica("r0"), FakeReplica("r1")])
    calls = [asyncio.create_task(route(router, request("a", internal_id="one"), 0.5)) for _ in range(8)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(result, str) for result in results) == num_answered


@pytest.mark.parametrize(("kind", "num_calls"), [(InOrder, range(100, 10**9)), (AffinityRequestRouter, range(1, 40))])
async def test_trap_waiting_for_full_replicas_is_not_a_hot_loop(
    kind: type[RequestRouter], num_calls: range, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, calls = make(kind, [FakeReplica("r0", queue_len=1, capacity=1)]), 0
    choose = router.choose_replicas

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return await choose(*args, **kwargs)

    monkeypatch.setattr(router, "choose_replicas", counted)
    with pytest.raises(asyncio.TimeoutError):
        await route(router, request("a"), 0.4)
    assert calls in num_calls


@pytest.mark.parametrize(("kind", "prompt"), [(InOrder, False), (ExactInOrder, True)])
async def test_trap_requests_for_a_full_replica_do_not_hold_up_the_others(
    kind: type[RequestRouter], prompt: bool
) -> None:
    class Pinned(kind):  # type: ignore[misc]
        async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            pending_request.routing_context.should_backoff = True
            wanted = pending_request.metadata.session_id
            return [[replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]]

    router = make(Pinned, [FakeReplica("full", queue_len=1, capacity=1), FakeReplica("free")])
    waiting = [asyncio.create_task(route(router, request(session="full"), 60)) for _ in range(10)]
    await asyncio.sleep(0.3)
    other = asyncio.create_task(route(router, request(session="free"), 60))
    await asyncio.wait([other], timeout=0.2)
    assert other.done() is prompt
    for task in [*waiting, other]:
        task.cancel()
    await asyncio.gather(*waiting, other, return_exceptions=True)


async def test_trap_requests_pinned_to_one_full_replica_do_not_hold_up_the_others(source: FakeSource) -> None:
    router = make(AffinityRequestRouter, [FakeReplica("full", queue_len=1, capacity=1), FakeReplica("free")])
    waiting = [asyncio.create_task(route(router, request(session="replica:full"), 60)) for _ in range(300)]
    await asyncio.sleep(0.3)
    assert await route(router, request(), 0.5) == "free"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_trap_a_policy_that_raises_leaves_the_caller_waiting(source: FakeSource) -> None:
    class Raising(InOrder):
        async def choose_replicas(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("in the policy")

    with pytest.raises(asyncio.TimeoutError):
        await route(make(Raising, [FakeReplica("r0")]), request(), 0.3)


@pytest.mark.parametrize("broken", ["entry", "claim", "release", "follow", "take_snapshot"])
async def test_trap_a_fault_in_our_own_policy_does_not(
    broken: str, source: FakeSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("in the policy")

    monkeypatch.setattr(FleetView, broken, fail)
    router = make(AffinityRequestRouter, [FakeReplica("r0"), FakeReplica("r1")])
    for _ in range(3):
        assert await route(router, request("a"), 1) in ("r0", "r1")
        router.take_snapshot(SlotSnapshot(replica_id="r0", sequence=2, resident=()))
        finish(router)
    assert "in the policy" in caplog.text


async def test_trap_settings_that_cannot_work_are_left_out(
    source: FakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    router = make(AffinityRequestRouter, [FakeReplica("r0")], load_cap=2, unknown=1, wait_ms="soon", load_ms=-3)
    assert await route(router, request("a")) == "r0"
    assert router._settings.load_cap == 2
    for key in ("unknown", "wait_ms", "load_ms"):
        assert key in caplog.text


@pytest.mark.parametrize(("kind", "num_kept"), [(InOrder, 50), (AffinityRequestRouter, 0)])
async def test_trap_answered_requests_are_forgotten(
    kind: type[RequestRouter], num_kept: int, source: FakeSource
) -> None:
    router = make(kind, [FakeReplica("r0")])
    await settle()
    for i in range(50):
        await route(router, request("a", internal_id=f"{i}"))
    # Ray keeps a request, with its arguments, in the index of its model, which only MultiplexMixin clears.
    assert sum(map(len, router._pending_requests_by_model_id.values())) == num_kept


# Routing


async def test_requests_follow_their_adapter(source: FakeSource) -> None:
    source.table = table_of(r0=holds("a"), r1=holds("b"), r2=holds())
    router = make(AffinityRequestRouter, [FakeReplica(f"r{i}") for i in range(3)])
    await settle()
    assert await route(router, request("a")) == "r0"
    assert await route(router, request("b")) == "r1"
    assert await route(router, request()) == "r2"


async def test_without_a_table_all_handles_agree_by_the_adapters_name(source: FakeSource) -> None:
    names = [f"r{i}" for i in range(5)]
    for adapter in ("a", "b", "c", "d"):
        expected = hash_order(adapter, names)[0]
        for order in (names, names[::-1]):
            router = make(AffinityRequestRouter, [FakeReplica(name) for name in order])
            assert await route(router, request(adapter)) == expected


async def test_base_requests_of_one_burst_are_spread(source: FakeSource) -> None:
    router = make(AffinityRequestRouter, [FakeReplica(f"r{i}") for i in range(4)])
    await settle()
    replicas = await asyncio.gather(*(route(router, request()) for _ in range(20)))
    assert {replicas.count(f"r{i}") for i in range(4)} == {5}


async def test_a_burst_for_a_cold_adapter_is_bounded_by_the_cap(source: FakeSource) -> None:
    router = make(AffinityRequestRouter, [FakeReplica(f"r{i}") for i in range(4)])
    await settle()
    replicas = await asyncio.gather(*(route(router, request("cold")) for _ in range(40)))
    assert max(replicas.count(f"r{i}") for i in range(4)) <= cap_on(40, 4, PlacementSettings())


async def test_a_second_new_adapter_goes_elsewhere_while_the_first_loads(source: FakeSource) -> None:
    source.table = table_of(r0=holds(num_slots=2), r1=holds(num_slots=2))
    # What an adapter's own home is worth is left aside.
    router = make(AffinityRequestRouter, [FakeReplica("r0"), FakeReplica("r1")], without=["stray"])
    await settle()
    first = await route(router, request("one"))
    router.on_request_completed(next(r.replica_id for r in router.curr_replicas.values()), "")
    assert await route(router, request("two")) != first
    assert await route(router, request("one")) == first, "further requests join the load under way"


async def test_a_full_replica_is_passed_over_although_it_holds_the_adapter(source: FakeSource) -> None:
    source.table = table_of(holder=holds("a"), other=holds())
    replicas = [FakeReplica("holder", queue_len=2, capacity=2), FakeReplica("other", queue_len=2, capacity=9)]
    router = make(AffinityRequestRouter, replicas)
    await asyncio.sleep(0.05)
    assert await route(router, request("a")) == "other"


async def test_a_request_waits_for_a_full_replica_rather_than_go_where_its_adapter_was_refused(
    source: FakeSource,
) -> None:
    refusing = ReplicaState(refused=frozenset("a"))
    source.table = table_of(holder=holds("a"), refusing=refusing)
    holder = FakeReplica("holder", queue_len=1, capacity=1)
    router = make(AffinityRequestRouter, [holder, FakeReplica("refusing")])
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(route(router, request("a"), 5))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    holder.queue_len = 0
    assert await waiting == "holder"
    assert await route(router, request()) == "refusing", "it serves everything else"


async def test_where_every_replica_refused_the_adapter_the_request_is_sent_all_the_same(source: FakeSource) -> None:
    source.table = table_of(r0=ReplicaState(refused=frozenset("a")))
    router = make(AffinityRequestRouter, [FakeReplica("r0")])
    await settle()
    assert await route(router, request("a")) == "r0"


async def test_one_exact_replica_can_be_asked_for(source: FakeSource) -> None:
    source.table = table_of(r0=holds("a"))
    router = make(AffinityRequestRouter, [FakeReplica(f"r{i}", queue_len=i) for i in range(3)])
    await settle()
    for name in ("r2", "r1"):
        assert await route(router, request(session=f"replica:{name}")) == name
    with pytest.raises(InvalidRequest, match="no replica 'gone' takes requests; those that do: r0, r1, r2"):
        await route(router, request(session="replica:gone"))
    assert await route(router, request("a")) == "r0", "the refused request blocks nobody"


async def test_a_cancelled_request_leaves_no_count_behind(source: FakeSource) -> None:
    replica = FakeReplica("r0", queue_len=1, capacity=1)
    router = make(AffinityRequestRouter, [replica])
    await asyncio.sleep(0.05)
    tasks = [asyncio.create_task(route(router, request("a"), 60)) for _ in range(5)]
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (router._pending_by_metadata, router._assigned_by_metadata) == ({}, {})
    assert router.num_in_flight(replica.replica_id) == 1, "what the replica said of itself"


async def test_requests_in_flight_are_counted_until_they_complete(source: FakeSource) -> None:
    replica = FakeReplica("r0")
    router = make(AffinityRequestRouter, [replica])
    await settle()
    for _ in range(3):
        await route(router, request())
    assert router.num_in_flight(replica.replica_id) == 3
    router.replica_queue_len_cache.invalidate_key(replica.replica_id)
    assert router.num_in_flight(replica.replica_id) == 3, "Serve's cache forgets after a while, the handle does not"
    router.on_request_completed(replica.replica_id, "any")
    assert router.num_in_flight(replica.replica_id) == 2


async def test_a_full_replica_is_probed_once_for_all_that_wait(source: FakeSource) -> None:
    replica = FakeReplica("r0", queue_len=1, capacity=1)
    router = make(AffinityRequestRouter, [replica])
    await asyncio.sleep(0.05)
    waiting = [asyncio.create_task(route(router, request(), 60)) for _ in range(200)]
    replica.probes = 0
    await asyncio.sleep(0.5)
    assert 1 <= replica.probes <= 30
    replica.queue_len, replica.max_ongoing_requests = 0, 1000
    assert set(await asyncio.wait_for(asyncio.gather(*waiting), 3)) == {"r0"}
