"""Replacing adapters in place, pinning them, and telling replicas apart that hold other content."""

import asyncio
import random
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from cluster.fleet import LoadOutcome
from deployments.router import AdapterRouter
from lora_core.errors import LoRAFleetError, RequestTimeout, RouterReplaced
from lora_core.messages import Residency
from lora_core.types import AdapterRef, LoRAOperation, LoRARequest, LoRAResponse, LoRAStatus
from tests.unit.router_fleet import Replica, fleet, make_router, names, refuse_all, settled


def operations(replica: Replica) -> list[str]:
    """What a replica was asked for, replacements and what is staged for them told from plain loads."""
    return [
        ("swap" if change.request.replace else change.request.operation.value)
        + (" staged" if not change.request.lora_name.isprintable() else "")
        for change in replica.applied
    ]


def contents(replica: Replica) -> dict[str, tuple[str, str]]:
    return {name: (content.path, content.content_hash) for name, content in replica.engine.items()}


async def test_a_replacement_is_a_new_generation_on_every_replica() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", delay_s=0.05)) as replicas:
        old = await router.load("a", "/old")
        new = await router.load("a", "/new", load_inplace=True)
        assert new.status is LoRAStatus.SUCCESS, new.message
        assert new.epoch > old.epoch
        assert new.report is not None
        assert (new.report.generation, new.report.content_hash) == (new.epoch, "of /new")
        status = await router.describe("a")
        assert status is not None
        assert status.report == new.report
        (entry,) = (await router.table()).adapters.values()
        assert (entry.generation, entry.epoch, entry.path) == (new.epoch, new.epoch, "/new")
        await settled(lambda: all(operations(replica)[-1] == "unload staged" for replica in replicas))
        for replica in replicas:
            assert operations(replica) == ["load", "load staged", "swap", "unload staged"]
            assert replica.holding == {"a": new.epoch}, "nothing staged is left"
        assert router._operations.is_idle


async def test_no_replica_swaps_before_all_have_the_new_content() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "fast"), Replica(router, "slow")) as (fast, slow):
        old = await router.load("a", "/old")
        slow.delay_s = 0.2
        replacing = asyncio.create_task(router.load("a", "/new", load_inplace=True))
        await settled(lambda: operations(fast)[-1] == "load staged")
        await asyncio.sleep(0.05)
        assert fast.holding["a"] == slow.holding["a"] == old.epoch
        assert (await router.table()).adapters["a"].generation == old.epoch
        assert set((await router.table()).adapters) == {"a"}, "what is staged cannot be asked for"
        await replacing
        assert fast.holding["a"] == slow.holding["a"] > old.epoch


@pytest.mark.parametrize("num_bad", [1, 2])
async def test_a_replacement_refused_by_any_replica_changes_nothing_on_all(num_bad: int) -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1")) as replicas:
        old = await router.load("a", "/old")
        await router.pin("a")
        before = (await router.table()).adapters

        def refuse(request: LoRARequest) -> LoRAResponse | None:
            if request.lora_path != "/new":
                return None
            return LoRAResponse(
                LoRAStatus.LOAD_INVALID_ADAPTER, f"LoRA adapter {request.lora_name!r} was not loaded: rank 64"
            )

        for replica in replicas[:num_bad]:
            replica.refuse = refuse
        refused = await router.load("a", "/new", load_inplace=True)
        assert refused.status is LoRAStatus.LOAD_INVALID_ADAPTER
        reason = "LoRA adapter 'a' was not loaded: rank 64"
        assert refused.message == (reason if num_bad == 2 else f"1 of 2 replicas refused: r0: {reason}")
        assert refused.per_replica["r0"] == f"load_invalid_adapter: {reason}", "in the name the client knows"
        assert (await router.table()).adapters == before
        await settled(lambda: all(replica.holding == {"a": old.epoch} for replica in replicas))
        assert all(replica.pins == {"a"} for replica in replicas)
        for replica in replicas:
            replica.refuse = lambda _: None
        corrected = await router.load("a", "/new", load_inplace=True)
        assert corrected.status is LoRAStatus.SUCCESS, "a refused replacement can be corrected at once"


async def test_requests_do_not_wait_for_a_replica_that_has_slow_loads_to_do_before_it_swaps() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1")) as replicas:
        old = await router.load("a", "/old")
        replicas[1].may_swap.clear()
        replacing = asyncio.create_task(router.load("a", "/new", load_inplace=True))
        await settled(lambda: operations(replicas[0])[-1] == "swap")
        entry = (await router.table()).adapters["a"]
        assert entry.epoch == old.epoch < entry.generation
        replicas[1].may_swap.set()
        outcome = await replacing
        assert (await router.table()).adapters["a"].epoch == outcome.epoch == entry.generation


