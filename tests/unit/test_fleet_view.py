"""`FleetView`: tables followed and kept, and what is known beyond them."""

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable

import msgspec
import pytest

from cluster.board import Board
from cluster.entry import AdapterEntry
from cluster.fleet import FleetTable, ReplicaState
from cluster.placement import PlacementSettings
from deployments.fleet_view import FleetView, TableSource
from deployments.generation import SlotSnapshot
from deployments.load_notes import ReplicaKey
from deployments.request_router import AffinityRequestRouter
from tests.unit.request_routing import ROUTER, FakeReplica, FakeSource, holds, make, request, route, settle, table_of

R0, R1 = ReplicaKey(ROUTER, "r0"), ReplicaKey(ROUTER, "r1")


def view_of(connect: Callable[[str], TableSource], *keys: ReplicaKey) -> tuple[FleetView, Board]:
    board = Board(PlacementSettings())
    board.set_replicas({key.replica_id: 100 for key in keys})
    return FleetView(connect, board), board


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    return FakeSource.of_every_router(monkeypatch)


async def test_every_router_actor_that_a_replica_names_is_followed_and_no_other() -> None:
    sources = {"old actor": FakeSource(), "new actor": FakeSource()}
    old, new = ReplicaKey("old actor", "r0"), ReplicaKey("new actor", "r1")
    view, _ = view_of(sources.__getitem__, old, new)
    sources["old actor"].table, sources["new actor"].table = table_of(r0=holds("a")), table_of(r1=holds("b"))

    def following() -> dict[str, int]:
        return {name: source.following for name, source in sources.items()}

    view.follow([old])
    await settle()
    assert following() == {"old actor": 1, "new actor": 0}
    view.follow([old, new])
    await settle()
    assert following() == {"old actor": 1, "new actor": 1}
    assert view.state(old).resident == {"a"}
    assert view.state(new).resident == {"b"}
    view.follow([new])
    await settle()
    assert following() == {"old actor": 0, "new actor": 1}
    assert view.state(old).resident == frozenset()
    view.close()


async def test_the_follower_goes_with_the_last_replica(source: FakeSource) -> None:
    router = make(AffinityRequestRouter, [FakeReplica("r0")])
    await settle()
    assert source.following == 1
    router.update_replicas([])
    await settle()
    assert source.following == 0


async def test_the_last_table_stays_in_use_when_the_router_actor_is_gone(source: FakeSource) -> None:
    source.table = table_of(r0=holds("a"), r1=holds("b"))
    router = make(AffinityRequestRouter, [FakeReplica("r0"), FakeReplica("r1")])
    await settle()
    source.gone.set()
    await settle()
    assert source.following == 0
    for adapter, home in {"a": "r0", "b": "r1"}.items():
        assert await route(router, request(adapter)) == home


async def test_a_restarted_router_actor_that_knows_no_replica_yet_changes_nothing() -> None:
    keys = [R0, R1]
    view, _ = view_of(lambda _: FakeSource(), *keys)
    view.follow(keys)

    def resident() -> list[set[str]]:
        return [set(view.state(key).resident) for key in keys]

    def take(router_id: str, **rows: ReplicaState) -> None:
        view.take(ROUTER, FleetTable(version=1, epoch=1, adapters={}, replicas=rows, router_id=router_id))

    take("first", r0=holds("a"), r1=holds("b"))
    take("second")
    assert resident() == [{"a"}, {"b"}]
    take("second", r0=ReplicaState(), r1=holds("c"))
    assert resident() == [{"a"}, {"c"}], "r0 is back, and has yet to say what it holds"
    take("second", r0=holds(), r1=holds("c"))
    assert resident() == [set(), {"c"}]
    take("second", r1=holds("c"))
    assert resident() == [set(), {"c"}], "gone from the same router's table is gone"


async def test_a_replica_without_metadata_is_routed_to(source: FakeSource) -> None:
    replica = FakeReplica("r0")
    replica.replica_metadata = {}
    router = make(AffinityRequestRouter, [replica])
    await settle()
    assert source.following == 0
    assert await route(router, request("a")) == "r0"


async def test_a_handle_that_is_dropped_takes_its_follower_with_it(source: FakeSource) -> None:
    router = make(AffinityRequestRouter, [FakeReplica("r0")])
    await settle()
    assert source.following == 1
    gone = weakref.ref(router)
    del router
    gc.collect()
    await asyncio.sleep(0.05)
    gc.collect()
    await settle()
    assert gone() is None
    assert source.following == 0


async def test_following_goes_on_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(FakeSource):
        async def follow_table(self, callback: Callable[[FleetTable], None]) -> None:
            self.following += 1
            if self.following == 1:
                raise RuntimeError("broken once")
            callback(table_of(r0=holds("a")))
            await asyncio.Event().wait()

    monkeypatch.setattr("deployments.fleet_view.RETRY_S", 0.05)
    view, _ = view_of(lambda _: failing, R0)
    failing = Failing()
    with caplog.at_level(logging.ERROR):
        view.follow([R0])
        await asyncio.sleep(0.2)
    assert "broken once" in caplog.text
    assert view.state(R0).resident == {"a"}
    view.close()


