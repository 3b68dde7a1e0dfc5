"""`AdapterFollower` against the real router, reached without Ray, over a line that can be cut."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cluster.changes import Change
from cluster.fleet import FleetTable, Outcome, Registration, SlotWishes
from deployments import adapter_follower
from deployments.adapter_follower import AdapterFollower
from deployments.router import AdapterRouter
from lora_core.channel import NUM_LOADERS
from lora_core.errors import ConfigError, EngineDead, ReplicaUnknown, RequestTimeout
from lora_core.messages import Residency
from lora_core.places import Places
from lora_core.types import AdapterRef, LoadReport, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from lora_core.workload import Workload


class Engine:
    """Does what it is told, keeps a record, and refuses paths that say so."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.loaded: dict[str, int | None] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.dead = False
        self.fault: Exception | None = None
        self.fault_of: LoRAOperation | None = None
        self.content_hash = "as on every node"
        self.generations: set[int] = set()
        self.is_late = False
        """Loads take effect when nobody waits for their answer any more."""
        self.contents: dict[str, str] = {}
        """By path, the hash of what is not as `content_hash` says."""
        self.downloads: dict[str, asyncio.Event] = {}
        """By path, what its loads wait for."""

    def hold(self, *paths: str) -> None:
        """Have loads from these paths take for ever, or until their event."""
        self.downloads.update({path: asyncio.Event() for path in paths})

    async def apply(self, request: LoRARequest) -> LoRAResponse:
        await self.gate.wait()
        if request.lora_path in self.downloads:
            await self.downloads[request.lora_path].wait()
        if self.dead:
            raise EngineDead("gone")
        if self.fault is not None and self.fault_of in (None, request.operation):
            raise self.fault
        self.done.append((request.operation.value, request.lora_name))
        if request.operation in (LoRAOperation.PIN, LoRAOperation.UNPIN):
            return LoRAResponse(LoRAStatus.SUCCESS, "done")
        if request.operation is LoRAOperation.UNLOAD:
            if self.loaded.pop(request.lora_name, None) is None:
                return LoRAResponse(LoRAStatus.UNLOAD_NAME_NONEXISTENT, "unknown")
            return LoRAResponse(LoRAStatus.SUCCESS, "unloaded")
        if request.lora_path is not None and "bad" in request.lora_path:
            return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, "its files are bad")
        found = self.contents.get(request.lora_path or "", self.content_hash)
        if request.content_hash not in (None, found):
            return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, "its files are other ones")
        assert request.generation is not None
        if request.generation in self.generations:
            return LoRAResponse(LoRAStatus.LOAD_ERROR, "the generation was given to an adapter before")
        self.generations.add(request.generation)
        self.loaded[request.lora_name] = request.generation
        report = LoadReport(
            generation=request.generation, content_hash=found, num_modules=1, ranks={4: 1}, num_bytes=64
        )
        if self.is_late:
            raise RequestTimeout("no answer within 300 s")
        return LoRAResponse(LoRAStatus.SUCCESS, "loaded", report)


class Line:
    """The way to a router: it can be cut, for all calls or the next of one kind, and lead to another router."""

    def __init__(self, router: AdapterRouter) -> None:
        self.router = router
        self.cut = False
        self.down: set[str] = set()
        """Kinds of calls that never get through."""
        self.fail_next: set[str] = set()
        self.calls: list[str] = []

    async def _call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if self.cut or method in self.down or method in self.fail_next:
            self.fail_next.discard(method)
            raise ConnectionError(f"{method}: the line is cut")
        return await getattr(self.router, method)(*args)

    async def register(
        self, replica_id: str, holding: Mapping[str, int] | None = None, pinned: Collection[str] = ()
    ) -> Registration:
        registration: Registration = await self._call("register", replica_id, holding, pinned)
        return registration

    async def wait_changes(self, replica_id: str, since_epoch: int, timeout_s: float) -> list[Change]:
        changes: list[Change] = await self._call("wait_changes", replica_id, since_epoch, timeout_s)
        return changes

    async def acknowledge(self, replica_id: str, outcomes: list[Outcome]) -> list[Change]:
        unloads: list[Change] = await self._call("acknowledge", replica_id, outcomes)
        return unloads

    async def report_residency(self, replica_id: str, residency: Residency, num_slots: int) -> None:
        await self._call("report_residency", replica_id, residency, num_slots)

    async def report_work(self, replica_id: str, work: Workload) -> SlotWishes:
        wishes: SlotWishes = await self._call("report_work", replica_id, work)
        return wishes

    async def wait_wishes(self, replica_id: str, version: int, timeout_s: float) -> SlotWishes:
        wishes: SlotWishes = await self._call("wait_wishes", replica_id, version, timeout_s)
        return wishes


