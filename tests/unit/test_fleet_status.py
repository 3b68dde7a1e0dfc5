"""The operator's view: desired, acknowledged and resident kept apart, over real members; and its routes."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from cluster.changes import Topic
from cluster.entry import AdapterEntry
from cluster.fleet import LastError
from cluster.member import Member, Word
from cluster.picture import FleetNow, FleetPicture, fleet_picture
from cluster.slot_ages import SlotAges
from cluster.status import AdapterReport, FleetReport, Page, Plan, adapter_report, fleet_report, page
from deployments import fleet_status, http_errors
from deployments.fleet_api import fleet_routes
from deployments.fleet_status import FleetStatus
from lora_core.errors import RequestTimeout
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAResponse, LoRAStatus
from lora_core.workload import AdapterWork, Workload

EPOCH = 20
PLAN = Plan(copies={"hot": ("r1", "r0"), "cold": ("r1",)}, shares={"hot": 0.6, "": 0.3})


def entry(name: str, generation: int, **fields: object) -> AdapterEntry:
    settings = {"path": f"/adapters/{name}", "state": "ready", "epoch": generation, **fields}
    return msgspec.convert({"name": name, "generation": generation, **settings}, AdapterEntry)


ENTRIES = {
    "hot": entry("hot", 5, pinned=True, content_hash="abc"),
    "cold": entry("cold", 7),
    "new": entry("new", 20, state="loading"),
    "hot\x1freplacement": entry("hot\x1freplacement", 19, path="/adapters/hot-2", state="loading"),
}


def members() -> list[Member]:
    """One replica that is behind with "new" and lost "cold", and one where "hot" is stalled."""
    first, second = Member("r0", 0.0), Member("r1", 0.0)
    first.pending[Topic("new", is_pin=False)] = 20
    refusal = LoRAResponse(LoRAStatus.LOAD_INVALID_PATH, "nothing there")
    first.refusals[Topic("cold", is_pin=False)] = Word(7, refusal)
    first.take(Residency(3, [AdapterRef("hot", 5)], [], [AdapterRef("hot", 5)], num_slots_used=2), 4)
    # Of "cold" it still has an older generation.
    second.take(Residency(4, [AdapterRef("cold", 6)], [], [AdapterRef("hot", 5)], num_slots_used=1), 4)
    second.take_work(
        Workload(
            adapters=[AdapterWork(name="hot", num_running=2, oldest_idle_s=70.0), AdapterWork(num_waiting=1)],
            service_ms=4.5,
            stalled={"hot": "no progress for 70 s"},
        )
    )
    return [first, second]


def test_each_replica_has_its_own_word_and_place() -> None:
    failures = {"cold": LastError(unix_s=1.0, text="refused")}
    reports = {one.name: one for one in page(ENTRIES, members(), PLAN, failures).adapters}
    assert list(reports) == ["cold", "hot", "new"], "what is staged is no adapter of its own"
    hot, cold, new = reports["hot"], reports["cold"], reports["new"]
    assert {replica: (one.acknowledged, one.tier) for replica, one in hot.replicas.items()} == {
        "r0": ("applied", "slot"),
        "r1": ("applied", "host"),
    }
    assert (hot.pinned, hot.copies, hot.share, hot.replaced_by) == (True, ("r1", "r0"), 0.6, "/adapters/hot-2")
    assert (hot.replicas["r1"].error, hot.replicas["r1"].num_running) == ("no progress for 70 s", 2)
    assert hot.replicas["r1"].oldest_idle_s == 70.0
    assert (cold.replicas["r0"].acknowledged, cold.replicas["r0"].tier) == ("refused", "none")
    assert cold.replicas["r0"].error == "nothing there"
    assert (cold.replicas["r1"].acknowledged, cold.replicas["r1"].tier) == ("applied", "disk")
    assert (cold.share, cold.last_error) == (0.0, failures["cold"])
    assert {one.acknowledged for one in new.replicas.values()} == {"pending", "applied"}
    assert new.state == "loading"


def test_an_adapter_that_is_unloading_is_nowhere() -> None:
    gone = entry("gone", 3, state="unloading", epoch=9)
    member = Member("r0", 0.0)
    report = adapter_report(gone, {"gone": gone}, [member], PLAN, None)
    assert (report.replicas["r0"].acknowledged, report.replicas["r0"].tier) == ("applied", "none")
    member.refusals[Topic("gone", is_pin=False)] = Word(9, LoRAResponse(LoRAStatus.UNLOAD_NAME_NONEXISTENT, "not here"))
    assert adapter_report(gone, {"gone": gone}, [member], PLAN, None).replicas["r0"].acknowledged == "applied"


def test_pages_are_in_order_of_names_and_whole() -> None:
    entries = {name: entry(name, 1) for name in ("d", "b", "a", "c", "e")}
    found, after, pages = [], "", 0
    while True:
        part = page(entries, [], PLAN, {}, after=after, limit=2)
        found += [one.name for one in part.adapters]
        pages += 1
        if not part.has_more:
            break
        after = found[-1]
    assert (found, pages) == (["a", "b", "c", "d", "e"], 3)


def test_the_fleet_counts_and_names_what_is_behind() -> None:
    failures = {"gone": LastError(unix_s=2.0, text="no such folder")}
    report = fleet_report("router", EPOCH, ENTRIES, members(), PLAN, failures)
    assert report.num_adapters == {"ready": 2, "loading": 1}
    assert report.num_copies == 2
    assert report.failures == failures
    first, second = report.replicas["r0"], report.replicas["r1"]
    assert (first.epoch, first.lag, second.epoch, second.lag) == (19, 1, 20, 0)
    assert (first.resident, second.resident) == (("hot",), ())
    assert (first.num_slots_used, first.num_slots, first.num_in_memory) == (2, 4, 1)
    assert first.refused == {"cold": "nothing there"}
    assert (second.num_running, second.num_waiting, second.service_ms) == (2, 1, 4.5)
    assert second.stalled == {"hot": "no progress for 70 s"}
    assert (first.joined, second.fault) == (True, None)


class Source:
    """A router actor that answers, or does not."""

    def __init__(self, entries: Mapping[str, AdapterEntry]) -> None:
        self.entries = entries
        self.error: Exception | None = None

    async def fleet_status(self) -> FleetReport:
        if self.error is not None:
            raise self.error
        return fleet_report("router", EPOCH, self.entries, members(), PLAN, {})

    async def fleet_picture(self) -> FleetPicture:
        report, served = await self.fleet_status(), {"hot": self.entries["hot"], "cold": self.entries["cold"]}
        return fleet_picture(FleetNow(report, members(), self.entries, served, PLAN.shares, SlotAges()), 5.0)

    async def adapters_status(self, after: str, limit: int) -> Page:
        return page(self.entries, members(), PLAN, {}, after=after, limit=limit)

    async def adapter_status(self, name: str) -> AdapterReport | None:
        found = self.entries.get(name)
        return None if found is None else adapter_report(found, self.entries, members(), PLAN, None)


@pytest.fixture
def source() -> Source:
    return Source(ENTRIES | {"team/one@2": entry("team/one@2", 9)})


@pytest.fixture
async def http(source: Source) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    http_errors.install(app)
    app.include_router(fleet_routes(FleetStatus(source)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fleet") as client:
        yield client


async def test_the_routes_give_what_the_router_actor_knows(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/adapters", params={"limit": 2})).json()
    assert ([one["name"] for one in listed["data"]], listed["has_more"]) == (["cold", "hot"], True)
    listed = (await http.get("/v1/adapters", params={"after": "hot"})).json()
    assert ([one["name"] for one in listed["data"]], listed["has_more"]) == (["new", "team/one@2"], False)
    one = (await http.get("/v1/adapters/team%2Fone%402")).json()
    assert (one["name"], one["replicas"]["r0"]["tier"]) == ("team/one@2", "disk")
    fleet = (await http.get("/v1/fleet")).json()
    assert fleet["replicas"]["r0"]["lag"] == 1


async def test_an_unknown_adapter_and_a_wrong_limit_are_refused(http: httpx.AsyncClient) -> None:
    unknown = await http.get("/v1/adapters/nobody")
    assert (unknown.status_code, "nobody" in unknown.json()["error"]["message"]) == (404, True)
    assert (await http.get("/v1/adapters", params={"limit": 0})).status_code == 400


async def test_a_router_actor_that_does_not_answer_is_said_to(
    http: httpx.AsyncClient, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.error = RequestTimeout("the router actor could not be reached within 30 s")
    answer = await http.get("/v1/fleet")
    assert (answer.status_code, "could not be reached" in answer.text) == (503, True)

    async def never(after: str, limit: int) -> Page:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(fleet_status, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(source, "adapters_status", never)
    answer = await http.get("/v1/adapters")
    assert (answer.status_code, "does not answer within" in answer.text) == (503, True)