async def test_the_board_hears_of_all_that_changes_and_knows_a_replica_that_comes_late() -> None:
    source = FakeSource()
    view, board = view_of(lambda _: source, R0)
    source.table = table_of(r0=holds("a"), r1=holds("a", "b"))
    view.follow([R0])
    await settle()
    assert board.holders("a") == ["r0"]
    board.set_replicas({"r0": 100, "r1": 100})
    view.follow([R0, R1])
    assert (board.holders("a"), board.holders("b")) == (["r0", "r1"], ["r1"]), "its row came before it"
    view.claim(R0, "c")
    assert board.holders("c") == ["r0"], "a load this handle has caused counts as done"
    view.take_snapshot(SlotSnapshot(replica_id="r0", sequence=2, resident=("b",)))
    assert (board.holders("a"), board.holders("b"), board.holders("c")) == (["r1"], ["r0", "r1"], ["r0"])
    view.release(R0, "c")
    assert board.holders("c") == []
    view.close()


async def test_the_board_hears_how_many_adapters_each_replica_is_busy_with() -> None:
    view, board = view_of(lambda _: FakeSource(), R0, R1)
    view.follow([R0, R1])
    view.claim(R0, "a")
    view.claim(R0, "a")
    assert [board.view(name).num_busy for name in ("r0", "r1")] == [1, 0]
    view.take_snapshot(SlotSnapshot(replica_id="r0", sequence=-1, resident=(), num_busy=3))
    assert board.view("r0").num_busy == 3, "an old word on slots, but a new one on requests"
    view.release(R0, "a")
    view.release(R0, "a")
    assert board.view("r0").num_busy == 2
    view.take_stock()
    assert board.view("r0").num_busy == 2
    view.take_stock()
    assert board.view("r0").num_busy == 0, "nothing was heard of them for a while"
    view.close()


async def test_copies_of_two_versions_side_by_side_are_all_granted() -> None:
    old, new = ReplicaKey("old", "r0"), ReplicaKey("new", "r1")
    view, board = view_of(lambda _: FakeSource(), old, new)
    view.follow([old, new])
    for router, replica in (("old", "r0"), ("new", "r1")):
        table = FleetTable(
            version=1, epoch=1, adapters={}, copies={"hot": (replica,)}, replicas={replica: holds("hot")}
        )
        view.take(router, table)
    costs = [board.terms("hot", replica).stray_ms for replica in ("r0", "r1")]
    assert costs == [0.0, 0.0]
    view.close()


async def test_how_long_a_load_takes_is_told_by_the_best_place_it_can_come_from() -> None:
    rates = {"host": 2.0, "disk": 10.0}
    in_host = ReplicaState(in_memory=frozenset("a"), load_ms_per_mib=rates, sequence=1)
    on_disk = ReplicaState(load_ms_per_mib=rates, sequence=1)
    entry = AdapterEntry(name="a", path="/a", generation=1, state="ready", slot_bytes=50 * 2**20)

    def load_s(**rows: ReplicaState) -> float:
        view.take(ROUTER, FleetTable(version=1, epoch=1, adapters={"a": entry}, replicas=rows))
        return view.load_s("a")

    view, _ = view_of(lambda _: FakeSource(), R0, R1)
    view.follow([R0, R1])
    assert view.load_s("a") == 0.0, "nothing is known"
    assert load_s(r0=on_disk, r1=on_disk) == 0.5
    assert load_s(r0=on_disk, r1=in_host) == 0.1
    assert load_s(r0=on_disk, r1=ReplicaState(refused=frozenset("a"), load_ms_per_mib=rates, sequence=2)) == 0.5
    assert load_s(r0=on_disk, r1=holds("a")) == 0.0
    assert view.is_warm("a")
    assert not view.is_warm("b")
    view.close()


async def test_a_new_table_moves_only_what_it_changes() -> None:
    source, told = FakeSource(), list[str]()

    class Noting(Board):
        def set_state(self, replica_id: str, state: ReplicaState) -> None:
            told.append(replica_id)
            super().set_state(replica_id, state)

    board = Noting(PlacementSettings())
    keys = [ReplicaKey(ROUTER, f"r{index}") for index in range(50)]
    board.set_replicas({key.replica_id: 100 for key in keys})
    view = FleetView(lambda _: source, board)
    view.follow(keys)
    rows = {key.replica_id: holds("a") for key in keys}
    view.take(ROUTER, FleetTable(version=1, epoch=1, adapters={}, replicas=rows))
    told.clear()
    view.take(ROUTER, FleetTable(version=2, epoch=1, adapters={}, replicas={**rows, "r7": holds("b")}))
    assert told == ["r7"]
    view.close()