class Fleet:
    """A router, a line to it, one engine and its follower."""

    def __init__(self, journal: Path) -> None:
        self.settings: dict[str, Any] = {
            "base_name": "base",
            "journal": str(journal),
            "lease_s": 0.6,
            "change_timeout_s": 5.0,
        }
        self.router = AdapterRouter(self.settings)
        self.line = Line(self.router)
        self.engine = Engine()
        self.follower = AdapterFollower(self.line, self.engine.apply, "replica-1", num_slots=4)

    async def restart_router(self) -> None:
        await self.router.close()
        self.router = self.line.router = AdapterRouter(self.settings)

    async def join(self) -> None:
        await self.follower.join()

    async def close(self) -> None:
        await self.follower.close()
        await self.router.close()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path / "journal.sqlite")
    yield fleet
    await fleet.close()


def serves(table: FleetTable, replica_id: str) -> set[str]:
    return set(table.adapters) - table.replicas[replica_id].refused


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true in time")


async def test_changes_are_applied_and_acknowledged(fleet: Fleet) -> None:
    await fleet.join()
    first = await fleet.router.load("a", "/a")
    assert first.status is LoRAStatus.SUCCESS, first.message
    assert fleet.engine.loaded == {"a": first.epoch}
    await fleet.router.load("b", "/b")
    assert (await fleet.router.unload("a")).status is LoRAStatus.SUCCESS
    assert fleet.engine.done == [("load", "a"), ("load", "b"), ("unload", "a")]


async def test_a_late_replica_has_everything_before_it_serves(fleet: Fleet) -> None:
    await fleet.join()
    epochs = [(await fleet.router.load(name, f"/{name}")).epoch for name in "abc"]
    late = Engine()
    follower = AdapterFollower(fleet.line, late.apply, "replica-2", num_slots=4)
    await follower.join()
    assert late.loaded == dict(zip("abc", epochs, strict=True))
    assert follower.epoch == fleet.follower.epoch
    await follower.close()


async def test_a_refused_adapter_is_reported_and_not_fatal(fleet: Fleet) -> None:
    await fleet.join()
    outcome = await fleet.router.load("broken", "/bad")
    assert outcome.status is LoRAStatus.LOAD_INVALID_ADAPTER
    assert "its files are bad" in outcome.message
    assert (await fleet.router.load("fine", "/fine")).status is LoRAStatus.SUCCESS


async def test_a_refused_adapter_of_the_configuration_is_fatal_and_named(fleet: Fleet) -> None:
    fleet.settings["lora_paths"] = ["fine=/fine", "wrong=/bad"]
    await fleet.restart_router()
    with pytest.raises(ConfigError, match=r"'wrong'.*its files are bad"):
        await fleet.follower.join()


async def test_files_that_changed_since_do_not_keep_a_replica_from_starting(fleet: Fleet) -> None:
    fleet.settings["lora_paths"] = ["a=/a", "b=/b"]
    await fleet.restart_router()
    await fleet.join()
    await fleet.router.load("run-time", "/r")
    late = Engine()
    late.content_hash = "other files"
    follower = AdapterFollower(fleet.line, late.apply, "replica-2", num_slots=4)
    await follower.join()
    assert late.loaded == {}
    assert follower.refusal("a") == "its files are other ones"
    assert fleet.follower.refusal("a") is None
    assert (await fleet.router.table()).replicas["replica-2"].refused == {"a", "b", "run-time"}
    await follower.close()


