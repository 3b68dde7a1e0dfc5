"""Loads that some replicas can carry out and others cannot, and how those come to serve the adapter after all."""

import asyncio

import pytest

from cluster import retries as retries_module
from cluster.fleet import AdapterInFleet
from deployments.router import AdapterRouter
from lora_core.messages import Residency
from lora_core.types import LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from tests.unit.router_fleet import Refusal, Replica, fleet, make_router, names, refuse_all, settled


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries_module, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(retries_module, "LONGEST_PAUSE_S", 0.2)


async def described(router: AdapterRouter, name: str) -> AdapterInFleet:
    found = await router.describe(name)
    assert found is not None
    return found


async def refused(router: AdapterRouter, replica: str) -> frozenset[str]:
    return (await router.table()).replicas[replica].refused


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (LoRAStatus.LOAD_INVALID_PATH, "'/a' does not exist here"),
        (LoRAStatus.LOAD_ERROR, "no space left on device"),
        (LoRAStatus.UNAVAILABLE, "the engine did not answer"),
        (LoRAStatus.UNSPECIFIED_ERROR, "a fault of this replica"),
    ],
)
async def test_a_fault_of_one_replica_leaves_the_adapter_to_the_others_until_it_has_healed(
    status: LoRAStatus, reason: str
) -> None:
    router = make_router()
    sick = Replica(router, "r1", refuse_all(status, reason))
    async with fleet(router, Replica(router, "r0"), sick, Replica(router, "r2")) as replicas:
        outcome = await router.load("a", "/a")
        assert outcome.status is LoRAStatus.PARTIAL
        assert outcome.behind == ["r1"]
        assert outcome.message == (
            f"adapter 'a' is loaded on 2 of 3 replicas: r1 does not serve it ({reason}); "
            "it is asked again in the background"
        )
        assert outcome.per_replica["r1"] == f"{status.value}: {reason}"
        assert await names(router) == {"a"}
        assert [await refused(router, name) for name in ("r0", "r1", "r2")] == [frozenset(), {"a"}, frozenset()]
        await settled(lambda: len(sick.applied) >= 4)
        assert router._operations.last_errors["a"].text == outcome.message
        found = await described(router, "a")
        assert found.replicas["r1"] == f"refused: {reason}"
        assert found.retries["r1"].num_attempts >= 3
        assert {len(replica.applied) for replica in replicas if replica is not sick} == {1}, "they have it"
        sick.refuse = lambda _: None
        await settled(lambda: sick.held.generations == replicas[0].holding)
        await settled(lambda: not router._members.get("r1").pending)
        assert await refused(router, "r1") == frozenset()
        found = await described(router, "a")
        assert (found.replicas["r1"], found.retries) == ("loaded", {})
        assert router._operations.last_errors == {}
        assert (await router.load("a", "/a")).status is LoRAStatus.SUCCESS
        num_applied = len(sick.applied)
        await asyncio.sleep(0.3)
        assert len(sick.applied) == num_applied, "nothing is left to ask for"


@pytest.mark.parametrize(
    "others",
    [
        (LoRAStatus.LOAD_INVALID_PATH, LoRAStatus.LOAD_INVALID_PATH),
        (LoRAStatus.LOAD_ERROR, LoRAStatus.UNAVAILABLE),
        (None, LoRAStatus.LOAD_INVALID_ADAPTER),
        (LoRAStatus.LOAD_ERROR, LoRAStatus.LOAD_INVALID_ADAPTER),
    ],
)
async def test_an_adapter_that_none_can_load_or_one_finds_wrong_is_nowhere(
    others: tuple[LoRAStatus | None, LoRAStatus],
) -> None:
    def refusal(status: LoRAStatus | None) -> Refusal:
        return (lambda _: None) if status is None else refuse_all(status, "no")

    router = make_router()
    replicas = [Replica(router, f"r{i}", refusal(status)) for i, status in enumerate(others)]
    async with fleet(router, *replicas):
        outcome = await router.load("a", "/a")
        assert outcome.status not in (LoRAStatus.SUCCESS, LoRAStatus.PARTIAL)
        assert outcome.behind == []
        assert await names(router) == set()
        await settled(lambda: all(len(replica.applied) == 2 and not replica.holding for replica in replicas))
        num_applied = [len(replica.applied) for replica in replicas]
        await asyncio.sleep(0.2)
        assert [len(replica.applied) for replica in replicas] == num_applied, "nobody wants it any more"
        assert router._operations.last_errors["a"].text == outcome.message


async def test_a_refused_load_is_asked_again_while_the_adapter_is_replaced_unloaded_and_loaded_elsewhere() -> None:
    router = make_router()
    sick = Replica(router, "r1", refuse_all(LoRAStatus.LOAD_ERROR, "no memory"))
    async with fleet(router, Replica(router, "r0"), sick) as (well, _):
        await router.load("a", "/a")
        replaced = await router.load("a", "/b", load_inplace=True)
        assert replaced.status is LoRAStatus.LOAD_ERROR, "a replacement is all or none"
        await settled(lambda: well.paths == {"a": "/a"})
        await router.unload("a")
        again = await router.load("a", "/c")
        assert again.status is LoRAStatus.PARTIAL
        sick.refuse = lambda _: None
        await settled(lambda: sick.paths == well.paths == {"a": "/c"})
        assert sick.held.generations == well.holding == {"a": again.epoch}


async def test_a_replica_that_starts_and_cannot_load_an_adapter_is_asked_again_and_then_pins_it() -> None:
    router = make_router(num_slots=3)
    async with fleet(router, Replica(router, "r0")):
        await router.load("a", "/a")
        await router.pin("a")
        late = await Replica(router, "late", refuse_all(LoRAStatus.LOAD_INVALID_PATH, "not mounted yet")).start()
        assert await refused(router, "late") == {"a"}
        late.refuse = lambda _: None
        await settled(lambda: late.pins == {"a"})
        assert await refused(router, "late") == frozenset()
        await late.stop()