async def test_a_replica_that_its_router_no_longer_knows_gets_requests_only_where_no_other_can(
    source: FakeSource,
) -> None:
    source.table = table_of(r0=holds("a"), r1=holds())
    router = make(AffinityRequestRouter, [FakeReplica("r0"), FakeReplica("r1")])
    await settle()
    assert await route(router, request("a")) == "r0"
    assert router.fleet.is_warm("a")
    router.fleet.take_snapshot(SlotSnapshot(replica_id="r0", sequence=9, resident=("a",)))
    router.fleet.take(ROUTER, msgspec.structs.replace(table_of(r1=holds()), version=2))
    for adapter in ("a", "b", ""):
        assert await route(router, request(adapter)) == "r1"
    assert not router.fleet.is_warm("a"), "no request gets that slot"
    router.fleet.take(ROUTER, msgspec.structs.replace(table_of(), version=3))
    assert await route(router, request("a")) in ("r0", "r1"), "the router knows none of them: each may do"
    router.fleet.take(ROUTER, msgspec.structs.replace(table_of(r0=holds("a"), r1=holds()), version=4))
    assert await route(router, request("a")) == "r0"


async def test_an_adapter_that_is_only_where_it_is_stalled_is_not_warm() -> None:
    view, _ = view_of(lambda _: FakeSource(), R0, R1)
    view.follow([R0, R1])
    stalled = msgspec.structs.replace(holds("a", "b"), stalled=frozenset("a"))
    view.take(ROUTER, FleetTable(version=1, epoch=1, adapters={}, replicas={"r0": stalled, "r1": holds()}))
    assert [view.is_warm(name) for name in "ab"] == [False, True]
    view.close()


async def test_an_adapter_is_looked_for_on_one_thread_while_a_router_goes_on_another() -> None:
    class Changing(dict[str, AdapterEntry]):
        is_looked_into = False

        def get(self, name: str, default: AdapterEntry | None = None) -> AdapterEntry | None:  # type: ignore[override]
            if self.is_looked_into:
                view.follow([new])
            return None

    old, new = ReplicaKey("old", "r0"), ReplicaKey("new", "r1")
    view, _ = view_of(lambda _: FakeSource(), old, new)
    view.follow([old, new])
    entry = AdapterEntry(name="a", path="/a", generation=1, state="ready")
    view.take("old", FleetTable(version=1, epoch=1, adapters=(adapters := Changing()), replicas={}))
    view.take("new", FleetTable(version=1, epoch=1, adapters={"a": entry}, replicas={}))
    adapters.is_looked_into = True
    assert view.entry("a") is entry
    view.close()


async def test_adapters_that_only_one_of_two_versions_knows_are_not_asked_of_the_other() -> None:
    def entry(name: str, epoch: int) -> AdapterEntry:
        return AdapterEntry(name=name, path=f"/{name}", generation=epoch, epoch=epoch, state="ready")

    def table(version: int, replica: str, **epochs: int) -> FleetTable:
        adapters = {name: entry(name, epoch) for name, epoch in epochs.items()}
        return FleetTable(version=version, epoch=9, adapters=adapters, replicas={replica: holds()})

    def refused() -> list[frozenset[str]]:
        return [view.state(key).refused for key in (old, new)]

    old, new = ReplicaKey("old", "r0"), ReplicaKey("new", "r1")
    view, board = view_of(lambda _: FakeSource(), old, new)
    view.follow([old, new])
    view.take("old", table(1, "r0", same=1, replaced=2, gone=3))
    assert refused() == [frozenset(), frozenset()]
    view.take("new", table(1, "r1", same=1, replaced=5, loaded=6))
    assert refused() == [{"replaced", "loaded"}, {"gone"}]
    assert [board.order(name).open for name in ("replaced", "loaded", "gone")] == [["r1"], ["r1"], ["r0"]]
    assert set(board.order("same").open) == {"r0", "r1"}
    view.take("old", table(2, "r0", same=1, replaced=5, loaded=6))
    assert refused() == [frozenset(), frozenset()]
    view.take("new", table(2, "r1", same=1, replaced=5, loaded=6, later=7))
    late = ReplicaKey("old", "r2")
    board.set_replicas({"r0": 100, "r1": 100, "r2": 100})
    view.follow([old, new, late])
    assert view.state(late).refused == {"later"}
    view.follow([new])
    assert view.state(new).refused == frozenset()
    view.follow([old, new])
    assert refused() == [frozenset(), frozenset()], "its router has yet to tell what it knows"
    view.close()


async def test_a_table_is_as_old_as_the_last_word_of_its_router() -> None:
    now = [100.0]
    board = Board(PlacementSettings())
    board.set_replicas({"r0": 100, "r1": 100})
    view = FleetView(lambda _: FakeSource(), board, clock=lambda: now[0])
    old, new = ReplicaKey("old", "r0"), ReplicaKey("new", "r1")
    view.follow([old, new])
    assert view.table_age_s is None
    table = FleetTable(version=1, epoch=1, adapters={}, replicas={})
    view.take("old", table)
    now[0] = 103.0
    view.take("new", table)
    assert view.table_age_s == 3
    view.take("old", table)
    assert view.table_age_s == 0, "that it has not changed is news"
    view.close()