async def test_a_replica_with_other_files_than_those_that_were_loaded_meanwhile_gives_them_up(fleet: Fleet) -> None:
    fleet.settings["lora_paths"] = ["a=/a"]
    await fleet.restart_router()
    other = Engine()
    other.content_hash = "other files"
    other.gate.clear()
    follower = AdapterFollower(fleet.line, other.apply, "replica-2", num_slots=4)
    joining = asyncio.create_task(follower.join())
    await until(lambda: "register" in fleet.line.calls)
    await fleet.follower.join()
    other.gate.set()
    await joining
    assert other.done == [("load", "a"), ("unload", "a")]
    assert other.loaded == {}
    assert follower.refusal("a") is not None
    assert (await fleet.router.table()).replicas["replica-2"].refused == {"a"}
    await follower.close()


@pytest.mark.parametrize("is_done", [True, False])
async def test_content_that_no_router_has_compared_is_compared_by_the_next_one(is_done: bool, fleet: Fleet) -> None:
    fleet.settings["lora_paths"] = ["a=/a"]
    await fleet.restart_router()
    other = Engine()
    other.content_hash = "other files"
    other.gate.clear()
    follower = AdapterFollower(fleet.line, other.apply, "replica-2", num_slots=4)
    joining = asyncio.create_task(follower.join())
    await until(lambda: "register" in fleet.line.calls)
    await fleet.follower.join()
    # It loads without knowing what the first one found, and can tell nobody before the router is another one.
    fleet.line.down.add("acknowledge")
    if is_done:
        other.gate.set()
        await until(lambda: other.loaded != {})
    await fleet.restart_router()
    await until(lambda: len(fleet.router._members.live) == 2)
    other.gate.set()
    fleet.line.down.clear()
    await joining
    await until(lambda: not fleet.router._members.get("replica-2").pending)
    assert other.loaded == {}
    assert follower.refusal("a") is not None
    assert fleet.engine.loaded != {}
    assert (await fleet.router.table()).replicas["replica-2"].refused == {"a"}
    await follower.close()


async def test_content_that_only_the_replicas_know_is_told_to_the_next_router(fleet: Fleet) -> None:
    fleet.settings["lora_paths"] = ["a=/a"]
    await fleet.restart_router()
    await fleet.join()
    with closing(sqlite3.connect(fleet.settings["journal"])) as database:
        database.execute("UPDATE adapters SET content_hash = NULL, report = NULL")
        database.commit()
    await fleet.restart_router()
    await until(lambda: fleet.router._registry.entries["a"].content_hash == "as on every node")
    assert fleet.engine.done == [("load", "a")], "it is not read again"
    assert serves(await fleet.router.table(), "replica-1") == {"a"}


async def test_a_request_waits_for_the_change_it_needs_while_there_is_no_router(fleet: Fleet) -> None:
    fleet.settings["change_timeout_s"] = 0.2
    await fleet.restart_router()
    second = Engine()
    follower = AdapterFollower(Line(fleet.router), second.apply, "replica-2", num_slots=4)
    await follower.join()
    await fleet.join()
    await fleet.router.load("a", "/old")
    fleet.engine.gate.clear()
    assert (await fleet.router.unload("a")).status is LoRAStatus.SUCCESS
    outcome = await fleet.router.load("a", "/new")
    assert (outcome.status, outcome.behind) == (LoRAStatus.PARTIAL, ["replica-1"])
    await follower.close()
    fleet.line.down.add("register")
    await fleet.restart_router()
    await until(lambda: fleet.line.calls.count("register") >= 2)
    fleet.engine.gate.set()
    await fleet.follower.wait_for("a", outcome.epoch, 2)
    assert fleet.engine.loaded == {"a": outcome.epoch}
    fleet.line.down.clear()
    await until(lambda: fleet.router._members.live != [])
    await until(lambda: fleet.router._members.live[0].pending == {})
    assert fleet.engine.loaded == {"a": outcome.epoch}
    assert fleet.engine.done == [("load", "a"), ("unload", "a"), ("load", "a")], "it was done once"


