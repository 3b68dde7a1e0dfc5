"""A replica's slots as the router actor wishes them, and what it tells of itself: the real router, without Ray."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.fleet import SlotWishes
from deployments import slot_keeper
from deployments.adapter_follower import AdapterFollower
from deployments.replica_reports import ReplicaReports
from deployments.slot_keeper import SlotKeeper
from lora_core.errors import EngineDead, ReplicaUnknown
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from lora_core.workload import AdapterWork, Workload
from tests.unit.test_adapter_follower import Engine, Fleet, until

NUM_SLOTS = 4


class SlotEngine(Engine):
    """An engine with slots, which tells its follower what is in them."""

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.slots: list[str] = []
        self.protected: list[str] = []
        self.follower: AdapterFollower | None = None
        self.is_slow = asyncio.Event()
        self.is_slow.set()
        self._sequence = 0

    async def apply(self, request: LoRARequest) -> LoRAResponse:
        if request.operation is not LoRAOperation.WARM:
            return await super().apply(request)
        self.done.append(("warm", request.lora_name))
        await self.is_slow.wait()
        if len(self.slots) == self.num_slots:
            return LoRAResponse(LoRAStatus.UNAVAILABLE, "no slot is to spare")
        self.slots.append(request.lora_name)
        self.tell()
        return LoRAResponse(LoRAStatus.SUCCESS, "on its way")

    def tell(self) -> None:
        assert self.follower is not None
        self._sequence += 1
        held = {name: AdapterRef(name, generation or 0) for name, generation in self.loaded.items()}
        in_slots = [held[name] for name in self.slots if name in held]
        everything = list(held.values())
        self.follower.report(Residency(self._sequence, in_slots, everything, everything, [], len(self.slots)))

    def warmed(self) -> list[str]:
        return [name for operation, name in self.done if operation == "warm"]

    def follow(self, fleet: Fleet, replica_id: str) -> AdapterFollower:
        def protect(names: list[str]) -> None:
            self.protected = names

        self.follower = AdapterFollower(fleet.line, self.apply, replica_id, self.num_slots, protect)
        return self.follower


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path / "journal.sqlite")
    fleet.settings["num_slots"] = NUM_SLOTS
    await fleet.restart_router()
    fleet.engine = engine = SlotEngine()
    fleet.follower = engine.follow(fleet, "replica-1")
    yield fleet
    await fleet.close()


def work_of(**tokens: int) -> Workload:
    work = [AdapterWork(name=name, num_tokens=count, num_started=1) for name, count in tokens.items()]
    return Workload(seconds=0.5, adapters=work, service_ms=3.0, load_ms_per_mib={"host": 0.5})


async def test_a_new_replica_has_its_share_in_slots_before_it_takes_requests(fleet: Fleet) -> None:
    await fleet.join()
    names = [f"a{number}" for number in range(8)]
    for name in names:
        await fleet.router.load(name, f"/{name}")
    fleet.follower.report_work(work_of(**dict.fromkeys(names, 100)))
    await until(lambda: set(fleet.router._slots.shares) == set(names))
    late = SlotEngine()
    follower = late.follow(fleet, "replica-2")
    await follower.join()
    late.tell()
    await follower.warm_share(5)
    wishes = await fleet.router.wait_wishes("replica-2", -1, 0)
    assert wishes.warm
    assert set(wishes.warm) <= set(late.slots)
    assert late.protected[: len(wishes.warm)] == wishes.warm
    await follower.close()


async def test_a_replica_whose_share_takes_too_long_starts_all_the_same(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fleet.engine
    assert isinstance(engine, SlotEngine)
    engine.is_slow.clear()
    await fleet.join()
    await fleet.router.load("a", "/a")
    fleet.follower.report_work(work_of(a=100))
    await until(lambda: "a" in fleet.router._slots.shares)
    engine.tell()
    await asyncio.wait_for(fleet.follower.warm_share(0.2), 3)
    assert "not in slots after 0.2 s, when requests begin: a" in caplog.text
    fleet.line.cut = True
    await asyncio.wait_for(fleet.follower.warm_share(0.2), 3)
    assert "this replica starts with empty slots" in caplog.text
    engine.is_slow.set()


async def test_work_reaches_the_router_also_when_a_call_is_lost(fleet: Fleet) -> None:
    await fleet.join()
    await fleet.router.load("a", "/a")
    fleet.line.fail_next = {"report_work"}
    fleet.follower.report_work(work_of(a=60))
    fleet.follower.report_work(work_of(a=40))
    await until(lambda: not fleet.line.fail_next)
    (member,) = fleet.router._members.live
    await until(lambda: member.work is not None)
    assert member.work is not None
    assert [(work.name, work.num_tokens) for work in member.work.adapters] == [("a", 100)]
    state = (await fleet.router.table()).replicas["replica-1"]
    assert (state.service_ms, state.load_ms_per_mib) == (3.0, {"host": 0.5})


async def test_a_stall_is_told_at_once_and_so_is_its_end(fleet: Fleet) -> None:
    await fleet.join()
    await fleet.router.load("a", "/a")
    # By itself a report would come much later.
    fleet.follower._work_period_s = 60.0
    await asyncio.sleep(0)
    for stalled, fault in (({"a": "no token for 60 s"}, ""), ({}, "the engine hangs"), ({}, "")):
        fleet.follower.set_stalled(stalled, fault)
        for _ in range(500):
            state = (await fleet.router.table()).replicas["replica-1"]
            if (set(state.stalled), state.is_stalled) == (set(stalled), bool(fault)):
                break
            await asyncio.sleep(0.01)
        assert (set(state.stalled), state.is_stalled) == (set(stalled), bool(fault))


# The keeper alone


class Warmed:
    """Where warm-ups end, and how they are answered."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.protected: list[list[str]] = []
        self.status = LoRAStatus.SUCCESS
        self.fault: Exception | None = None

    async def warm(self, name: str) -> LoRAStatus:
        self.asked.append(name)
        if self.fault is not None:
            raise self.fault
        return self.status


