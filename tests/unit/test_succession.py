"""A router whose journal another one has opened takes it back only from one that serves nobody."""

import asyncio
from pathlib import Path

import pytest

from cluster.members import Members
from deployments import succession
from deployments.router import AdapterRouter
from deployments.succession import Succession
from lora_core.errors import RouterReplaced
from lora_core.messages import Residency
from lora_core.types import LoRAStatus
from tests.unit.router_fleet import Replica, fleet, make_router, settled


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "LOOK_S", 0.05)


def watched(router: AdapterRouter, successor: AdapterRouter | None, ended: asyncio.Event) -> Succession:
    """Have a router watch another as it does in Ray, by a direct call, and only say that it would end."""

    async def count(actor: str) -> int:
        return 0 if successor is None else await successor.num_joined()

    members: Members = router._members
    found = Succession(members, count, ended.set)
    # Outside Ray a run has no name.
    router._registry.on_replaced = lambda run: found.look_at(run or "session/actor")
    return found


async def joined(router: AdapterRouter, name: str) -> Replica:
    replica = await Replica(router, name).start()
    await router.report_residency(name, Residency(1, [], [], []), 2)
    return replica


async def test_a_router_whose_successor_never_serves_starts_anew_and_owns_the_journal_again(tmp_path: Path) -> None:
    settings, ended = {"journal": str(tmp_path / "journal.sqlite")}, asyncio.Event()
    router = make_router(**settings)
    async with fleet(router):
        replica = await joined(router, "r0")
        await router.load("a", "/a")
        failed = make_router(**settings)
        eye = watched(router, failed, ended)
        with pytest.raises(RouterReplaced, match="this router has been replaced"):
            await router.load("b", "/b")
        await asyncio.wait_for(ended.wait(), 5)
        eye.close()
        await replica.stop()
        again = make_router(**settings)
        replica.router = again
        await replica.start()
        assert (await again.load("b", "/b")).status is LoRAStatus.SUCCESS
        assert replica.paths == {"a": "/a", "b": "/b"}
        await replica.stop()
        for other in (failed, again):
            await other.close()


async def test_a_router_leaves_the_journal_to_a_successor_that_serves(tmp_path: Path) -> None:
    settings, ended = {"journal": str(tmp_path / "journal.sqlite")}, asyncio.Event()
    router = make_router(**settings)
    async with fleet(router):
        replica = await joined(router, "r0")
        successor = make_router(**settings)
        other = await joined(successor, "r1")
        eye = watched(router, successor, ended)
        with pytest.raises(RouterReplaced):
            await router.load("b", "/b")
        await asyncio.sleep(0.5)
        assert not ended.is_set()
        assert (await successor.load("b", "/b")).status is LoRAStatus.SUCCESS
        # The new version is taken back: its replicas and its router go.
        await other.stop()
        await settled(lambda: not successor._members.live)
        await asyncio.wait_for(ended.wait(), 5)
        eye.close()
        await replica.stop()
        await successor.close()


async def test_a_router_without_replicas_does_not_fight_for_the_journal(tmp_path: Path) -> None:
    settings, ended = {"journal": str(tmp_path / "journal.sqlite")}, asyncio.Event()
    router = make_router(lora_paths=["a=/a"], **settings)
    eye = watched(router, None, ended)
    successor = make_router(lora_paths=["a=/a"], **settings)
    with pytest.raises(RouterReplaced):
        await router.unload("a")
    await asyncio.sleep(0.5)
    assert not ended.is_set(), "it is on its way out"
    eye.close()
    for other in (router, successor):
        await other.close()