async def test_pins_are_applied_and_told_to_a_router_that_restarts(fleet: Fleet) -> None:
    await fleet.join()
    await fleet.router.load("a", "/a")
    assert (await fleet.router.pin("a")).status is LoRAStatus.SUCCESS
    await fleet.restart_router()
    assert (await fleet.router.load("b", "/b")).status is LoRAStatus.SUCCESS
    assert fleet.engine.done == [("load", "a"), ("pin", "a"), ("load", "b")], "nothing was done twice"
    late = Engine()
    follower = AdapterFollower(fleet.line, late.apply, "replica-2", num_slots=4)
    await follower.join()
    assert sorted(late.done) == [("load", "a"), ("load", "b"), ("pin", "a")]
    assert late.done.index(("load", "a")) < late.done.index(("pin", "a"))
    await follower.close()


async def test_a_load_that_was_not_answered_in_time_does_not_come_into_effect_later(fleet: Fleet) -> None:
    await fleet.join()
    await fleet.router.load("a", "/old")
    fleet.engine.fault, fleet.engine.fault_of = RequestTimeout("no answer within 300 s"), LoRAOperation.LOAD
    outcome = await fleet.router.load("a", "/new", load_inplace=True)
    assert outcome.status is LoRAStatus.UNAVAILABLE
    assert "no answer within 300 s" in outcome.message
    fleet.engine.fault = None
    assert fleet.engine.loaded.keys() == {"a"}
    assert (await fleet.router.load("b", "/b")).status is LoRAStatus.SUCCESS
    # At once by the replica itself, then as the router actor undoes the load everywhere.
    assert fleet.engine.done == [("load", "a"), *[("unload", "a\x1freplacement")] * 2, ("load", "b")]


async def test_a_load_that_was_answered_too_late_can_be_repeated(fleet: Fleet) -> None:
    await fleet.join()
    outcome = await fleet.router.load("a", "/a")
    late = Engine()
    late.is_late = True
    follower = AdapterFollower(fleet.line, late.apply, "replica-2", num_slots=4)
    await follower.join()
    assert late.done == [("load", "a"), ("unload", "a")]
    assert follower.refusal("a") == "no answer within 300 s"
    late.is_late = False
    repeated = await fleet.router.load("a", "/a")
    assert repeated.message == "adapter 'a' was loaded already"
    assert (repeated.epoch, repeated.report) == (outcome.epoch, outcome.report)
    assert follower.refusal("a") is None
    assert follower._held.generations == {"a": outcome.epoch}
    assert [state.refused for state in (await fleet.router.table()).replicas.values()] == [frozenset()] * 2
    await follower.close()


async def test_a_router_that_lost_everything_but_its_journal_is_joined_again(fleet: Fleet) -> None:
    await fleet.join()
    await fleet.router.load("a", "/a")
    await fleet.restart_router()
    outcome = await fleet.router.load("b", "/b")
    assert outcome.status is LoRAStatus.SUCCESS, outcome.message
    # Nothing was loaded twice.
    assert fleet.engine.done == [("load", "a"), ("load", "b")]


