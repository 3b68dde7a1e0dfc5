"""The live page's events: one question for all who look, none while nobody does, and only what is new is sent."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from cluster.picture import FleetPicture, ReplicaPicture
from deployments.fleet_feed import FleetFeed, fleet_events
from lora_core.errors import EngineError
from lora_core.workload import SlotCounts
from tests.unit.router_fleet import settled

PERIOD_S = 0.01

REPLICA = ReplicaPicture(
    epoch=1, lag=0, joined=True, leaving=False, num_slots=2, num_slots_used=0, num_in_memory=0, num_running=0,
    num_waiting=0, service_ms=None, occupants=(), counts=SlotCounts(), refused={}, num_refused=0, stalled={},
    fault=None,
)  # fmt: skip


class Source:
    """A router actor that counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.replicas = {"r0": REPLICA, "r1": REPLICA}
        self.error: Exception | None = None

    async def picture(self) -> FleetPicture:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return FleetPicture(
            unix_s=float(self.num_asked), router_id="x", epoch=7, num_adapters={}, num_copies=0, adapters=(),
            replicas=dict(self.replicas), failures={},
        )  # fmt: skip


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def feed(source: Source) -> FleetFeed:
    return FleetFeed(source.picture, PERIOD_S)


async def next_of(events: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    event = await asyncio.wait_for(anext(events), 5)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    data: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return data


async def test_the_first_event_is_whole_and_later_ones_are_what_is_new(feed: FleetFeed, source: Source) -> None:
    async with aclosing(fleet_events(feed)) as events:
        first = await next_of(events)
        assert (first["whole"], first["replicas"].keys(), first["fleet"]["epoch"]) == (True, {"r0", "r1"}, 7)
        assert "replicas" not in first["fleet"]
        second = await next_of(events)
        assert (second["whole"], second["replicas"], second["gone"]) == (False, {}, [])
        assert second["fleet"]["unix_s"] > first["fleet"]["unix_s"]
        source.replicas = {"r1": msgspec.structs.replace(REPLICA, num_waiting=3), "r2": REPLICA}
        while not (news := await next_of(events))["gone"]:
            pass
        assert (news["gone"], news["replicas"].keys()) == (["r0"], {"r1", "r2"})
        assert news["replicas"]["r1"]["num_waiting"] == 3


async def test_many_who_look_cost_no_more_questions_than_one(feed: FleetFeed, source: Source) -> None:
    asked = {}
    for num_viewers in (1, 50):
        before, viewers = source.num_asked, [fleet_events(feed) for _ in range(num_viewers)]
        for _ in range(5):
            found = await asyncio.gather(*map(next_of, viewers))
            assert len({event["fleet"]["unix_s"] for event in found[1:]}) <= 2, "they are told the same"
        asked[num_viewers] = source.num_asked - before
        await asyncio.gather(*(viewer.aclose() for viewer in viewers))
    # Each turn of all is one question; a slow turn may let some pass that nobody takes.
    assert asked[50] < 50


async def test_nobody_is_asked_while_nobody_looks(feed: FleetFeed, source: Source) -> None:
    assert source.num_asked == 0
    first, second = fleet_events(feed), fleet_events(feed)
    await asyncio.gather(next_of(first), next_of(second))
    await first.aclose()
    before = source.num_asked
    await next_of(second)
    await next_of(second)
    assert source.num_asked > before, "one still looks"
    await second.aclose()
    before = source.num_asked
    await asyncio.sleep(10 * PERIOD_S)
    assert source.num_asked <= before
    source.replicas = {"r9": REPLICA}
    async with aclosing(fleet_events(feed)) as third:
        assert (await next_of(third))["replicas"].keys() == {"r9"}, "nothing of before is shown"


async def test_who_is_slow_misses_frames_and_ends_with_the_newest(feed: FleetFeed, source: Source) -> None:
    async with aclosing(fleet_events(feed)) as events:
        await next_of(events)
        await settled(lambda: source.num_asked >= 20)
        assert (await next_of(events))["fleet"]["unix_s"] >= 20


async def test_what_is_not_of_now_says_why_and_stays_until_there_is_news(feed: FleetFeed, source: Source) -> None:
    async with aclosing(fleet_events(feed)) as events:
        known = (await next_of(events))["fleet"]
        source.error = EngineError("the router actor does not answer within 5 s")
        while (news := await next_of(events))["fault"] is None:
            known = news["fleet"]
        assert (news["fault"], news["fleet"], news["gone"]) == (str(source.error), known, [])
        source.error = RuntimeError("a secret")
        while "internal error" not in ((news := await next_of(events))["fault"] or ""):
            pass
        assert "a secret" not in news["fault"]
        source.error = None
        while (news := await next_of(events))["fault"] is not None:
            pass
        assert news["fleet"]["unix_s"] > known["unix_s"]


async def test_a_fleet_that_was_never_seen_is_no_fleet(feed: FleetFeed, source: Source) -> None:
    source.error = EngineError("it cannot be asked")
    async with aclosing(fleet_events(feed)) as events:
        assert await next_of(events) == {
            "whole": True, "fleet": None, "replicas": {}, "gone": [], "fault": "it cannot be asked",
        }  # fmt: skip


async def test_a_stream_ends_so_that_its_key_is_looked_at_again(feed: FleetFeed) -> None:
    found = [event async for event in fleet_events(feed, stream_s=5 * PERIOD_S)]
    assert len(found) > 1
