"""The routing policy, as pure functions."""

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import (
    TERMS,
    PlacementSettings,
    ReplicaView,
    hash_order,
    load_cap,
    rank,
    terms,
    turnovers,
    weight,
)
from cluster.progress import BASE

SETTINGS = PlacementSettings()
ADAPTERS = st.sampled_from([None, "a", "b", "c"])
NAMES = st.frozensets(st.sampled_from("abc"))


@st.composite
def fleets(draw: st.DrawFn) -> list[ReplicaView]:
    """Up to eight replicas in any state."""
    return [
        ReplicaView(
            replica_id=f"r{i}",
            in_flight=draw(st.integers(0, 12)),
            capacity=draw(st.integers(1, 12)),
            resident=draw(NAMES),
            in_memory=draw(NAMES),
            refused=draw(NAMES),
            loading=draw(NAMES),
            num_slots=draw(st.integers(0, 3)),
            num_slots_used=draw(st.integers(0, 3)),
            num_busy=draw(st.integers(0, 12)),
        )
        for i in range(draw(st.integers(1, 8)))
    ]


@given(adapter=ADAPTERS, fleet=fleets(), seed=st.integers(0, 99))
def test_the_order_of_the_views_does_not_matter(adapter: str | None, fleet: list[ReplicaView], seed: int) -> None:
    shuffled = random.Random(seed).sample(fleet, len(fleet))
    assert rank(adapter, fleet, SETTINGS) == rank(adapter, shuffled, SETTINGS)


@given(adapter=ADAPTERS, fleet=fleets())
def test_every_replica_is_ranked_once(adapter: str | None, fleet: list[ReplicaView]) -> None:
    assert sorted(rank(adapter, fleet, SETTINGS)) == sorted(view.replica_id for view in fleet)


@given(adapter=ADAPTERS, fleet=fleets())
def test_full_replicas_come_after_the_others_and_refusing_ones_last(
    adapter: str | None, fleet: list[ReplicaView]
) -> None:
    views = {view.replica_id: view for view in fleet}
    order = [views[replica_id] for replica_id in rank(adapter, fleet, SETTINGS)]
    standing = [(adapter in view.refused, view.in_flight >= view.capacity) for view in order]
    assert standing == sorted(standing)


@given(adapter=ADAPTERS, fleet=fleets())
def test_no_replica_above_the_cap_is_first_while_one_with_room_is_below(
    adapter: str | None, fleet: list[ReplicaView]
) -> None:
    cap = load_cap(fleet, SETTINGS)
    assert any(view.in_flight < cap for view in fleet)
    views = {view.replica_id: view for view in fleet}
    first = views[rank(adapter, fleet, SETTINGS)[0]]
    usable = [view for view in fleet if view.in_flight < view.capacity and adapter not in view.refused]
    if any(view.in_flight < cap for view in usable):
        assert first.in_flight < cap


def test_the_cap_is_a_multiple_of_the_mean_and_what_chance_does_to_it() -> None:
    fleet = [ReplicaView("r0", in_flight=9), ReplicaView("r1", in_flight=4), ReplicaView("r2", in_flight=4)]
    # The mean is 6, the request to place included.
    assert load_cap(fleet, PlacementSettings(cap_slack=0)) == 8
    assert load_cap(fleet, PlacementSettings(cap_slack=2)) == 13
    assert load_cap(fleet, PlacementSettings(load_cap=0)) == float("inf")
    assert load_cap(fleet, PlacementSettings(without=["cap"])) == float("inf")


def test_a_resident_replica_is_preferred_until_it_is_above_the_cap() -> None:
    def first(in_flight: int) -> str:
        fleet = [
            ReplicaView("holds", in_flight=in_flight, resident=frozenset("a"), in_memory=frozenset("a")),
            ReplicaView("idle", in_flight=6, in_memory=frozenset("a")),
        ]
        return rank("a", fleet, PlacementSettings(wait_ms=0.1, cap_slack=0))[0]

    # 12 against 6 in flight: the cap is 1.25 * 19 / 2, rounded up to 12.
    assert [first(n) for n in (0, 6, 11)] == ["holds"] * 3
    assert first(12) == "idle"