async def test_what_a_router_no_longer_knows_is_unloaded(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.join()
    await fleet.router.load("a", "/a")
    await fleet.router.load("b", "/b")
    fleet.settings["journal"] = str(tmp_path / "another.sqlite")
    await fleet.restart_router()
    outcome = await fleet.router.load("c", "/c")
    assert outcome.status is LoRAStatus.SUCCESS, outcome.message
    assert list(fleet.engine.loaded) == ["c"]


async def test_a_cut_line_is_tried_again_until_it_works(fleet: Fleet) -> None:
    await fleet.join()
    await until(lambda: "wait_changes" in fleet.line.calls)
    fleet.line.cut = True
    load = asyncio.create_task(fleet.router.load("a", "/a"))
    # The long poll under way still brings the change; its acknowledgement does not get through.
    await until(lambda: fleet.engine.done == [("load", "a")])
    await asyncio.sleep(0.1)
    assert not load.done()
    fleet.line.cut = False
    assert (await load).status is LoRAStatus.SUCCESS
    assert fleet.engine.done == [("load", "a")]


@pytest.mark.parametrize("method", ["acknowledge", "wait_changes"])
async def test_one_lost_call_loses_nothing(fleet: Fleet, method: str) -> None:
    await fleet.join()
    fleet.line.fail_next = {method}
    outcomes = [await fleet.router.load(name, f"/{name}") for name in "ab"]
    assert [outcome.status for outcome in outcomes] == [LoRAStatus.SUCCESS] * 2
    assert fleet.engine.done == [("load", "a"), ("load", "b")]
    assert not fleet.line.fail_next


async def test_a_long_load_does_not_cost_the_lease(fleet: Fleet) -> None:
    await fleet.join()
    fleet.engine.gate.clear()
    load = asyncio.create_task(fleet.router.load("a", "/a"))
    # More than two leases.
    await asyncio.sleep(1.5)
    assert list((await fleet.router.table()).replicas) == ["replica-1"]
    fleet.engine.gate.set()
    assert (await load).status is LoRAStatus.SUCCESS
    assert fleet.line.calls.count("register") == 1


async def test_a_dead_engine_says_nothing_of_an_adapter(fleet: Fleet) -> None:
    await fleet.join()
    fleet.engine.dead = True
    load = asyncio.create_task(fleet.router.load("a", "/a"))
    await asyncio.sleep(0.3)
    assert not load.done()
    fleet.engine.dead = False
    assert (await load).status is LoRAStatus.SUCCESS


async def test_an_unforeseen_fault_fails_its_own_change_and_no_other(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.join()
    fleet.engine.fault = ValueError("a tensor of another shape")
    outcome = await asyncio.wait_for(fleet.router.load("a", "/a"), 3)
    assert outcome.status is LoRAStatus.LOAD_ERROR
    assert "ValueError: a tensor of another shape" in outcome.message
    assert "Traceback" in caplog.text
    fleet.engine.fault = None
    assert (await fleet.router.load("b", "/b")).status is LoRAStatus.SUCCESS
    fleet.engine.fault = KeyError("b")
    outcome = await asyncio.wait_for(fleet.router.unload("b"), 3)
    assert outcome.status is LoRAStatus.UNLOAD_ERROR
    assert "KeyError" in outcome.message


async def test_a_replica_forgotten_while_it_joins_joins_again(fleet: Fleet) -> None:
    fleet.settings["lora_paths"] = ["first=/first", "second=/second"]
    await fleet.restart_router()
    fleet.engine.gate.clear()
    joining = asyncio.create_task(fleet.follower.join())
    await until(lambda: "register" in fleet.line.calls)
    fleet.settings["lora_paths"] = ["first=/first", "third=/third"]
    await fleet.restart_router()
    fleet.engine.gate.set()
    await asyncio.wait_for(joining, 5)
    assert set((await fleet.router.table()).replicas) == {"replica-1"}
    # What its first router had it load is kept, and only the difference applied.
    assert sorted(fleet.engine.done) == [
        *[("load", name) for name in ("first", "second", "third")],
        ("unload", "second"),
    ]
    assert set(fleet.engine.loaded) == {"first", "third"}


@pytest.mark.parametrize("method", ["register", "acknowledge"])
async def test_one_lost_call_does_not_keep_a_replica_from_joining(fleet: Fleet, method: str) -> None:
    fleet.line.fail_next = {method}
    await fleet.follower.join()
    assert set((await fleet.router.table()).replicas) == {"replica-1"}


async def test_joining_is_given_up_in_the_end(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_follower, "FIRST_PAUSE_S", 0.01)
    fleet.line.cut = True
    with pytest.raises(ConnectionError, match="the line is cut"):
        await asyncio.wait_for(fleet.follower.join(), 5)
    assert fleet.line.calls == ["register"] * adapter_follower.JOIN_ATTEMPTS


async def test_a_dead_engine_ends_the_joining_at_once(fleet: Fleet) -> None:
    fleet.settings["lora_paths"] = ["first=/first"]
    await fleet.restart_router()
    fleet.engine.dead = True
    with pytest.raises(EngineDead):
        await asyncio.wait_for(fleet.follower.join(), 1)
    assert fleet.line.calls.count("register") == 1


async def test_a_request_waits_for_the_change_it_needs(fleet: Fleet) -> None:
    await fleet.join()
    await fleet.follower.wait_for("a", 0, 0)
    fleet.engine.gate.clear()
    load = asyncio.create_task(fleet.router.load("a", "/a"))
    needed = fleet.follower.epoch + 1
    with pytest.raises(RequestTimeout, match=f"'a' as it is from epoch {needed} on"):
        await fleet.follower.wait_for("a", needed, 0.05)
    waiting = asyncio.create_task(fleet.follower.wait_for("a", needed, 5))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    fleet.engine.gate.set()
    await waiting
    await load


async def test_residency_is_reported_and_repeated_to_a_new_router(fleet: Fleet) -> None:
    await fleet.join()
    outcome = await fleet.router.load("a", "/a")
    held = AdapterRef("a", outcome.epoch)
    fleet.follower.report(Residency(1, [], [held]))
    fleet.follower.report(Residency(2, [held], [held]))

    async def resident() -> set[str]:
        replicas = (await fleet.router.table()).replicas
        return set(replicas["replica-1"].resident) if "replica-1" in replicas else set()

    for restart in (False, True):
        if restart:
            await fleet.restart_router()
        for _ in range(500):
            if await resident() == {"a"}:
                break
            await asyncio.sleep(0.01)
        assert await resident() == {"a"}


async def test_a_forgotten_replica_registers_again_by_itself(fleet: Fleet) -> None:
    await fleet.join()
    await fleet.restart_router()
    await until(lambda: fleet.line.calls.count("register") == 2)
    assert await fleet.router.acknowledge("replica-1", []) == []
    with pytest.raises(ReplicaUnknown):
        await fleet.router.acknowledge("replica-2", [])


# One adapter's slow load


async def test_a_load_that_never_ends_delays_no_other_adapter(fleet: Fleet) -> None:
    await fleet.join()
    before = await fleet.router.load("before", "/before")
    fleet.engine.hold("/hub")
    fleet.engine.contents = {"/a2": "newer"}
    slow = asyncio.create_task(fleet.router.load("slow", "/hub"))
    await until(lambda: not fleet.follower._lanes.is_through("slow", before.epoch + 1))

    async def use() -> None:
        assert (await fleet.router.load("a", "/a")).status is LoRAStatus.SUCCESS
        assert (await fleet.router.pin("a")).status is LoRAStatus.SUCCESS
        reload = await fleet.router.load("a", "/a2", load_inplace=True)
        assert reload.status is LoRAStatus.SUCCESS
        assert reload.message == "adapter 'a' is replaced on 1 replica(s)"
        await fleet.follower.wait_for("a", reload.epoch, 1)
        assert (await fleet.router.unpin("a")).status is LoRAStatus.SUCCESS
        assert (await fleet.router.unload("before")).status is LoRAStatus.SUCCESS
        assert (await fleet.router.load("before", "/new")).status is LoRAStatus.SUCCESS
        assert (await fleet.router.load("bad", "/bad")).status is LoRAStatus.LOAD_INVALID_ADAPTER

    await asyncio.wait_for(use(), 3)
    table = await fleet.router.table()
    assert set(table.adapters) == {"a", "before"}
    assert serves(table, "replica-1") == {"a", "before"}
    assert not slow.done()
    fleet.engine.downloads["/hub"].set()
    assert (await slow).status is LoRAStatus.SUCCESS
    assert serves(await fleet.router.table(), "replica-1") == {"a", "before", "slow"}


async def test_changes_of_one_adapter_stay_in_order(fleet: Fleet) -> None:
    fleet.settings["change_timeout_s"] = 0.2
    await fleet.restart_router()
    await fleet.join()
    fleet.engine.hold("/hub")
    assert (await fleet.router.load("a", "/hub")).status is LoRAStatus.UNAVAILABLE
    # Its name is free, though the replica is still at the load.
    again = asyncio.create_task(fleet.router.load("a", "/disk"))
    await asyncio.sleep(0.05)
    assert fleet.engine.done == []
    fleet.engine.downloads["/hub"].set()
    outcome = await again
    assert outcome.status is LoRAStatus.SUCCESS, outcome.message
    assert fleet.engine.done == [("load", "a"), ("unload", "a"), ("load", "a")]
    assert fleet.engine.loaded == {"a": outcome.epoch}


async def test_what_is_staged_keeps_its_place_in_the_order_of_the_adapter(fleet: Fleet) -> None:
    fleet.settings["change_timeout_s"] = 0.3
    await fleet.restart_router()
    await fleet.join()
    await fleet.router.load("a", "/old")
    staged = "a\x1freplacement"
    fleet.engine.hold("/new")
    fleet.engine.contents = {"/newer": "newer"}
    assert (await fleet.router.load("a", "/new", load_inplace=True)).status is LoRAStatus.UNAVAILABLE
    swap = asyncio.create_task(fleet.router.load("a", "/newer", load_inplace=True))
    await asyncio.sleep(0.05)
    fleet.engine.downloads["/new"].set()
    assert (await swap).status is LoRAStatus.SUCCESS
    await until(lambda: fleet.engine.done[-1] == ("unload", staged))
    assert fleet.engine.done == [
        ("load", "a"),
        *[("load", staged), ("unload", staged)],
        *[("load", staged), ("load", "a"), ("unload", staged)],
    ]


async def test_as_many_loads_run_at_once_as_the_engine_has_loaders(fleet: Fleet) -> None:
    await fleet.join()
    names = [f"a{number}" for number in range(NUM_LOADERS + 2)]
    await asyncio.gather(*(fleet.router.load(name, f"/{name}") for name in names))
    running, most, engine = 0, 0, Engine()

    async def apply(request: LoRARequest) -> LoRAResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return await engine.apply(request)

    late = AdapterFollower(fleet.line, apply, "replica-2", num_slots=4)
    await late.join()
    assert most == NUM_LOADERS
    assert engine.loaded.keys() == set(names)
    await late.close()


async def test_any_number_of_loads_that_never_end_delay_no_other_adapter_for_long(fleet: Fleet) -> None:
    fleet.follower._held._places = Places(NUM_LOADERS, patience_s=0.1)
    await fleet.join()
    paths = [f"/hub/{number}" for number in range(2 * NUM_LOADERS)]
    fleet.engine.hold(*paths)
    slow = [asyncio.create_task(fleet.router.load(path, path)) for path in paths]
    await asyncio.sleep(0.05)
    assert (await asyncio.wait_for(fleet.router.load("a", "/a"), 3)).status is LoRAStatus.SUCCESS
    assert not any(load.done() for load in slow)
    for path in paths:
        fleet.engine.downloads[path].set()
    assert {(await load).status for load in slow} == {LoRAStatus.SUCCESS}


async def test_a_late_replica_at_a_slow_load_delays_no_other_adapter_and_serves_when_it_is_done(fleet: Fleet) -> None:
    await fleet.join()
    slow = await fleet.router.load("slow", "/hub")
    await fleet.router.load("fast", "/fast")
    late = Engine()
    late.hold("/hub")
    follower = AdapterFollower(fleet.line, late.apply, "replica-2", num_slots=4)
    joining = asyncio.create_task(follower.join())
    await until(lambda: ("load", "fast") in late.done)
    outcome = await asyncio.wait_for(fleet.router.load("a", "/a"), 2)
    assert set(outcome.per_replica) == {"replica-1", "replica-2"}
    assert (await asyncio.wait_for(fleet.router.pin("fast"), 2)).status is LoRAStatus.SUCCESS
    assert (await asyncio.wait_for(fleet.router.unload("fast"), 2)).status is LoRAStatus.SUCCESS
    table = await fleet.router.table()
    states = table.replicas
    assert [serves(table, name) for name in ("replica-1", "replica-2")] == [{"a", "slow"}, {"a"}]
    assert [states[name].refused for name in ("replica-1", "replica-2")] == [frozenset(), {"slow"}]
    status = await fleet.router.describe("slow")
    assert status is not None
    assert status.replicas == {"replica-1": "loaded", "replica-2": "loading"}
    assert not joining.done(), "it takes no requests before it has everything"
    late.downloads["/hub"].set()
    await joining
    assert late.loaded == {"slow": slow.epoch, "a": outcome.epoch}
    assert serves(await fleet.router.table(), "replica-2") == {"a", "slow"}
    await follower.close()


async def test_a_router_that_restarts_during_a_load_has_it_undone(fleet: Fleet) -> None:
    await fleet.join()
    kept = await fleet.router.load("kept", "/kept")
    fleet.engine.hold("/hub")
    interrupted = asyncio.create_task(fleet.router.load("slow", "/hub"))
    queued = asyncio.create_task(fleet.router.load("bad", "/bad"))
    await queued
    interrupted.cancel()
    await fleet.restart_router()
    # Nobody has been told of the load: the name is free, and others do not wait for it.
    outcome = await asyncio.wait_for(fleet.router.load("a", "/a"), 2)
    assert outcome.status is LoRAStatus.SUCCESS
    again = asyncio.create_task(fleet.router.load("slow", "/other"))
    await asyncio.sleep(0.05)
    assert not again.done()
    fleet.engine.downloads["/hub"].set()
    slow = await again
    assert slow.status is LoRAStatus.SUCCESS, slow.message
    assert fleet.engine.loaded == {"kept": kept.epoch, "a": outcome.epoch, "slow": slow.epoch}
    changes = [change for change in fleet.engine.done if change[1] == "slow"]
    assert changes == [("load", "slow"), ("unload", "slow"), ("load", "slow")]


async def test_a_router_that_restarts_during_a_late_load_still_has_it_done(fleet: Fleet) -> None:
    await fleet.join()
    slow = await fleet.router.load("slow", "/hub")
    late = Engine()
    late.hold("/hub")
    follower = AdapterFollower(fleet.line, late.apply, "replica-2", num_slots=4)
    joining = asyncio.create_task(follower.join())
    await until(lambda: fleet.line.calls.count("register") == 2)
    await asyncio.sleep(0.02)
    await fleet.restart_router()
    await until(lambda: fleet.line.calls.count("register") == 4)
    assert (await asyncio.wait_for(fleet.router.load("a", "/a"), 2)).status is LoRAStatus.SUCCESS
    late.downloads["/hub"].set()
    await joining
    assert late.done.count(("load", "slow")) == 1, "not loaded twice"
    assert late.loaded["slow"] == slow.epoch
    assert serves(await fleet.router.table(), "replica-2") == {"a", "slow"}
    await follower.close()


async def test_a_pin_under_way_when_the_router_forgot_it_is_taken_back(fleet: Fleet, tmp_path: Path) -> None:
    fleet.settings["lora_paths"] = ["a=/a"]
    await fleet.restart_router()
    await fleet.join()
    fleet.engine.gate.clear()
    pin = asyncio.create_task(fleet.router.pin("a"))
    await until(lambda: not fleet.follower._lanes.is_through("a", fleet.follower.epoch))
    pin.cancel()
    fleet.settings["journal"] = str(tmp_path / "another.sqlite")
    await fleet.restart_router()
    await until(lambda: fleet.line.calls.count("register") == 2)
    fleet.engine.gate.set()
    assert (await fleet.router.load("b", "/b")).status is LoRAStatus.SUCCESS
    await until(lambda: ("unpin", "a") in fleet.engine.done)
    assert fleet.follower._held.pinned == frozenset()


async def test_an_answer_of_before_a_registration_counts_for_nothing_after_it(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.join()
    fleet.engine.hold("/hub")
    lost = asyncio.create_task(fleet.router.load("a", "/hub"))
    await until(lambda: not fleet.follower._lanes.is_through("a", fleet.follower.epoch))
    lost.cancel()
    fleet.settings["journal"] = str(tmp_path / "another.sqlite")
    await fleet.restart_router()
    await until(lambda: fleet.line.calls.count("register") == 2)
    other = asyncio.create_task(fleet.router.load("a", "/bad"))
    await asyncio.sleep(0.05)
    fleet.engine.downloads["/hub"].set()
    assert (await other).status is LoRAStatus.LOAD_INVALID_ADAPTER
    await until(lambda: fleet.engine.loaded == {})