async def test_a_replica_that_cannot_pin_is_shown_asked_again_and_no_success() -> None:
    router = make_router(num_slots=3)

    def refuse(request: LoRARequest) -> LoRAResponse | None:
        pin = request.operation is LoRAOperation.PIN
        return LoRAResponse(LoRAStatus.PIN_ERROR, "2 are pinned here") if pin else None

    async with fleet(router, Replica(router, "r0")) as (first,):
        await router.load("a", "/a")
        await router.pin("a")
        late = await Replica(router, "late", refuse).start()
        await router.report_residency("late", Residency(1, [], [], []), 3)
        found = await router.adapter_status("a")
        assert found is not None
        assert {name: one.error for name, one in found.replicas.items()} == {
            "r0": None,
            "late": "not pinned: 2 are pinned here",
        }
        again = await router.pin("a")
        assert (again.status, again.message) == (
            LoRAStatus.PIN_ERROR,
            "adapter 'a' is pinned already, but not everywhere: 1 of 2 replicas refused: late: 2 are pinned here",
        )
        assert first.pins == {"a"}, "the pin that was asked for before stays"
        late.refuse = lambda _: None
        await settled(lambda: late.pins == {"a"})
        assert (await router.pin("a")).status is LoRAStatus.SUCCESS
        num_applied = len(late.applied)
        await asyncio.sleep(0.3)
        assert len(late.applied) == num_applied, "nothing is left to ask for"
        await late.stop()


async def test_a_pin_that_did_not_end_on_a_replica_ends_there_later() -> None:
    router = make_router(num_slots=3)

    def refuse(request: LoRARequest) -> LoRAResponse | None:
        unpin = request.operation is LoRAOperation.UNPIN
        return LoRAResponse(LoRAStatus.UNAVAILABLE, "the engine did not answer") if unpin else None

    async with fleet(router, Replica(router, "r0"), Replica(router, "r1")) as (_, sick):
        await router.report_residency("r1", Residency(1, [], [], []), 3)
        await router.load("a", "/a")
        await router.pin("a")
        sick.refuse = refuse
        assert (await router.unpin("a")).status is LoRAStatus.UNAVAILABLE
        assert (await router.unpin("a")).status is LoRAStatus.UNAVAILABLE, "it is not so yet"
        sick.refuse = lambda _: None
        await settled(lambda: sick.pins == set())
        assert (await router.unpin("a")).status is LoRAStatus.SUCCESS


async def test_files_that_are_put_right_are_served_without_another_word() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (first,):
        await router.load("a", "/a")
        late = Replica(router, "late")
        late.disk = {"/a": "other"}
        await late.start()
        await settled(lambda: len(late.applied) >= 3)
        assert late.engine == {}
        late.disk = {}
        await settled(lambda: late.holding == first.holding)
        await late.stop()


async def test_a_replica_that_cannot_swap_is_asked_again() -> None:
    router = make_router()

    def refuse(request: LoRARequest) -> LoRAResponse | None:
        busy = request.operation is LoRAOperation.LOAD and request.lora_name == "a" and request.lora_path == "/new"
        return LoRAResponse(LoRAStatus.LOAD_ERROR, "no memory left") if busy else None

    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", refuse)) as (good, bad):
        await router.load("a", "/old")
        outcome = await router.load("a", "/new", load_inplace=True)
        assert (outcome.status, outcome.behind) == (LoRAStatus.PARTIAL, ["r1"])
        assert await refused(router, "r1") == {"a"}
        bad.refuse = lambda _: None
        await settled(lambda: bad.paths == good.paths == {"a": "/new"})
        assert bad.held.generations == good.held.generations


async def test_a_late_answer_needs_no_further_question() -> None:
    router = make_router(change_timeout_s=0.2, lease_s=3)
    slow = Replica(router, "slow")
    async with fleet(router, Replica(router, "r0"), slow):
        slow.delay_s = 0.6
        outcome = await router.load("a", "/a")
        assert (outcome.status, outcome.behind) == (LoRAStatus.PARTIAL, ["slow"])
        assert await refused(router, "slow") == {"a"}
        assert (await described(router, "a")).replicas["slow"] == "loading"
        await settled(lambda: "a" in slow.holding and not router._members.get("slow").pending)
        assert await refused(router, "slow") == frozenset()
        assert len(slow.applied) == 1


async def test_a_refusal_ends_with_the_adapter_it_was_of() -> None:
    router = make_router()
    sick = Replica(router, "r1", refuse_all(LoRAStatus.LOAD_ERROR, "no"))
    async with fleet(router, Replica(router, "r0"), sick):
        await router.load("a", "/a")
        assert await refused(router, "r1") == {"a"}
        await router.unload("a")
        await settled(lambda: not router._members.get("r1").pending)
        assert await refused(router, "r1") == frozenset()
        sick.refuse = lambda _: None
        assert (await router.load("a", "/b")).status is LoRAStatus.SUCCESS
        assert await refused(router, "r1") == frozenset()


async def test_a_replica_that_is_gone_is_not_asked() -> None:
    router = make_router(lease_s=0.3)
    sick = Replica(router, "r1", refuse_all(LoRAStatus.LOAD_ERROR, "no"))
    async with fleet(router, Replica(router, "r0"), sick):
        await router.load("a", "/a")
        await sick.stop()
        await settled(lambda: len(router._members.live) == 1)
        assert (await described(router, "a")).retries == {}
        assert (await router.load("a", "/a")).status is LoRAStatus.SUCCESS