def test_where_the_queue_costs_more_than_a_load_the_adapter_gets_a_second_replica() -> None:
    fleet = [
        ReplicaView("holds", in_flight=20, resident=frozenset("a")),
        ReplicaView("idle", in_flight=15, in_memory=frozenset("a")),
    ]
    patient = PlacementSettings(wait_ms=1, load_cap=0, stray_ms=0)
    hasty = PlacementSettings(wait_ms=50, load_cap=0, stray_ms=0)
    assert rank("a", fleet, patient)[0] == "holds"
    assert rank("a", fleet, hasty)[0] == "idle"


def test_base_requests_take_the_shortest_queue() -> None:
    fleet = [ReplicaView(f"r{n}", in_flight=n, resident=frozenset("abc")) for n in (4, 0, 2, 9)]
    assert rank(None, fleet, SETTINGS) == ["r0", "r2", "r4", "r9"]


def test_an_adapter_nobody_holds_goes_where_its_name_says_whatever_the_load_below_the_cap() -> None:
    ids = [f"r{i}" for i in range(6)]
    for seed in range(20):
        rng = random.Random(seed)
        fleet = [ReplicaView(replica_id, in_flight=rng.choice((16, 17, 18))) for replica_id in ids]
        assert rank("cold", fleet, SETTINGS) == hash_order("cold", ids)


def test_what_a_load_costs_depends_on_where_the_adapter_is_and_on_the_slots() -> None:
    def load_ms(view: ReplicaView) -> float:
        return terms("a", view, SETTINGS).load_ms

    a, others = frozenset("a"), frozenset({"x", "y"})
    assert load_ms(ReplicaView("r", resident=a)) == 0
    assert load_ms(ReplicaView("r", loading=a)) == 0
    assert load_ms(ReplicaView("r", in_memory=a)) == SETTINGS.load_ms
    assert load_ms(ReplicaView("r")) == SETTINGS.fetch_ms
    full = ReplicaView("r", in_memory=a, num_slots=2, num_slots_used=2)
    assert load_ms(full) == SETTINGS.load_ms + SETTINGS.evict_ms
    # Two loads under way take the two free slots: the third waits for both, and evicts.
    busy = ReplicaView("r", in_memory=a, num_slots=2, num_slots_used=0, loading=others)
    assert load_ms(busy) == 3 * SETTINGS.load_ms + SETTINGS.evict_ms


def test_a_second_new_adapter_avoids_the_replica_that_is_loading_the_first_where_the_plan_does_not_mind() -> None:
    ids, settings = ["r0", "r1"], PlacementSettings(without=["stray"])
    first = rank("one", [ReplicaView(r, num_slots=4) for r in ids], settings)[0]
    fleet = [ReplicaView(r, num_slots=4, loading=frozenset({"one"} if r == first else ())) for r in ids]
    names = [f"new-{i}" for i in range(20)]
    assert {rank(name, fleet, settings)[0] for name in names} == set(ids) - {first}
    assert [rank(name, fleet, SETTINGS)[0] for name in names] == [hash_order(name, ids)[0] for name in names]


def test_an_adapter_goes_to_the_replicas_it_is_granted_and_among_them_to_the_shortest_wait() -> None:
    fleet = [ReplicaView(f"r{n}", in_flight=n, resident=frozenset("a"), service_ms=3.0) for n in range(5)]
    assert rank("a", fleet, SETTINGS, granted=["r4", "r2"])[:2] == ["r2", "r4"]
    assert rank("a", fleet, SETTINGS, granted=["gone"]) == rank("a", fleet, SETTINGS)


def test_a_granted_replica_gets_traffic_once_it_is_warm() -> None:
    warm = ReplicaView("warm", in_flight=3, resident=frozenset("a"))
    cold = ReplicaView("cold", in_memory=frozenset("a"))
    assert rank("a", [warm, cold], SETTINGS, granted=["warm", "cold"])[0] == "warm"
    loading = ReplicaView("cold", loading=frozenset("a"))
    assert rank("a", [warm, loading], SETTINGS, granted=["warm", "cold"])[0] == "cold"