def seen(*resident: str, loading: tuple[str, ...] = ()) -> Residency:
    refs = {name: AdapterRef(name, 1) for name in (*resident, *loading)}
    return Residency(1, [refs[name] for name in resident], [], [], [refs[name] for name in loading])


@pytest.fixture
async def kept(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Warmed, SlotKeeper]]:
    monkeypatch.setattr(slot_keeper, "AGAIN_S", 0.01)
    engine = Warmed()
    keeper = SlotKeeper(engine.warm, engine.protected.append)
    yield engine, keeper
    await keeper.close()


async def test_what_is_there_or_on_its_way_is_not_asked_for(kept: tuple[Warmed, SlotKeeper]) -> None:
    engine, keeper = kept
    keeper.see(seen("a", loading=("b",)))
    keeper.wish(SlotWishes(warm=["a", "b", "c"], protected=["d", "a"], version=1))
    await keeper.keep()
    assert engine.asked == ["c"]
    assert engine.protected == [["a", "b", "c", "d"]]
    keeper.see(seen("a", "b", "c"))
    await keeper.keep()
    assert engine.asked == ["c"]
    assert len(engine.protected) == 1, "it is so already"
    keeper.see(seen("a", "c"))
    await keeper.keep()
    assert engine.asked == ["c", "b"], "it lost its slot"


async def test_what_found_no_slot_is_asked_for_again_and_waited_for_by_nobody(
    kept: tuple[Warmed, SlotKeeper],
) -> None:
    engine, keeper = kept
    engine.status = LoRAStatus.UNAVAILABLE
    keeper.wish(SlotWishes(warm=["a"], version=1))
    await keeper.keep()
    assert await keeper.wait(0.5) == []
    engine.fault = EngineDead("gone")
    await keeper.keep()
    engine.fault, engine.status = None, LoRAStatus.SUCCESS
    await keeper.keep()
    assert engine.asked == ["a"] * 3
    assert await keeper.wait(0.01) == ["a"]


async def test_wishes_that_change_are_done_at_once(
    kept: tuple[Warmed, SlotKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_keeper, "AGAIN_S", 60.0)
    engine, keeper = kept
    keeping = asyncio.create_task(keeper.keep())
    await asyncio.sleep(0.01)
    keeper.wish(SlotWishes(warm=["a"], version=1))
    await asyncio.wait_for(keeping, 2)
    keeping = asyncio.create_task(keeper.keep())
    await asyncio.sleep(0.01)
    assert engine.asked == ["a"]
    keeping.cancel()


# The reports alone


class Heard:
    """A router actor that knows this replica, or does not."""

    def __init__(self) -> None:
        self.residency: list[Residency] = []
        self.is_unknown = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def report_residency(self, replica_id: str, residency: Residency, num_slots: int) -> None:
        await self.gate.wait()
        if self.is_unknown:
            raise ReplicaUnknown("register")
        self.residency.append(residency)


def held(sequence: int, *resident: str) -> Residency:
    everything = [AdapterRef(name, 1) for name in "abc"]
    return Residency(sequence, [AdapterRef(name, 1) for name in resident], everything, everything)


async def test_only_what_the_router_does_not_know_is_told() -> None:
    router = Heard()
    reports = ReplicaReports(router, "r", 2)  # type: ignore[arg-type]
    reports.begin()
    for sequence, names in enumerate(("", "a", "ab")):
        reports.set_residency(held(sequence, *names))
        await reports.tell_residency()
    assert [residency.loaded is None for residency in router.residency] == [False, True, True]
    assert [len(residency.resident) for residency in router.residency] == [0, 1, 2]
    reports.begin()
    await reports.tell_residency()
    assert router.residency[-1] == held(2, "a", "b"), "it may have forgotten everything"


async def test_what_was_told_before_a_registration_does_not_count_after_it() -> None:
    router = Heard()
    reports = ReplicaReports(router, "r", 2)  # type: ignore[arg-type]
    reports.begin()
    reports.set_residency(held(1))
    router.gate.clear()
    telling = asyncio.create_task(reports.tell_residency())
    await asyncio.sleep(0)
    reports.begin()
    router.gate.set()
    await telling
    await reports.tell_residency()
    assert router.residency == [held(1), held(1)]
    router.is_unknown = True
    reports.set_residency(held(2, "a"))
    await reports.tell_residency()
    router.is_unknown = False
    reports.begin()
    await reports.tell_residency()
    assert router.residency[-1] == held(2, "a")
