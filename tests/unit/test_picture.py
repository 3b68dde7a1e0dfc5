"""What the live page is told, over members that hold, load, refuse and lag; and over real routers as they change."""

import asyncio

import msgspec

from cluster.changes import Topic
from cluster.entry import AdapterEntry
from cluster.fleet import LastError
from cluster.member import Member, Word
from cluster.names import staged_name
from cluster.picture import MOST_ADAPTERS, MOST_ERRORS, MOST_QUEUES, FleetNow, FleetPicture, fleet_picture
from cluster.slot_ages import SlotAges
from cluster.status import Plan, fleet_report
from deployments.router import AdapterRouter
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAResponse, LoRAStatus
from lora_core.workload import AdapterWork, SlotCounts, Workload
from tests.unit.router_fleet import Replica, fleet, make_router, refuse_all

EPOCH = 20


def entry(name: str, generation: int, state: str = "ready", **fields: object) -> AdapterEntry:
    fields = {"path": f"/{name}", "state": state, "epoch": generation, **fields}
    return msgspec.convert({"name": name, "generation": generation, **fields}, AdapterEntry)


def picture(
    members: list[Member],
    entries: dict[str, AdapterEntry],
    *,
    shares: dict[str, float] | None = None,
    ages: SlotAges | None = None,
    failures: dict[str, LastError] | None = None,
) -> FleetPicture:
    plan = Plan(copies={}, shares=shares or {})
    report = fleet_report("router", EPOCH, entries, members, plan, failures or {})
    served = {name: one for name, one in entries.items() if one.state == "ready"}
    return fleet_picture(FleetNow(report, members, entries, served, plan.shares, ages or SlotAges()), 1000.0)


def refs(**generations: int) -> list[AdapterRef]:
    return [AdapterRef(name, number) for name, number in generations.items()]


def test_a_replica_shows_what_is_in_slots_on_its_way_and_waiting() -> None:
    now_s, member = 100.0, Member("r0", 0.0)
    ages = SlotAges(lambda: now_s)
    entries = {name: entry(name, number) for number, name in enumerate("abcd", 1)} | {"b": entry("b", 2, pinned=True)}
    member.take(Residency(1, refs(b=2), [], refs(b=2), num_slots_used=1), 4)
    ages.note("r0", member.resident)
    now_s = 130.0
    member.take(Residency(2, refs(a=1, b=2), [], refs(a=1, b=2), refs(c=3), num_slots_used=3), 4)
    ages.note("r0", member.resident)
    member.take_work(
        Workload(
            adapters=[
                AdapterWork(name="b", num_running=2, num_waiting=1), AdapterWork(name="c", num_waiting=1),
                AdapterWork(num_running=1), AdapterWork(name="d", num_waiting=3),
                AdapterWork(name="gone", num_tokens=5),
            ],
            slots=SlotCounts(num_hits=9, num_misses=3),
        )
    )  # fmt: skip
    found = picture([member], entries, shares={"b": 0.625, "a": 0.00004}, ages=ages).replicas["r0"]
    assert [(one.adapter, one.place, one.since_unix_s) for one in found.occupants] == [
        ("b", "slot", 100.0), ("a", "slot", 130.0), ("c", "loading", None), ("d", "queue", None), (None, "queue", None),
    ]  # fmt: skip
    first, base = found.occupants[0], found.occupants[-1]
    assert (first.share, first.num_running, first.num_waiting, first.pinned) == (0.625, 2, 1, True)
    assert (base.share, base.num_running, base.pinned) == (None, 1, False)
    assert (found.num_slots, found.num_slots_used, found.num_running, found.num_waiting) == (4, 3, 3, 5)
    assert (found.counts.num_hits, found.counts.num_misses) == (9, 3)


def test_ages_begin_anew_with_other_content_and_end_with_the_replica() -> None:
    now_s = 1.0
    ages = SlotAges(lambda: now_s)
    ages.note("r0", {"a": 1, "b": 1})
    now_s = 2.0
    ages.note("r0", {"a": 2, "b": 1})
    assert [ages.since("r0", "a", 2), ages.since("r0", "a", 1), ages.since("r0", "b", 1)] == [2.0, None, 1.0]
    ages.note("r0", {"a": 2})
    now_s = 3.0
    ages.note("r0", {"a": 2, "b": 1})
    assert ages.since("r0", "b", 1) == 3.0, "it has left its slot meanwhile"
    ages.drop(["r0", "unknown"])
    assert ages.since("r0", "a", 2) is None


