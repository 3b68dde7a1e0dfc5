"""From the work that replicas report to the slots that they are asked to fill and keep."""

import asyncio
import time
from typing import Any

import pytest

from cluster.copies import Plan, plan
from cluster.fleet import SlotWishes
from deployments import fleet_slots
from deployments.fleet_tables import replica_state
from deployments.router import AdapterRouter
from deployments.work_account import WorkAccount
from lora_core.errors import ReplicaUnknown
from lora_core.messages import Residency
from lora_core.types import AdapterRef
from lora_core.workload import AdapterWork, Workload
from tests.unit.router_fleet import Replica, fleet, make_router, settled


def work(**tokens: int) -> Workload:
    """What a replica did for each adapter; `base` is the base model."""
    adapters = [
        AdapterWork(name=None if name == "base" else name, num_tokens=number, num_started=1)
        for name, number in tokens.items()
    ]
    return Workload(seconds=1.0, adapters=adapters)


async def holds(router: AdapterRouter, replica: str, sequence: int, *names: str) -> None:
    served = (await router.table()).adapters
    refs = [AdapterRef(name, served[name].generation) for name in names]
    is_first = sequence == 1
    residency = Residency(sequence, refs, [] if is_first else None, refs if is_first else None)
    await router.report_residency(replica, residency, 2)


def two_replicas(**settings: float) -> tuple[AdapterRouter, list[Replica]]:
    router = make_router(num_slots=2, lease_s=5, plan_period_s=0.1, **settings)
    return router, [Replica(router, "r0"), Replica(router, "r1")]


async def test_a_hot_adapter_is_granted_slots_on_both_replicas_and_handles_are_told() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        for name in ("hot", "cold"):
            await router.load(name, f"/{name}")
        for replica in replicas:
            await router.report_work(replica.name, work(hot=9000, cold=100))
        await settled(lambda: len(router._slots.copies.get("hot", ())) == 2)
        assert (await router.table()).copies["hot"] == router._slots.copies["hot"]
        for replica in replicas:
            wishes = await router.wait_wishes(replica.name, -1, 0)
            assert "hot" in [*wishes.warm, *wishes.protected]
        assert router._slots.shares["hot"] == pytest.approx(0.989, abs=0.01)


async def test_a_replica_that_leaves_is_planned_with_no_more_while_it_ends_its_requests() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        for name in ("hot", "cold"):
            await router.load(name, f"/{name}")
        for replica in replicas:
            await holds(router, replica.name, 1, "hot")
            await router.report_work(replica.name, work(hot=9000, cold=100))
        await settled(lambda: len(router._slots.copies.get("hot", ())) == 2)
        assert await router.num_joined() == 2
        account = WorkAccount()
        account.set_leaving()
        account.add(work(hot=10))
        await router.report_work("r0", account.take())
        await settled(lambda: all("r0" not in ids for ids in router._slots.copies.values()))
        assert (await router.table()).replicas["r0"].is_leaving
        assert await router.num_joined() == 1
        report = (await router.fleet_status()).replicas
        assert (report["r0"].leaving, report["r1"].leaving) == (True, False)
        assert replica_state(report["r0"]) == "leaving"
        assert (await router.wait_wishes("r0", -1, 5)).warm == []
        account.begin()
        assert account.has_news, "it is told again to whichever router there is then"
        assert account.take().is_leaving


async def test_work_of_the_base_model_leaves_a_smaller_share_to_adapters() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        await router.load("a", "/a")
        await router.report_work("r0", work(a=100, base=900))
        await settled(lambda: router._slots.shares.get("a", 0) > 0)
        assert router._slots.shares == {"a": pytest.approx(0.1)}
        await router.unload("a")
        await settled(lambda: router._slots.shares == {})


async def test_a_new_replica_is_asked_to_warm_its_share_before_it_has_reported_anything() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas[:1]):
        for name in ("a", "b", "c"):
            await router.load(name, f"/{name}")
        await holds(router, "r0", 1, "a", "b")
        await router.report_work("r0", work(a=400, b=300, c=300))
        await settled(lambda: len(router._slots.shares) == 3)
        await replicas[1].start()
        wishes = await router.wait_wishes("r1", -1, 5)
        assert wishes.warm, "it takes over a part of the work"
        assert set(wishes.warm) <= {"a", "b", "c"}
        assert len(wishes.warm) <= 2
        await replicas[1].stop()


async def test_wishes_are_told_again_only_when_they_change() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        await router.load("a", "/a")
        first = await router.wait_wishes("r0", -1, 5)
        again = await router.wait_wishes("r0", first.version, 0.2)
        assert again == first
        waiting = asyncio.create_task(router.wait_wishes("r0", first.version, 5))
        await asyncio.sleep(0.05)
        await router.note_loads({"r0": ["a", "unknown"], "nobody": ["a"]})
        told = await asyncio.wait_for(waiting, 1)
        assert (told.warm, told.version > first.version) == (["a"], True)


