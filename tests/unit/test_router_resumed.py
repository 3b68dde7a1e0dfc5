"""A router that starts anew while its replicas live: it waits for them before it judges by their answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deployments.router import AdapterRouter
from lora_core.types import LoRAStatus
from tests.unit.router_fleet import Replica, make_router, refuse_all

LEASE_S = 3.0
"""How long a router waits for its replicas; a busy machine takes a good part of a second to start one here."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    # Not the module's: Serve pickles that by value, and once a test of this process has deployed a fleet, the class has
    # the functions of a copy.
    names = AdapterRouter.__init__.__globals__
    monkeypatch.setitem(names, "actor_name", lambda: "the router")
    monkeypatch.setitem(names, "session_name", lambda: "a session")
    return {"journal": str(tmp_path / "journal.sqlite"), "lease_s": LEASE_S, "num_slots": 4}


async def test_a_load_just_after_a_restart_counts_replicas_that_have_yet_to_come_back(settings: dict[str, Any]) -> None:
    first = make_router(**settings)
    await first.close()
    router = make_router(**settings)
    early = await Replica(router, "early").start()
    load = asyncio.create_task(router.load("a", "/a"))
    await asyncio.sleep(0.1)
    sick = await Replica(router, "sick", refuse_all(LoRAStatus.LOAD_ERROR, "no memory")).start()
    outcome = await load
    assert (outcome.status, outcome.behind) == (LoRAStatus.PARTIAL, ["sick"])
    for replica in (early, sick):
        await replica.stop()
    await router.close()


async def test_claims_just_after_a_restart_count_replicas_that_have_yet_to_come_back(settings: dict[str, Any]) -> None:
    first = make_router(**settings)
    replica = await Replica(first, "r0").start()
    await first.load("a", "/a")
    await replica.stop()
    await first.close()
    router = make_router(**settings)
    replicas = [await Replica(router, "r0").start()]
    copies, pin = asyncio.create_task(router.set_min_copies("a", 2)), asyncio.create_task(router.pin("a"))
    await asyncio.sleep(0.1)
    replicas.append(await Replica(router, "r1").start())
    assert (await copies).min_copies == 2, "there are two to hold it"
    pinned = await pin
    assert (pinned.status, set(pinned.per_replica)) == (LoRAStatus.SUCCESS, {"r0", "r1"})
    assert [replica.pins for replica in replicas] == [{"a"}, {"a"}]
    for replica in replicas:
        await replica.stop()
    await router.close()


async def test_the_first_start_waits_for_nobody_who_is_not_there(settings: dict[str, Any]) -> None:
    router = make_router(**{**settings, "lease_s": 30})
    replica = await Replica(router, "r0").start()
    outcome = await asyncio.wait_for(router.load("a", "/a"), 10)
    assert outcome.status is LoRAStatus.SUCCESS
    await replica.stop()
    await router.close()