def test_what_is_being_changed_comes_first_then_the_busiest_then_the_newest() -> None:
    entries = {f"cold-{number}": entry(f"cold-{number}", number) for number in range(1, 400)}
    entries |= {"hot": entry("hot", 1), "warm": entry("warm", 2), "new": entry("new", 500)}
    entries |= {"coming": entry("coming", 501, "loading"), "going": entry("going", 3, "unloading")}
    entries |= {"other": entry("other", 4), staged_name("other"): entry(staged_name("other"), 502, "loading")}
    member = Member("r0", 0.0, pending={Topic("coming", is_pin=False): 501})
    member.refusals[Topic("cold-9", is_pin=False)] = Word(9, LoRAResponse(LoRAStatus.LOAD_INVALID_PATH, "no"))
    found = picture([member], entries, shares={"warm": 0.1, "hot": 0.6})
    assert len(found.adapters) == MOST_ADAPTERS
    assert [(one.name, one.state) for one in found.adapters[:8]] == [
        ("coming", "loading"), ("going", "unloading"), ("other", "replacing"), ("cold-9", "ready"), ("hot", "ready"),
        ("warm", "ready"), ("new", "ready"), ("cold-399", "ready"),
    ]  # fmt: skip
    by_name = {one.name: one for one in found.adapters}
    assert len(by_name) == MOST_ADAPTERS, "each is there once"
    assert (by_name["coming"].num_pending, by_name["cold-9"].num_refused, by_name["hot"].share) == (1, 1, 0.6)
    assert found.num_adapters == {"ready": 403, "loading": 1, "unloading": 1}


def test_its_size_is_bounded() -> None:
    names = [f"a{number}" for number in range(1000)]
    entries = {name: entry(name, number) for number, name in enumerate(names, 1)}
    member = Member("r0", 0.0, pending={Topic(name, is_pin=False): 1 for name in names})
    response = LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, "its rank is 512")
    member.refusals = {Topic(name, is_pin=False): Word(1, response) for name in names}
    member.take_work(
        Workload(
            adapters=[AdapterWork(name=name, num_waiting=number) for number, name in enumerate(names)],
            stalled=dict.fromkeys(names, "no progress"),
        )
    )
    failures = {name: LastError(unix_s=float(number), text="no") for number, name in enumerate(names)}
    found = picture([member], entries, failures=failures)
    replica = found.replicas["r0"]
    assert (len(replica.refused), replica.num_refused, len(replica.stalled)) == (MOST_ERRORS, 1000, MOST_ERRORS)
    assert [one.adapter for one in replica.occupants] == names[::-1][:MOST_QUEUES], "the longest queues are shown"
    assert list(found.failures) == names[::-1][: 3 * MOST_ERRORS], "the last ones, the newest first"
    assert len(found.adapters) == MOST_ADAPTERS
    assert len(msgspec.json.encode(found)) < 64_000


async def seen(router: AdapterRouter, name: str) -> tuple[int, int, int, int]:
    found = {one.name: one for one in (await router.fleet_picture()).adapters}[name]
    return found.num_in_slots, found.num_in_memory, found.num_pending, found.num_refused


async def test_a_router_shows_adapters_and_replicas_come_and_go() -> None:
    router = make_router(lease_s=0.3)
    first = Replica(router, "r0")
    second = Replica(router, "r1", refuse_all(LoRAStatus.LOAD_INVALID_PATH, "nothing is there"))
    async with fleet(router, first, second):
        await router.load("a", "/a")
        held = [AdapterRef("a", first.holding["a"])]
        await router.report_residency("r0", Residency(1, held, held, held, num_slots_used=1), 4)
        found = await router.fleet_picture()
        assert await seen(router, "a") == (1, 1, 0, 1)
        [occupant] = found.replicas["r0"].occupants
        assert occupant.adapter == "a"
        assert occupant.since_unix_s is not None
        assert 0 <= found.unix_s - occupant.since_unix_s < 60
        assert found.replicas["r1"].refused == {"a": "nothing is there"}
        assert found.failures.keys() == {"a"}
        await second.stop()
        for _ in range(500):
            if "r1" not in (await router.fleet_picture()).replicas:
                break
            await asyncio.sleep(0.01)
        assert (await router.fleet_picture()).replicas.keys() == {"r0"}
        await router.unload("a")
        assert (await router.fleet_picture()).adapters == ()