async def test_a_load_that_a_handle_has_caused_counts_until_it_is_done_or_too_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_slots, "HINT_S", 0.2)
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        for name in ("a", "b"):
            await router.load(name, f"/{name}")
        await holds(router, "r0", 1)
        for _ in range(3):
            await router.note_loads({"r0": ["a", "b"]})
        assert (await router.table()).replicas["r0"].loading == {"a", "b"}
        await holds(router, "r0", 2, "a")
        state = (await router.table()).replicas["r0"]
        assert (state.resident, state.loading) == (frozenset("a"), frozenset("b"))
        for _ in range(3):
            await asyncio.sleep(0.1)
            await router.note_loads({"r0": ["b"]})
        assert (await router.table()).replicas["r0"].loading == {"b"}, "it goes on being said"
        version = (await router.table()).version
        await router.watch(version, 2)
        assert (await router.table()).replicas["r0"].loading == set()
        assert (await router.wait_wishes("r0", -1, 0)).warm == []


async def test_what_replicas_measure_is_published_when_it_has_changed_noticeably() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        measured = Workload(load_ms_per_mib={"host": 1.0, "disk": 9.0}, service_ms=10.0)
        await router.report_work("r0", measured)
        table = await router.table()
        state = table.replicas["r0"]
        assert (state.load_ms_per_mib, state.service_ms) == ({"host": 1.0, "disk": 9.0}, 10.0)
        await router.report_work("r0", Workload(load_ms_per_mib={"host": 1.1, "disk": 8.5}, service_ms=10.9))
        assert (await router.table()) is table, "as good as before"
        await router.report_work("r0", Workload(load_ms_per_mib={"host": 1.1, "disk": 4.0}, service_ms=10.9))
        assert (await router.table()).replicas["r0"].load_ms_per_mib["disk"] == 4.0


async def test_stalled_adapters_and_replicas_are_published_at_once() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        await router.load("a", "/a")
        await router.report_work("r0", Workload(stalled={"a": "no token for 60 s"}))
        state = (await router.table()).replicas["r0"]
        assert (state.stalled, state.is_stalled) == (frozenset("a"), False)
        await router.report_work("r0", Workload(fault="no token for 120 s"))
        state = (await router.table()).replicas["r0"]
        assert (state.stalled, state.is_stalled) == (frozenset(), True)
        await settled(lambda: router._slots._plan is not None and router._slots._plan.replica_ids == ("r1",))
        await router.report_work("r0", Workload())
        assert not (await router.table()).replicas["r0"].is_stalled


async def test_a_pinned_adapter_and_least_copies_need_no_work_to_be_granted() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        for name in ("pinned", "wished"):
            await router.load(name, f"/{name}")
        await router.pin("pinned")
        await settled(lambda: set(router._slots.copies.get("pinned", ())) == {"r0", "r1"})
        await router.unpin("pinned")
        await router.set_min_copies("wished", 2)
        await settled(lambda: set(router._slots.copies.get("wished", ())) == {"r0", "r1"})
        await router.set_min_copies("wished", 1)
        await settled(lambda: "pinned" not in router._slots.copies)


async def test_a_replica_that_is_unknown_is_told_to_register() -> None:
    router, replicas = two_replicas()
    async with fleet(router, *replicas):
        for call in (router.report_work("ghost", Workload()), router.wait_wishes("ghost", 0, 1)):
            with pytest.raises(ReplicaUnknown, match="ghost"):
                await call
        waiting = asyncio.create_task(router.wait_wishes("r1", (await router.wait_wishes("r1", -1, 0)).version, 30))
        await asyncio.sleep(0.05)
        await replicas[1].stop()
        with pytest.raises(ReplicaUnknown):
            await asyncio.wait_for(waiting, 10)


async def test_a_replica_without_slots_is_wished_nothing() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        assert await router.wait_wishes("r0", -1, 1) == SlotWishes(version=1)


async def test_where_planning_takes_long_there_are_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def plan_slowly(*arguments: Any, **settings: Any) -> Plan:
        plans.append(time.monotonic())
        time.sleep(0.05)
        return plan(*arguments, **settings)

    monkeypatch.setattr(fleet_slots, "plan", plan_slowly)
    router = make_router(num_slots=2, lease_s=5, plan_period_s=0.01)
    async with fleet(router, Replica(router, "r0")):
        await router.load("a", "/a")
        await settled(lambda: router._slots._plan is not None)
        await settled(lambda: not router._slots._is_wanted)
        before = len(plans)
        await asyncio.sleep(0.4)
        assert len(plans) - before <= 2
        router._slots.start()
        await settled(lambda: len(plans) > before)