def test_who_holds_an_adapter_stands_in_for_a_home_that_does_not() -> None:
    holder, home = ReplicaView("holder", in_flight=3, resident=frozenset("a")), ReplicaView("home")
    assert rank("a", [holder, home], SETTINGS, granted=["home"])[0] == "holder"
    warm_home = ReplicaView("home", in_flight=9, resident=frozenset("a"))
    assert rank("a", [holder, warm_home], SETTINGS, granted=["home"])[0] == "home"


def test_a_stalled_replica_is_the_last_resort() -> None:
    fleet = [ReplicaView("stuck", resident=frozenset("a"), is_stalled=True), ReplicaView("busy", in_flight=50)]
    for adapter in ("a", None):
        assert rank(adapter, fleet, SETTINGS) == ["busy", "stuck"]


def test_a_replica_whose_base_model_is_stalled_still_takes_requests_for_adapters() -> None:
    stuck = ReplicaView("stuck", resident=frozenset("a"), refused=frozenset([BASE]))
    fleet = [stuck, ReplicaView("busy", in_flight=3)]
    assert rank(None, fleet, SETTINGS) == ["busy", "stuck"]
    assert rank("a", fleet, SETTINGS) == ["stuck", "busy"]


def test_measured_times_take_the_place_of_the_settings() -> None:
    measured = ReplicaView("r", in_flight=2, service_ms=7.0, load_ms_per_mib={"host": 0.5, "disk": 4.0})
    assert terms("a", measured, SETTINGS, mib=10)[:2] == (14.0, 40.0)
    assert (
        terms("a", ReplicaView("r", in_memory=frozenset("a"), load_ms_per_mib={"host": 0.5}), SETTINGS, mib=10)[1] == 5
    )
    assert terms("a", measured, SETTINGS).load_ms == SETTINGS.fetch_ms, "its size is not known"


def test_a_last_copy_costs_more_to_evict() -> None:
    full = ReplicaView("r", in_memory=frozenset("a"), resident=frozenset("x"), num_slots=1, num_slots_used=1)
    plain = terms("a", full, SETTINGS).load_ms
    assert terms("a", full, SETTINGS, only_last=True).load_ms == plain + SETTINGS.last_copy_ms
    redundant = ReplicaView("s", in_memory=frozenset("a"), resident=frozenset("y"), num_slots=1, num_slots_used=1)
    third = ReplicaView("t", resident=frozenset("y"), num_slots=9, num_slots_used=9, is_stalled=True)
    settings = PlacementSettings(without=["stray"])
    assert rank("a", [full, redundant, third], settings)[0] == "s"


def test_an_adapter_without_a_slot_goes_where_one_is_to_be_had() -> None:
    home, other = hash_order("a", ["r0", "r1"])
    slots: dict[str, Any] = {"num_slots": 4, "num_slots_used": 4}

    def first(busy_home: int, busy_other: int, **more: Any) -> str:
        view = ReplicaView(home, num_busy=busy_home, **slots, **{"in_flight": 3, **more})
        return rank("a", [view, ReplicaView(other, num_busy=busy_other, **slots)], SETTINGS)[0]

    assert first(3, 0) == home, "one is idle"
    assert first(4, 3) == other, "the home's are all at work"
    assert first(4, 5) == home, "so they are everywhere"
    assert first(6, 4) == other, "many wait there"
    assert first(9, 0, resident=frozenset("a")) == home, "it has one"
    assert first(9, 0, loading=frozenset("a")) == home, "it waits for one with others of its requests"
    in_memory: dict[str, Any] = {"in_memory": frozenset("a"), "load_ms_per_mib": {"host": 1.0, "disk": 1.0}}
    assert first(4, 3, hold_ms=1000.0, **in_memory) == home, "sooner there than its files are read elsewhere"
    assert first(4, 3, hold_ms=3000.0, **in_memory) == other
    as_much = [ReplicaView(home, 3, num_busy=4, **slots), ReplicaView(other, 3, num_busy=3, **slots)]
    assert rank("a", as_much, SETTINGS)[0] == home, "the other has as much to do"
    assert rank(None, [ReplicaView("r0", num_busy=9, **slots), ReplicaView("r1", 1, **slots)], SETTINGS)[0] == "r0"


