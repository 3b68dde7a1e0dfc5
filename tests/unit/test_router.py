"""`AdapterRouter` as a plain object, with replicas that are asyncio tasks."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.changes import Change
from cluster.fleet import FleetTable, LoadOutcome
from cluster.table_changes import applied
from lora_core.errors import ConfigError, ReplicaUnknown, RequestTimeout
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from tests.unit.router_fleet import Replica, fleet, make_router, names, refuse_all, settled


@contextmanager
def unwritable(journal: Path, write: str) -> Iterator[None]:
    """Have the database itself refuse one kind of write."""
    with closing(sqlite3.connect(journal)) as database:
        database.execute(f"CREATE TRIGGER refuse BEFORE {write} BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END")
        yield
        database.execute("DROP TRIGGER refuse")


def contents(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_a_load_reaches_every_replica_before_it_is_answered() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", delay_s=0.1)) as replicas:
        outcome = await router.load("a", "/a")
        assert outcome.status is LoRAStatus.SUCCESS
        assert outcome.per_replica == {"r0": "success: done", "r1": "success: done"}
        (entry,) = (await router.table()).adapters.values()
        assert outcome.epoch == entry.epoch == entry.generation
        assert [replica.holding for replica in replicas] == [{"a": entry.generation}] * 2


async def test_an_adapter_is_not_listed_while_it_is_loading() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0", delay_s=0.1)):
        load = asyncio.create_task(router.load("a", "/a"))
        await asyncio.sleep(0.05)
        assert await names(router) == set()
        await load
        assert await names(router) == {"a"}


async def test_twenty_parallel_loads_of_one_adapter_are_one_load() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0", delay_s=0.05)) as (replica,):
        outcomes = await asyncio.gather(*(router.load("a", "/a") for _ in range(20)))
        assert {outcome.status for outcome in outcomes} == {LoRAStatus.SUCCESS}
        assert len({outcome.epoch for outcome in outcomes}) == 1
        assert len(replica.applied) == 1
        again = await router.load("a", "/a")
        assert (again.status, again.epoch) == (LoRAStatus.SUCCESS, outcomes[0].epoch)
        assert len(replica.applied) == 1


async def test_of_two_loads_with_different_weights_exactly_one_wins_everywhere() -> None:
    router = make_router()
    async with fleet(router, *(Replica(router, f"r{i}", delay_s=0.02 * i) for i in range(3))) as replicas:
        outcomes = await asyncio.gather(router.load("a", "/one"), router.load("a", "/two"), router.load("a", "/one"))
        assert [outcome.status for outcome in outcomes] == [
            LoRAStatus.SUCCESS,
            LoRAStatus.LOAD_NAME_EXISTS,
            LoRAStatus.SUCCESS,
        ]
        assert {replica.paths["a"] for replica in replicas} == {"/one"}
        later = await router.load("a", "/two")
        assert later.status is LoRAStatus.LOAD_NAME_EXISTS
        assert "/one" in later.message
        assert "/two" in later.message


async def test_one_refusal_undoes_the_load_everywhere_and_frees_the_name() -> None:
    router = make_router()
    refuse = refuse_all(LoRAStatus.LOAD_INVALID_ADAPTER, "rank 64 is above 16")
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", refuse)) as (good, bad):
        outcome = await router.load("a", "/a")
        assert outcome.status is LoRAStatus.LOAD_INVALID_ADAPTER
        assert "rank 64 is above 16" in outcome.message
        assert outcome.per_replica["r0"] == "success: done"
        assert await names(router) == set()
        bad.refuse = lambda _: None
        retry = await router.load("a", "/better")
        assert retry.status is LoRAStatus.SUCCESS
        assert good.paths == bad.paths == {"a": "/better"}
        assert [change.request.operation.value for change in good.applied] == ["load", "unload", "load"]


async def test_a_refusal_by_all_is_given_in_their_own_words() -> None:
    router = make_router()
    refuse = refuse_all(LoRAStatus.LOAD_INVALID_PATH, "nothing at /nowhere")
    async with fleet(router, Replica(router, "r0", refuse), Replica(router, "r1", refuse)):
        outcome = await router.load("a", "/nowhere")
        assert (outcome.status, outcome.message) == (LoRAStatus.LOAD_INVALID_PATH, "nothing at /nowhere")


async def test_two_parallel_unloads_are_one_success_and_one_not_found() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0", delay_s=0.05)) as (replica,):
        await router.load("a", "/a")
        outcomes = await asyncio.gather(router.unload("a"), router.unload("a"))
        assert [outcome.status for outcome in outcomes] == [LoRAStatus.SUCCESS, LoRAStatus.UNLOAD_NAME_NONEXISTENT]
        assert replica.holding == {}


async def test_an_unloading_adapter_is_unlisted_before_the_replicas_have_dropped_it() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        await router.load("a", "/a")
        replica.delay_s = 0.2
        unload = asyncio.create_task(router.unload("a"))
        await asyncio.sleep(0.05)
        assert await names(router) == set()
        assert "a" in replica.holding
        assert (await unload).status is LoRAStatus.SUCCESS
        assert replica.holding == {}


async def test_unloading_an_unknown_name_says_which_are_known() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        await router.load("known", "/k")
        outcome = await router.unload("ghost")
        assert outcome.status is LoRAStatus.UNLOAD_NAME_NONEXISTENT
        assert "known" in outcome.message


async def test_a_name_can_be_used_again_for_other_weights() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0", delay_s=0.02)) as (replica,):
        first = await router.load("a", "/x")
        unload, second = await asyncio.gather(router.unload("a"), router.load("a", "/y"))
        # Asked for at once, in this order: the load waits for the unload.
        assert (unload.status, second.status) == (LoRAStatus.SUCCESS, LoRAStatus.SUCCESS)
        assert second.epoch > first.epoch
        assert replica.paths == {"a": "/y"}
        assert replica.holding == {"a": second.epoch}


async def test_five_hundred_cycles_leave_nothing_behind() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        for i in range(250):
            assert (await router.load(f"a{i % 7}", f"/{i}")).status is LoRAStatus.SUCCESS
            assert (await router.unload(f"a{i % 7}")).status is LoRAStatus.SUCCESS
        assert replica.holding == {}
        (member,) = router._members.live
        await settled(lambda: not member.pending)
        assert (member.refusals, member.successes, member.swapping) == ({}, {}, set())
        assert router._operations.is_idle


async def test_without_replicas_a_load_fails_and_registers_nothing() -> None:
    router = make_router(lease_s=0.1)
    outcome = await router.load("a", "/a")
    assert outcome.status is LoRAStatus.UNAVAILABLE
    assert "no replica is running" in outcome.message
    async with fleet(router, Replica(router, "r0")) as (replica,):
        assert replica.applied == []
        assert (await router.load("a", "/other")).status is LoRAStatus.SUCCESS


async def test_just_after_a_start_a_load_waits_for_the_first_replica() -> None:
    router = make_router(lease_s=2)
    load = asyncio.create_task(router.load("a", "/a"))
    await asyncio.sleep(0.1)
    async with fleet(router, Replica(router, "r0")):
        assert (await load).status is LoRAStatus.SUCCESS


async def test_a_replica_that_dies_during_a_load_drops_out() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0"), Replica(router, "dying", delay_s=60)) as (alive, dying):
        load = asyncio.create_task(router.load("a", "/a"))
        await settled(lambda: "a" in alive.holding)
        await dying.stop()
        outcome = await asyncio.wait_for(load, 3)
        assert (outcome.status, list(outcome.per_replica)) == (LoRAStatus.SUCCESS, ["r0"])
        assert set((await router.table()).replicas) == {"r0"}


async def test_when_every_replica_dies_during_a_load_it_is_undone() -> None:
    router = make_router(lease_s=0.2)
    async with fleet(router, Replica(router, "dying", delay_s=60)) as (dying,):
        load = asyncio.create_task(router.load("a", "/a"))
        await asyncio.sleep(0.05)
        await dying.stop()
        outcome = await asyncio.wait_for(load, 3)
        assert outcome.status is LoRAStatus.UNAVAILABLE
        assert "died" in outcome.message
        assert not router._registry.entries


async def test_a_live_replica_that_never_answers_is_waited_for_a_bounded_time() -> None:
    router = make_router(change_timeout_s=0.3)

    class Mute(Replica):
        async def follow(self) -> None:
            while True:
                await self.router.wait_changes(self.name, router._registry.epoch, 0.1)

    async with fleet(router, Replica(router, "r0"), Mute(router, "mute")) as (good, _):
        outcome = await asyncio.wait_for(router.load("a", "/a"), 2)
        assert (outcome.status, outcome.behind) == (LoRAStatus.PARTIAL, ["mute"])
        assert "change_timeout_s" in outcome.message
        table = await router.table()
        assert [table.replicas[name].refused for name in ("r0", "mute")] == [frozenset(), {"a"}]
        assert good.paths == {"a": "/a"}


async def test_waiting_for_changes_keeps_a_replica_that_is_long_at_work() -> None:
    router = make_router(lease_s=0.2)

    class Busy(Replica):
        async def apply(self, change: Change) -> LoRAResponse:
            for _ in range(6):
                assert await self.router.wait_changes(self.name, change.epoch, 0.1) == []
            return await super().apply(change)

    async with fleet(router, Busy(router, "busy")):
        outcome = await router.load("a", "/a")
        assert (outcome.status, list(outcome.per_replica)) == (LoRAStatus.SUCCESS, ["busy"])


async def test_a_cancelled_caller_leaves_a_load_to_complete() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0", delay_s=0.1)):
        load = asyncio.create_task(router.load("a", "/a"))
        await asyncio.sleep(0.02)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        # An identical load joins what is still under way.
        assert (await router.load("a", "/a")).status is LoRAStatus.SUCCESS
        assert await names(router) == {"a"}


async def test_a_cancelled_caller_leaves_a_refused_load_to_roll_back() -> None:
    router = make_router()
    refuse = refuse_all(LoRAStatus.LOAD_INVALID_ADAPTER, "no")
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", refuse, delay_s=0.1)) as (good, _):
        load = asyncio.create_task(router.load("a", "/a"))
        await settled(lambda: "a" in good.holding)
        load.cancel()
        await settled(lambda: good.holding == {})
        assert not router._registry.entries


async def test_a_late_replica_is_given_everything_and_then_counts() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (first,):
        await router.load("a", "/a")
        await router.load("b", "/b")
        await router.unload("a")
        late = await Replica(router, "late").start()
        assert late.holding == first.holding
        outcome = await router.load("c", "/c")
        assert set(outcome.per_replica) == {"r0", "late"}
        await late.stop()


async def test_a_replica_that_joins_during_a_load_takes_part_in_it() -> None:
    router = make_router()
    refuse = refuse_all(LoRAStatus.LOAD_ERROR, "disk full")
    async with fleet(router, Replica(router, "r0", delay_s=0.2)) as (first,):
        load = asyncio.create_task(router.load("a", "/a"))
        await asyncio.sleep(0.05)
        late = await Replica(router, "late", refuse).start()
        outcome = await load
        assert (outcome.status, outcome.behind) == (LoRAStatus.PARTIAL, ["late"])
        assert "late does not serve it (disk full)" in outcome.message
        assert (list(first.holding), late.holding) == (["a"], {})
        await late.stop()


async def test_a_refusal_of_the_adapter_counts_for_more_than_a_replica_that_did_not_answer() -> None:
    router = make_router()

    def time_out(request: LoRARequest) -> LoRAResponse | None:
        if request.operation is LoRAOperation.LOAD:
            raise RequestTimeout("no answer within 300 s")
        return None

    refuse = refuse_all(LoRAStatus.LOAD_INVALID_ADAPTER, "rank 64 is above 16")
    async with fleet(router, Replica(router, "r0", time_out), Replica(router, "r1", refuse)) as (_, strict):
        outcome = await router.load("a", "/a")
        assert outcome.status is LoRAStatus.LOAD_INVALID_ADAPTER, "trying again cannot help"
        assert "no answer within 300 s" in outcome.message
        strict.refuse = lambda _: None
        again = await router.load("a", "/a")
        assert (again.status, again.behind) == (LoRAStatus.PARTIAL, ["r0"])


async def test_a_late_replica_that_cannot_load_a_served_adapter_is_shown_as_refusing_it() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        await router.load("a", "/a")
        late = await Replica(router, "late", refuse_all(LoRAStatus.LOAD_INVALID_PATH, "not on this host")).start()
        table = await router.table()
        assert set(table.adapters) == {"a"}
        assert [table.replicas[name].refused for name in ("r0", "late")] == [frozenset(), {"a"}]
        await late.stop()


async def test_unknown_and_expired_replicas_are_told_to_register() -> None:
    router = make_router(lease_s=0.1)
    for call in (
        router.wait_changes("ghost", 0, 1),
        router.acknowledge("ghost", []),
        router.report_residency("ghost", Residency(1, [], []), 1),
    ):
        with pytest.raises(ReplicaUnknown, match="ghost"):
            await call
    registration = await router.register("r0")
    poll = asyncio.create_task(router.wait_changes("r0", registration.epoch, 5))
    version = (await router.table()).version
    table = await router.watch(version, 2)
    assert isinstance(table, FleetTable)
    assert table.replicas == {}, "an expired lease is news"
    with pytest.raises(ReplicaUnknown):
        await poll
    await router.close()


async def test_a_router_that_was_held_up_hears_its_replicas_and_then_drops_the_silent() -> None:
    router = make_router(lease_s=0.2)
    async with fleet(router, Replica(router, "r0")) as (replica,):
        time.sleep(0.5)  # noqa: ASYNC251 - the whole loop stands still, as in a long pause of the process
        await asyncio.sleep(0.05)
        assert set((await router.table()).replicas) == {"r0"}
        await replica.stop()
        await settled(lambda: not router._members.live)


async def test_residency_is_published_for_the_generations_now_served() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        generation = (await router.load("a", "/a")).epoch
        await router.load("b", "/b")
        table = await router.table()
        assert (table.replicas["r0"].resident, table.replicas["r0"].sequence) == (frozenset(), -1)
        stale, current = AdapterRef("b", 1), AdapterRef("a", generation)
        await router.report_residency("r0", Residency(5, [current, stale], [current], [stale, current]), 4)
        assert await router.watch(table.version, 1) is not table
        state = (await router.table()).replicas["r0"]
        assert state.resident == {"a"}
        assert state.in_memory == {"a"}
        assert not state.refused, "both are acknowledged, if not reported yet"
        assert (state.num_slots, state.num_slots_used, state.sequence) == (4, 2, 5)


async def test_where_a_replica_has_an_adapter_is_told() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        ref = AdapterRef("a", (await router.load("a", "/a")).epoch)
        tiers = []
        for sequence, (slot, host) in enumerate([([], []), ([], [ref]), ([ref], [ref]), ([ref], [])]):
            await router.report_residency("r0", Residency(sequence, slot, [ref], host), 4)
            described = await router.describe("a")
            assert described is not None
            tiers.append((described.replicas["r0"], "a" in (await router.table()).replicas["r0"].in_memory))
        assert tiers == [("disk", False), ("host", True), ("slot", True), ("slot", False)]


async def test_reports_that_arrive_late_are_ignored() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        ref = AdapterRef("a", (await router.load("a", "/a")).epoch)
        await router.report_residency("r0", Residency(2, [ref], [ref]), 4)
        await router.report_residency("r0", Residency(1, [], []), 4)
        assert (await router.table()).replicas["r0"].resident == {"a"}


async def test_watching_returns_at_once_for_an_old_version_and_waits_for_a_new_one() -> None:
    router = make_router()
    table = await router.table()
    before = time.monotonic()
    assert await router.watch(table.version, 0.1) is table
    assert time.monotonic() - before >= 0.1
    assert await router.watch(table.version, 0.1, table.router_id) == []
    for version, router_id in ((table.version, "of a router before"), (table.version + 1, table.router_id)):
        assert await asyncio.wait_for(router.watch(version, 5, router_id), 1) is table
    watch = asyncio.create_task(router.watch(table.version, 5, table.router_id))
    await asyncio.sleep(0.01)
    await router.register("r0")
    deltas = await asyncio.wait_for(watch, 1)
    assert isinstance(deltas, list)
    changed = applied(table, deltas)
    assert changed == await router.table()
    assert set(changed.replicas) == {"r0"}
    await router.close()


async def test_a_restarted_router_knows_its_adapters_and_its_replicas_come_back(tmp_path: Path) -> None:
    settings = {"journal": str(tmp_path / "journal.sqlite")}
    router = make_router(**settings)
    replica = await Replica(router, "r0").start()
    generation = (await router.load("a", "/a")).epoch
    gone = (await router.load("b", "/b")).epoch
    slow = await Replica(router, "slow", delay_s=0.01).start()
    slow.delay_s = 60
    interrupted = asyncio.create_task(router.load("c", "/c"))
    await settled(lambda: "c" in replica.holding)
    # Killed here: nothing is closed, and the load's caller gets no answer.
    await asyncio.gather(replica.stop(), slow.stop())
    interrupted.cancel()

    successor = make_router(**settings)
    assert await names(successor) == {"a", "b"}
    await successor.unload("b")
    replica.router, replica.applied = successor, []
    await replica.start()
    assert replica.holding == {"a": generation}
    assert {change.request.lora_name for change in replica.applied} == {"b", "c"}
    assert not (await successor.table()).replicas["r0"].refused
    assert (await successor.load("b", "/new")).epoch > gone
    await replica.stop()
    await successor.close()


@pytest.mark.parametrize("settings", [{}, {"journal": None}, {"journal": ":memory:"}])
async def test_a_router_without_a_journal_leaves_no_file(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    router = make_router(**settings)
    async with fleet(router, Replica(router, "r0")):
        assert (await router.load("a", "/a")).status is LoRAStatus.SUCCESS
    assert contents(tmp_path) == []
    assert await names(make_router(**settings)) == set()


async def test_a_journal_that_refuses_a_commit_undoes_the_load_and_frees_the_name(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    router = make_router(journal=str(path))
    async with fleet(router, Replica(router, "r0")) as (replica,):
        with unwritable(path, "INSERT ON adapters WHEN NEW.state = 'ready'"):
            outcome = await router.load("a", "/a")
            assert outcome.status is LoRAStatus.LOAD_ERROR
            assert str(path) in outcome.message
            assert "router.journal" in outcome.message
            await settled(lambda: replica.holding == {})
            assert [change.request.operation.value for change in replica.applied] == ["load", "unload"]
            assert await names(router) == set()
        retry = await router.load("a", "/other")
        assert retry.status is LoRAStatus.SUCCESS, retry.message
        assert retry.epoch > replica.applied[1].epoch
        assert replica.paths == {"a": "/other"}
    successor = make_router(journal=str(path))
    assert await names(successor) == {"a"}


async def test_a_journal_that_refuses_a_rollback_leaves_the_name_free(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    router = make_router(journal=str(path))
    refuse = refuse_all(LoRAStatus.LOAD_INVALID_ADAPTER, "rank 64 is above 16")
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", refuse)) as (good, bad):
        with unwritable(path, "DELETE ON adapters"):
            outcome = await router.load("a", "/a")
            assert outcome.status is LoRAStatus.LOAD_INVALID_ADAPTER
            assert "rank 64 is above 16" in outcome.message
            assert str(path) in outcome.message
            await settled(lambda: good.holding == {})
            bad.refuse = lambda _: None
            assert (await router.load("a", "/other")).status is LoRAStatus.SUCCESS
        assert good.paths == bad.paths == {"a": "/other"}


async def test_a_router_that_was_replaced_during_a_load_undoes_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    router = make_router(journal=str(path))
    async with fleet(router, Replica(router, "r0", delay_s=0.1)) as (replica,):
        load = asyncio.create_task(router.load("a", "/a"))
        await settled(lambda: "a" in router._registry.entries)
        successor = make_router(journal=str(path))
        outcome = await load
        assert outcome.status is LoRAStatus.LOAD_ERROR
        assert "replaced" in outcome.message
        await settled(lambda: replica.holding == {})
        assert await names(successor) == set()
        await successor.close()


async def test_a_final_path_is_handed_on_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "allowed").symlink_to(tmp_path / "folder")
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        await router.load("a", str(tmp_path / "allowed"), False, True)
        assert replica.paths == {"a": str(tmp_path / "allowed")}, "the replica finds a link there, and may refuse it"


async def test_all_spellings_of_a_folder_are_one_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = ["adapter", "./adapter", f"{folder}/", f"{tmp_path}/./adapter", "~/adapter", "link", str(folder)]
    router = make_router(lora_paths=["static=./adapter"])
    async with fleet(router, Replica(router, "r0", delay_s=0.05)) as (replica,):
        outcomes = await asyncio.gather(*(router.load("a", path) for path in spellings))
        assert {outcome.status for outcome in outcomes} == {LoRAStatus.SUCCESS}, outcomes
        assert len({outcome.epoch for outcome in outcomes}) == 1
        for name in ("a", "static"):
            for path in spellings:
                assert (await router.load(name, path)).status is LoRAStatus.SUCCESS
        assert replica.paths == {"a": str(folder), "static": str(folder)}


def write_adapter(folder: Path, weights: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.mark.parametrize("lora_paths", [[], ["w={folder}"]])
async def test_a_load_of_files_that_changed_is_refused_until_the_old_ones_are_unloaded(
    lora_paths: list[str], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "w", b"old")
    router = make_router(lora_paths=[entry.format(folder=path) for entry in lora_paths])
    async with fleet(router, Replica(router, "r0")) as (replica,):
        for _ in range(2):
            assert (await router.load("w", path)).status is LoRAStatus.SUCCESS
        (before,) = replica.applied
        write_adapter(tmp_path / "w", b"newer")
        refused = await router.load("w", path)
        assert refused.status is LoRAStatus.LOAD_NAME_EXISTS
        assert refused.message == (
            f"adapter 'w' is loaded from {path!r}, whose files have changed since; "
            "send load_inplace: true to serve the new ones, or unload it first"
        )
        assert replica.applied == [before], "what is served goes on being served"
        await router.unload("w")
        assert (await router.load("w", path)).epoch > before.epoch
        assert (await router.load("w", path)).message == "adapter 'w' was loaded already"


async def test_a_restarted_router_knows_which_files_its_replicas_hold(tmp_path: Path) -> None:
    path, settings = write_adapter(tmp_path / "w", b"old"), {"journal": str(tmp_path / "journal.sqlite")}
    router = make_router(**settings)
    async with fleet(router, Replica(router, "r0")) as (replica,):
        await router.load("w", path)
    successor = make_router(**settings)
    replica.router = successor
    async with fleet(successor, replica):
        assert (await successor.load("w", path)).status is LoRAStatus.SUCCESS
        write_adapter(tmp_path / "w", b"newer")
        assert (await successor.load("w", path)).status is LoRAStatus.LOAD_NAME_EXISTS


async def test_a_folder_that_is_gone_is_no_other_adapter(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "w", b"old")
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        await router.load("w", path)
        (tmp_path / "w").rename(tmp_path / "elsewhere")
        assert (await router.load("w", path)).status is LoRAStatus.SUCCESS


@pytest.mark.parametrize("path", ["org/name@rev", "/elsewhere/./adapter/", "~nobody-of-this-name/x", "~", ""])
async def test_what_is_no_folder_here_is_left_as_it_is(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        await router.load("a", path)
        assert replica.paths == {"a": path}


async def test_static_adapters_are_served_from_the_start() -> None:
    router = make_router(lora_paths=["a=/a", "/b"])
    assert await names(router) == {"a", "/b"}
    replica = await Replica(router, "r0").start()
    assert replica.paths == {"a": "/a", "/b": "/b"}
    assert all(change.static for change in replica.applied)
    await replica.stop()
    await router.close()


@pytest.mark.parametrize(
    ("lora_paths", "complaint"),
    [
        (["base=/x"], "base model's name"),
        (["a=/x", "a=/y"], "given to both '/x' and '/y'"),
        (["=/x"], "empty"),
        (["a="], "no path"),
    ],
)
def test_a_static_adapter_that_cannot_be_is_refused_at_start(lora_paths: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"lora_paths.*{complaint}"):
        make_router(lora_paths=lora_paths)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("", LoRAStatus.LOAD_INVALID_ADAPTER),
        ("  ", LoRAStatus.LOAD_INVALID_ADAPTER),
        ("a\nb", LoRAStatus.LOAD_INVALID_ADAPTER),
        ("a\x00", LoRAStatus.LOAD_INVALID_ADAPTER),
        ("x" * 257, LoRAStatus.LOAD_INVALID_ADAPTER),
        ("base", LoRAStatus.LOAD_NAME_EXISTS),
    ],
)
async def test_names_that_cannot_be_are_refused(name: str, status: LoRAStatus) -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        assert (await router.load(name, "/a")).status is status
        assert replica.applied == []
        assert (await router.load("x" * 256, "/a")).status is LoRAStatus.SUCCESS


async def test_what_no_adapter_can_be_called_is_refused_and_not_remembered() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")):
        for name in ("\ud800", "x" * 1_000_000, "\x1b[2J", "", "a@"):
            for change in (router.unload, router.pin, router.unpin):
                outcome = await change(name)
                assert outcome.status in (LoRAStatus.UNLOAD_NAME_NONEXISTENT, LoRAStatus.PIN_NAME_NONEXISTENT)
        await router.unload("ghost")
        report = await router.fleet_status()
        assert report.failures.keys() == {"ghost"}
        assert msgspec.json.decode(msgspec.json.encode(report))["failures"].keys() == {"ghost"}


async def test_changes_reach_a_replica_in_the_order_of_their_epochs_under_load() -> None:
    router = make_router()

    async def churn(name: str) -> list[LoadOutcome]:
        outcomes = []
        for i in range(15):
            outcomes.append(await router.load(name, f"/{i}"))
            outcomes.append(await router.unload(name))
        return outcomes

    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", delay_s=0.001)) as replicas:
        outcomes = await asyncio.gather(*(churn(name) for name in "abcd"))
        assert {outcome.status for many in outcomes for outcome in many} == {LoRAStatus.SUCCESS}
        for replica in replicas:
            epochs = [change.epoch for change in replica.applied]
            assert epochs == sorted(set(epochs))
            assert replica.holding == {}
