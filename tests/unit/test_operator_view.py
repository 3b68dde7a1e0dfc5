"""What the router actor tells operators, over a fleet whose replicas load, refuse, lag and vanish."""

import asyncio
from collections.abc import Callable

import msgspec

from cluster.status import AdapterReport
from deployments.router import AdapterRouter
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAStatus
from lora_core.workload import AdapterWork, Workload
from tests.unit.router_fleet import Replica, fleet, make_router, refuse_all


def words(report: AdapterReport) -> dict[str, tuple[str, str]]:
    """What each replica acknowledged, and where it has the adapter."""
    return {replica: (one.acknowledged, one.tier) for replica, one in report.replicas.items()}


async def seen(router: AdapterRouter, condition: Callable[[AdapterReport], bool]) -> AdapterReport:
    """The report of adapter "a" once it is as expected."""
    for _ in range(500):
        report = await router.adapter_status("a")
        if report is not None and condition(report):
            return report
        await asyncio.sleep(0.01)
    raise AssertionError("not seen in time")


async def test_a_load_is_seen_from_asked_for_to_resident() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1")):
        before = (await router.fleet_status()).epoch
        assert (await router.load("a", "/a")).status is LoRAStatus.SUCCESS
        report = await router.adapter_status("a")
        assert report is not None
        assert words(report) == {"r0": ("applied", "disk"), "r1": ("applied", "disk")}
        held = [AdapterRef("a", report.generation)]
        await router.report_residency("r0", Residency(1, held, held, held, num_slots_used=1), 4)
        report = await router.adapter_status("a")
        assert report is not None
        assert words(report) == {"r0": ("applied", "slot"), "r1": ("applied", "disk")}
        status = await router.fleet_status()
        assert status.epoch > before
        assert {replica: one.lag for replica, one in status.replicas.items()} == {"r0": 0, "r1": 0}
        assert (status.replicas["r0"].resident, status.replicas["r0"].num_slots) == (("a",), 4)
        assert status.num_adapters == {"ready": 1}


async def test_a_replica_that_has_yet_to_answer_is_behind() -> None:
    router = make_router()
    slow = Replica(router, "slow", delay_s=0.3)
    async with fleet(router, Replica(router, "quick"), slow):
        task = asyncio.create_task(router.load("a", "/a"))
        report = await seen(router, lambda report: words(report)["quick"][0] == "applied")
        assert (report.state, words(report)["slow"]) == ("loading", ("pending", "none"))
        lags = {replica: one.lag for replica, one in (await router.fleet_status()).replicas.items()}
        assert lags == {"quick": 0, "slow": 1}
        await task


async def test_a_change_that_failed_is_remembered_until_one_succeeds() -> None:
    router = make_router()
    replica = Replica(router, "r0", refuse_all(LoRAStatus.LOAD_INVALID_ADAPTER, "its rank is 512"))
    async with fleet(router, replica):
        assert (await router.load("a", "/a")).status is LoRAStatus.LOAD_INVALID_ADAPTER
        assert await router.adapter_status("a") is None
        assert "its rank is 512" in (await router.fleet_status()).failures["a"].text
        replica.refuse = lambda _: None
        assert (await router.load("a", "/a")).status is LoRAStatus.SUCCESS
        assert (await router.fleet_status()).failures == {}


async def test_what_stalls_is_told_and_leaves_routing() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        await router.load("a", "/a")
        work = Workload(adapters=[AdapterWork(name="a", num_running=1, oldest_idle_s=61.0)])
        await router.report_work("r0", msgspec.structs.replace(work, stalled={"a": "no progress"}))
        report = await router.adapter_status("a")
        assert report is not None
        assert (report.replicas["r0"].error, report.replicas["r0"].oldest_idle_s) == ("no progress", 61.0)
        assert (await router.table()).replicas["r0"].stalled == {"a"}
        await router.report_work("r0", Workload(fault="nothing moves"))
        row = (await router.table()).replicas["r0"]
        assert (row.stalled, row.is_stalled) == (frozenset(), True)
        assert (await router.fleet_status()).replicas["r0"].fault == "nothing moves"


async def test_a_replica_that_vanished_is_listed_no_more() -> None:
    router = make_router(lease_s=0.3)
    first, second = Replica(router, "r0"), Replica(router, "r1")
    async with fleet(router, first, second):
        await second.stop()
        assert (await router.fleet_status()).replicas.keys() == {"r0", "r1"}
        for _ in range(500):
            if (await router.fleet_status()).replicas.keys() == {"r0"}:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it is listed still")