def test_an_adapter_waits_for_a_part_of_what_a_request_takes_where_all_slots_are_busy() -> None:
    assert turnovers(0, 9) == 0, "nobody has told how many slots there are"
    assert [turnovers(4, busy) for busy in (3, 4, 5, 6, 8)] == [0, 0.25, 0.25, 0.75, 1.25]
    view = ReplicaView("r0", num_slots=4, num_slots_used=4, num_busy=5)
    settings = PlacementSettings(hold_ms=800.0, evict_ms=0.0, fetch_ms=30.0)
    assert terms("a", view, settings).load_ms == 30 + 200
    assert terms("a", replace(view, hold_ms=2000.0), settings).load_ms == 30 + 500
    assert terms(None, view, settings).load_ms == 0


def test_a_prompt_goes_where_its_prefix_is_while_that_pays() -> None:
    fleet = [ReplicaView("r0", in_flight=4), ReplicaView("r1", in_flight=0)]
    assert rank(None, fleet, SETTINGS, prefix_ms={"r1": 30.0})[0] == "r0"
    assert rank(None, fleet, SETTINGS, prefix_ms={"r1": 10.0})[0] == "r1"


@pytest.mark.parametrize("term", TERMS)
def test_each_term_can_be_switched_off_by_name(term: str) -> None:
    fleet = [
        ReplicaView("r0", 9, resident=frozenset("a"), num_slots=1, num_slots_used=1, loading=frozenset("z")),
        ReplicaView("r1", 2, resident=frozenset("b"), num_slots=1, num_slots_used=1, loading=frozenset("yz")),
        ReplicaView("r2", 3, in_memory=frozenset("c"), resident=frozenset("b"), num_slots=2, num_slots_used=2),
        ReplicaView("r3", 1, resident=frozenset("d"), num_slots=1, num_slots_used=1, num_busy=1),
    ]
    without = PlacementSettings(without=[term])

    def figures(settings: PlacementSettings) -> list[float | str]:
        views = [
            terms("c", view, settings, is_granted=is_granted, only_last=view.replica_id == "r3", prefix_ms=4.0)
            for view in fleet
            for is_granted in (False, True)
        ]
        return [load_cap(fleet, settings), *(view.cost(True) for view in views), *rank("c", fleet, settings)]

    assert figures(without) != figures(SETTINGS)


def test_a_term_of_another_name_cannot_be_switched_off() -> None:
    with pytest.raises(ValueError, match=r"'weight'.*it takes some of wait, load"):
        PlacementSettings(without=["weight"])


def test_switching_every_term_off_leaves_the_hash_order() -> None:
    off = PlacementSettings(without=TERMS)
    fleet = [ReplicaView(f"r{i}", in_flight=i, resident=frozenset("a" if i == 3 else "")) for i in range(5)]
    assert rank("a", fleet, off) == hash_order("a", [view.replica_id for view in fleet])


def test_a_new_replica_moves_only_its_own_share() -> None:
    adapters = [f"adapter-{i}" for i in range(3000)]
    before, after = [f"r{i}" for i in range(9)], [f"r{i}" for i in range(10)]
    owners = {a: hash_order(a, before)[0] for a in adapters}
    moved = [a for a in adapters if hash_order(a, after)[0] != owners[a]]
    assert {hash_order(a, after)[0] for a in moved} == {"r9"}
    # A tenth of 3000 is expected, with a standard deviation of 16.
    assert 220 < len(moved) < 380
    assert min(Counter(owners.values()).values()) > 3000 / 9 * 0.8
    for a in adapters[:100]:
        assert [r for r in hash_order(a, after) if r != "r9"] == hash_order(a, before)


def test_weights_are_the_same_in_every_process() -> None:
    script = "from cluster.rendezvous import weight; print(weight('adapter', 'replica'))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(other.stdout) == weight("adapter", "replica")


def test_names_do_not_run_into_one_another() -> None:
    assert weight("ab", "c") != weight("a", "bc")
    assert isinstance(weight("\udc80 lone surrogate", "r"), int)


@pytest.mark.parametrize(("key", "value"), [("load_cap", 0.5), ("wait_ms", -1), ("load_ms", float("nan"))])
def test_settings_that_cannot_work_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        PlacementSettings(**{key: value})  # type: ignore[arg-type]