async def test_in_place_loads_a_name_that_is_new() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        outcome = await router.load("a", "/a", load_inplace=True)
        assert (outcome.status, operations(replica)) == (LoRAStatus.SUCCESS, ["load"])


async def test_content_that_is_served_already_is_no_new_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The files were written some time ago.
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 3 * 10**9)
    folder = tmp_path / "a"
    folder.mkdir()
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(b"as trained")
    router = make_router()
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1")) as replicas:
        for replica in replicas:
            replica.disk = {str(folder): "h", "/elsewhere": "h"}
        first = await router.load("a", str(folder))
        again = await router.load("a", str(folder), load_inplace=True)
        assert (again.status, again.epoch) == (LoRAStatus.SUCCESS, first.epoch)
        assert again.report == first.report
        assert [operations(replica) for replica in replicas] == [["load"]] * 2, "the folder says that nothing changed"
        weights.write_bytes(b"written again")
        for path in (str(folder), "/elsewhere"):
            same = await router.load("a", path, load_inplace=True)
            assert (same.status, same.epoch) == (LoRAStatus.SUCCESS, first.epoch), same.message
            assert same.report == first.report
            assert (await router.table()).adapters["a"].path == path
        await settled(lambda: all(replica.holding == {"a": first.epoch} for replica in replicas))
        assert "swap" not in operations(replicas[0])


async def test_a_changed_folder_is_served_after_a_reload_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"old")
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        await router.load("a", str(folder))
        (folder / "adapter_model.safetensors").write_bytes(b"newer")
        replica.disk = {str(folder): "newer"}
        refused = await router.load("a", str(folder))
        assert refused.status is LoRAStatus.LOAD_NAME_EXISTS
        assert "load_inplace" in refused.message
        assert (await router.load("a", str(folder), load_inplace=True)).status is LoRAStatus.SUCCESS
        assert contents(replica)["a"] == (str(folder), "newer")
        assert (await router.load("a", str(folder))).message == "adapter 'a' was loaded already"


async def test_a_replica_that_cannot_swap_serves_neither_generation() -> None:
    router = make_router()

    def refuse(request: LoRARequest) -> LoRAResponse | None:
        return LoRAResponse(LoRAStatus.LOAD_ERROR, "no memory left") if request.replace else None

    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", refuse)) as (good, bad):
        await router.load("a", "/old")
        outcome = await router.load("a", "/new", load_inplace=True)
        assert (outcome.status, outcome.behind) == (LoRAStatus.PARTIAL, ["r1"])
        assert "r1 does not serve it (no memory left)" in outcome.message
        assert (good.holding.get("a"), bad.holding.get("a")) == (outcome.epoch, None)
        table = await router.table()
        assert [table.replicas[name].refused for name in ("r0", "r1")] == [frozenset(), {"a"}]
        assert bad.held.refusal("a") == "no memory left"
        status = await router.describe("a")
        assert status is not None
        assert status.replicas == {"r0": "loaded", "r1": "refused: no memory left"}
        assert status.retries["r1"].reason == "no memory left"
        bad.refuse = lambda _: None
        repeated = await router.load("a", "/new")
        assert repeated.status is LoRAStatus.SUCCESS
        assert "r1" not in repeated.message, "a repeated load lets it try again"
        assert bad.held.generations == {"a": outcome.epoch}
        assert bad.held.refusal("a") is None
        assert (await router.table()).replicas["r1"].refused == frozenset()


async def test_a_replica_that_starts_during_a_replacement_ends_with_the_new_content() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (first,):
        await router.load("a", "/old")
        first.delay_s = 0.2
        replacing = asyncio.create_task(router.load("a", "/new", load_inplace=True))
        await asyncio.sleep(0.05)
        late = await Replica(router, "late").start()
        outcome = await replacing
        assert outcome.status is LoRAStatus.SUCCESS, outcome.message
        assert set(outcome.per_replica) == {"r0", "late"}
        await settled(lambda: first.holding == late.holding == {"a": outcome.epoch})
        assert contents(first) == contents(late) == {"a": ("/new", "of /new")}
        await late.stop()


@pytest.mark.parametrize("write", ["INSERT ON adapters WHEN NEW.path = '/new' AND NEW.state = 'ready'", "nothing"])
async def test_a_journal_that_refuses_a_replacement_leaves_the_adapter(write: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    router = make_router(journal=str(path))
    async with fleet(router, Replica(router, "r0")) as (replica,):
        old = await router.load("a", "/old")
        if write == "nothing":
            successor = make_router(journal=str(path))
        else:
            with closing(sqlite3.connect(path)) as database:
                database.execute(f"CREATE TRIGGER no BEFORE {write} BEGIN SELECT RAISE(ABORT, 'disk I/O error'); END")
        if write == "nothing":
            with pytest.raises(RouterReplaced, match=re.escape(str(path))):
                await router.load("a", "/new", load_inplace=True)
        else:
            outcome = await router.load("a", "/new", load_inplace=True)
            assert outcome.status is not LoRAStatus.SUCCESS
            assert str(path) in outcome.message
        await settled(lambda: replica.holding == {"a": old.epoch})
        assert (await router.table()).adapters["a"].path == "/old"
    if write == "nothing":
        assert (await successor.table()).adapters["a"].path == "/old"
        await successor.close()


async def test_a_router_killed_during_a_replacement_leaves_one_content_everywhere(tmp_path: Path) -> None:
    settings = {"journal": str(tmp_path / "journal.sqlite")}
    router = make_router(**settings)
    replicas = [await Replica(router, f"r{i}").start() for i in range(2)]
    old = await router.load("a", "/old")
    replicas[1].delay_s = 60
    interrupted = asyncio.create_task(router.load("a", "/new", load_inplace=True))
    await settled(lambda: operations(replicas[0])[-1] == "load staged")
    await asyncio.gather(*(replica.stop() for replica in replicas))
    interrupted.cancel()
    successor = make_router(**settings)
    for replica in replicas:
        replica.router, replica.delay_s = successor, 0
        await replica.start()
        assert replica.holding == {"a": old.epoch}, "what was staged is dropped"
    outcome = await successor.load("a", "/new", load_inplace=True)
    assert all(contents(replica)["a"] == ("/new", "of /new") for replica in replicas)
    assert (await successor.table()).adapters["a"].generation == outcome.epoch
    await asyncio.gather(*(replica.stop() for replica in replicas))
    await successor.close()


# Content


async def test_content_that_differs_between_replicas_is_loaded_nowhere() -> None:
    router = make_router()
    async with fleet(router, *(Replica(router, f"r{i}") for i in range(3))) as replicas:
        replicas[1].disk = {"/a": "b" * 64}
        replicas[0].disk = replicas[2].disk = {"/a": "a" * 64}
        outcome = await router.load("a", "/a")
        assert outcome.status is LoRAStatus.LOAD_INVALID_ADAPTER
        assert f"{'a' * 12} on r0, r2; {'b' * 12} on r1" in outcome.message
        await settled(lambda: all(replica.holding == {} for replica in replicas))
        assert await names(router) == set()
        replicas[1].disk = replicas[0].disk
        assert (await router.load("a", "/a")).status is LoRAStatus.SUCCESS
        replicas[1].disk = {"/b": "other"}
        outcome = await router.load("a", "/b", load_inplace=True)
        assert outcome.status is LoRAStatus.LOAD_INVALID_ADAPTER
        assert "differs between replicas" in outcome.message
        await settled(lambda: all(replica.holding.keys() == {"a"} for replica in replicas))
        assert {contents(replica)["a"] for replica in replicas} == {("/a", "a" * 64)}


async def test_content_of_a_replica_that_registers_again_during_a_load_is_compared() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (well,):
        other = Replica(router, "r1")
        other.disk = {"/a": "other"}
        since = (await router.register("r1")).epoch
        load = asyncio.create_task(router.load("a", "/a"))
        (change,) = await router.wait_changes("r1", since, 1)
        await other.apply(change)
        # It has forgotten to say so, and is entered anew with what it holds.
        await other.start()
        outcome = await load
        assert outcome.status is LoRAStatus.LOAD_INVALID_ADAPTER
        assert "differs between replicas" in outcome.message
        await settled(lambda: well.holding == other.holding == {})
        await other.stop()


@pytest.mark.parametrize("static", [False, True])
async def test_a_late_replica_with_other_files_does_not_serve_them(
    static: bool, caplog: pytest.LogCaptureFixture
) -> None:
    router = make_router(lora_paths=["a=/a"] if static else [])
    async with fleet(router, Replica(router, "r0")) as (first,):
        await router.load("a", "/a")
        late = Replica(router, "late")
        late.disk = {"/a": "other"}
        await late.start()
        assert late.applied[0].request.content_hash == contents(first)["a"][1]
        assert late.engine == {}
        table = await router.table()
        assert [table.replicas[name].refused for name in ("r0", "late")] == [frozenset(), {"a"}]
        assert "replica late does not serve adapter 'a': the files of 'a' in /a are other ones" in caplog.text
        status = await router.describe("a")
        assert status is not None
        assert status.replicas["late"] == "refused: the files of 'a' in /a are other ones"
        repeated = await router.load("a", "/a")
        assert (repeated.status, repeated.behind) == (LoRAStatus.PARTIAL, ["late"])
        assert "late does not serve it" in repeated.message
        late.disk = {}
        assert (await router.load("a", "/a")).message == "adapter 'a' was loaded already"
        assert late.holding == first.holding
        await late.stop()


async def test_of_two_replicas_that_start_with_other_static_files_the_second_does_not_serve_them() -> None:
    router = make_router(lora_paths=["a=/a"])
    replicas = [Replica(router, f"r{i}", delay_s=0.02 * (1 + i)) for i in range(2)]
    replicas[1].disk = {"/a": "other"}
    await asyncio.gather(*(replica.start() for replica in replicas))
    assert [change.request.content_hash for replica in replicas for change in replica.applied] == [None, None]
    assert replicas[0].engine.keys() == {"a"}
    assert replicas[1].engine == {}
    assert replicas[1].held.refusal("a") is not None
    table = await router.table()
    assert table.replicas["r1"].refused == {"a"}
    status = await router.describe("a")
    assert status is not None
    assert status.entry.content_hash == "of /a"
    assert "(other)" in status.replicas["r1"]
    assert "(of /a)" in status.replicas["r1"]
    # Its engine gives no generation twice, and has had this one.
    replicas[1].disk = {}
    assert (await router.load("a", "/a")).message == "adapter 'a' was loaded already"
    generation = table.adapters["a"].generation
    assert [replica.held.generations for replica in replicas] == [{"a": generation}] * 2
    held = replicas[1].engine["a"]
    assert held.content_hash == "of /a"
    assert held.generation != generation
    resident = [AdapterRef("a", held.generation)]
    residency = replicas[1].held.as_fleet(Residency(1, resident, resident, resident))
    assert residency.resident == residency.loaded == residency.in_memory == [AdapterRef("a", generation)]
    assert not (await router.table()).replicas["r1"].refused
    await asyncio.gather(*(replica.stop() for replica in replicas))
    await router.close()


async def test_what_a_load_found_is_kept_over_a_restart(tmp_path: Path) -> None:
    settings = {"journal": str(tmp_path / "journal.sqlite")}
    router = make_router(**settings)
    async with fleet(router, Replica(router, "r0")):
        outcome = await router.load("a", "/a")
        assert outcome.report is not None
        assert (outcome.report.generation, outcome.report.ranks) == (outcome.epoch, {4: 2})
    successor = make_router(**settings)
    status = await successor.describe("a")
    assert status is not None
    assert (status.report, status.entry.content_hash, status.replicas) == (outcome.report, "of /a", {})
    assert await successor.describe("b") is None
    late = Replica(successor, "late")
    late.disk = {"/a": "other"}
    await late.start()
    assert late.engine == {}
    await late.stop()
    await successor.close()


# Pins


async def test_a_pin_reaches_every_replica_and_late_ones_and_survives_a_replacement() -> None:
    router = make_router(num_slots=3)
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1")) as replicas:
        await router.load("a", "/a")
        for expected in ("is pinned on 2 replica(s)", "is pinned already"):
            outcome = await router.pin("a")
            assert (outcome.status, outcome.message) == (LoRAStatus.SUCCESS, f"adapter 'a' {expected}")
        late = await Replica(router, "late").start()
        everyone = [*replicas, late]
        assert [replica.pins for replica in everyone] == [{"a"}] * 3
        await router.load("a", "/new", load_inplace=True)
        assert [replica.pins for replica in everyone] == [{"a"}] * 3
        assert (await router.table()).adapters["a"].pinned
        for expected in ("is no longer pinned on 3 replica(s)", "is no longer pinned already"):
            assert (await router.unpin("a")).message == f"adapter 'a' {expected}"
        assert [replica.pins for replica in everyone] == [set()] * 3
        await late.stop()


async def test_pins_come_back_with_a_restarted_router_and_leave_with_an_unload(tmp_path: Path) -> None:
    settings = {"journal": str(tmp_path / "journal.sqlite"), "num_slots": 3}
    router = make_router(**settings)
    async with fleet(router, Replica(router, "r0")) as (replica,):
        for name in "ab":
            await router.load(name, f"/{name}")
            await router.pin(name)
    successor = make_router(**settings)
    replica.router, replica.applied = successor, []
    async with fleet(successor, replica, Replica(successor, "new")) as (_, new):
        assert replica.applied == []
        assert new.pins == replica.pins == {"a", "b"}
        await successor.unload("a")
        await successor.load("a", "/a")
        assert new.pins == replica.pins == {"b"}


async def test_one_pin_too_many_is_refused_with_both_numbers() -> None:
    router = make_router(num_slots=3)
    async with fleet(router, Replica(router, "r0")) as (replica,):
        for name in "abc":
            await router.load(name, f"/{name}")
        outcomes = await asyncio.gather(*(router.pin(name) for name in "abc"))
        assert [outcome.status for outcome in outcomes] == [LoRAStatus.SUCCESS] * 2 + [LoRAStatus.PIN_ERROR]
        assert "with it 3 adapter(s) would be, and at most 2 can" in outcomes[2].message
        assert replica.pins == {"a", "b"}
        for call in (router.pin, router.unpin):
            unknown = await call("ghost")
            assert (unknown.status, "a, b, c" in unknown.message) == (LoRAStatus.PIN_NAME_NONEXISTENT, True)


async def test_a_pin_that_a_replica_refuses_is_taken_back() -> None:
    router = make_router()

    def refuse(request: LoRARequest) -> LoRAResponse | None:
        pin = request.operation is LoRAOperation.PIN
        return LoRAResponse(LoRAStatus.PIN_ERROR, "2 are pinned, at most 2 can be") if pin else None

    async with fleet(router, Replica(router, "r0"), Replica(router, "r1", refuse)) as replicas:
        await router.load("a", "/a")
        outcome = await router.pin("a")
        assert (outcome.status, "at most 2 can be" in outcome.message) == (LoRAStatus.PIN_ERROR, True)
        assert not (await router.table()).adapters["a"].pinned
        assert [replica.pins for replica in replicas] == [set(), set()]
        assert (await router.table()).replicas["r1"].refused == frozenset(), "it serves the adapter all the same"


async def test_a_replica_that_does_not_serve_an_adapter_does_not_keep_it_from_being_pinned() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (first,):
        await router.load("a", "/a")
        late = Replica(router, "late", refuse_all(LoRAStatus.LOAD_INVALID_PATH, "not here"))
        await late.start()
        assert (await router.pin("a")).status is LoRAStatus.SUCCESS
        assert (first.pins, late.pins) == ({"a"}, set())
        late.refuse = lambda _: None
        await router.load("a", "/a")
        await settled(lambda: late.pins == {"a"})
        await late.stop()
        await settled(lambda: len(router._members.live) == 1)
        late = Replica(router, "later", refuse_all(LoRAStatus.LOAD_INVALID_PATH, "not here"))
        await late.start()
        late.refuse = lambda _: None
        await router.load("a", "/new", load_inplace=True)
        await settled(lambda: late.pins == {"a"})
        await late.stop()
        await settled(lambda: len(router._members.live) == 1)
        late = Replica(router, "last", refuse_all(LoRAStatus.LOAD_INVALID_PATH, "not here"))
        await late.start()
        await first.stop()
        await settled(lambda: len(router._members.live) == 1)
        outcome = await router.unpin("a")
        assert (outcome.status, "no replica serves it now" in outcome.message) == (LoRAStatus.UNAVAILABLE, True)
        await late.stop()


async def test_a_pin_that_is_not_answered_is_no_conflict() -> None:
    router = make_router(change_timeout_s=0.3)

    def fail(request: LoRARequest) -> LoRAResponse | None:
        if request.operation is LoRAOperation.PIN:
            raise error
        return None

    async with fleet(router, Replica(router, "r0", fail), Replica(router, "r1")) as (failing, other):
        await router.load("a", "/a")
        statuses = []
        for error in (RequestTimeout("no answer within 5 s"), LoRAFleetError("a fault"), ValueError("another")):
            outcome = await router.pin("a")
            assert str(error) in outcome.message
            statuses.append(outcome.status)
        assert statuses == [LoRAStatus.UNAVAILABLE, LoRAStatus.UNSPECIFIED_ERROR, LoRAStatus.UNSPECIFIED_ERROR]
        failing.refuse, other.delay_s = (lambda _: None), 1
        outcome = await router.pin("a")
        assert (outcome.status, "change_timeout_s" in outcome.message) == (LoRAStatus.UNAVAILABLE, True)
        assert not (await router.table()).adapters["a"].pinned


# Many at once


async def test_parallel_reloads_of_one_name_are_as_many_generations_as_contents(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"old")
    router = make_router()
    async with fleet(router, Replica(router, "r0", delay_s=0.01), Replica(router, "r1")) as replicas:
        await router.load("a", str(folder))
        (folder / "adapter_model.safetensors").write_bytes(b"newer")
        for replica in replicas:
            replica.disk = {str(folder): "newer"}
        outcomes = await asyncio.gather(*(router.load("a", str(folder), load_inplace=True) for _ in range(20)))
        assert {outcome.status for outcome in outcomes} == {LoRAStatus.SUCCESS}
        assert len({outcome.epoch for outcome in outcomes}) == 1
        assert operations(replicas[0]).count("swap") == 1


async def test_a_reload_asked_for_during_another_sees_what_was_written_meanwhile() -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        await router.load("a", "/a")
        replica.delay_s = 0.1
        replica.disk = {"/a": "second"}
        second = asyncio.create_task(router.load("a", "/a", load_inplace=True))
        await settled(lambda: "load staged" in operations(replica))
        replica.disk = {"/a": "third"}
        third = await asyncio.gather(*(router.load("a", "/a", load_inplace=True) for _ in range(3)))
        assert (await second).epoch < third[0].epoch
        assert {outcome.epoch for outcome in third} == {third[0].epoch}
        assert contents(replica)["a"] == ("/a", "third")


Step = tuple[str, str, str]

REFUSALS = (
    LoRAStatus.LOAD_NAME_EXISTS,
    LoRAStatus.LOAD_INVALID_ADAPTER,
    LoRAStatus.UNLOAD_NAME_NONEXISTENT,
    LoRAStatus.PIN_NAME_NONEXISTENT,
    LoRAStatus.PIN_ERROR,
)


async def take(router: AdapterRouter, step: Step) -> LoadOutcome:
    operation, name, path = step
    match operation:
        case "load":
            return await router.load(name, path)
        case "replace":
            return await router.load(name, path, load_inplace=True)
        case "unload":
            return await router.unload(name)
        case "pin":
            return await router.pin(name)
        case _:
            return await router.unpin(name)


@pytest.mark.parametrize("seed", range(6))
async def test_any_mix_of_parallel_operations_ends_with_all_replicas_agreed(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    settings = {"journal": str(tmp_path / "journal.sqlite"), "num_slots": 3}
    router = make_router(**settings)
    kinds = ["load", "replace", "replace", "unload", "pin", "unpin"]
    steps = [(chance.choice(kinds), chance.choice("abc"), chance.choice(["/x", "/y", "/bad"])) for _ in range(60)]

    def refuse(request: LoRARequest) -> LoRAResponse | None:
        bad = request.lora_path == "/bad"
        return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, "its files are bad") if bad else None

    replicas = [Replica(router, f"r{i}", refuse if i == 1 else lambda _: None, 0.002 * i) for i in range(3)]
    async with fleet(router, *replicas):
        outcomes = await asyncio.gather(*(take(router, step) for step in steps))
        expected = {LoRAStatus.SUCCESS, *REFUSALS}
        assert {outcome.status for outcome in outcomes} <= expected, outcomes
        for step, outcome in zip(steps, outcomes, strict=True):
            assert step[2] != "/bad" or step[0] not in ("load", "replace") or outcome.status is not LoRAStatus.SUCCESS
        served = (await router.table()).adapters
        await settled(lambda: all(replica.epoch == router._registry.epoch for replica in replicas))
        for replica in replicas:
            assert replica.holding == {name: entry.generation for name, entry in served.items()}
            assert replica.paths == {name: entry.path for name, entry in served.items()}
            assert replica.pins == {name for name, entry in served.items() if entry.pinned}
        assert router._operations.is_idle
    successor = make_router(**settings)
    assert (await successor.table()).adapters == served, "the journal tells the same"
    await successor.close()
