"""The routing policy, as pure functions."""

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import PlacementSettings, ReplicaView, hash_order, load_cap, rank, terms, weight

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


def test_the_cap_is_a_multiple_of_the_mean() -> None:
    fleet = [ReplicaView("r0", in_flight=9), ReplicaView("r1", in_flight=4), ReplicaView("r2", in_flight=4)]
    assert load_cap(fleet, SETTINGS) == 8
    assert load_cap(fleet, PlacementSettings(load_cap=0)) == float("inf")


def test_a_resident_replica_is_preferred_until_it_is_above_the_cap() -> None:
    def first(in_flight: int) -> str:
        fleet = [
            ReplicaView("holds", in_flight=in_flight, resident=frozenset("a"), in_memory=frozenset("a")),
            ReplicaView("idle", in_flight=6, in_memory=frozenset("a")),
        ]
        return rank("a", fleet, PlacementSettings(wait_ms=0.1))[0]

    # 12 against 6 in flight: the cap is 1.25 * 19 / 2, rounded up to 12.
    assert [first(n) for n in (0, 6, 11)] == ["holds"] * 3
    assert first(12) == "idle"


def test_where_the_queue_costs_more_than_a_load_the_adapter_gets_a_second_replica() -> None:
    fleet = [
        ReplicaView("holds", in_flight=20, resident=frozenset("a")),
        ReplicaView("idle", in_flight=15, in_memory=frozenset("a")),
    ]
    patient, hasty = PlacementSettings(wait_ms=1, load_cap=0), PlacementSettings(wait_ms=50, load_cap=0)
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


def test_a_second_new_adapter_avoids_the_replica_that_is_loading_the_first() -> None:
    ids = ["r0", "r1"]
    first = rank("one", [ReplicaView(r, num_slots=4) for r in ids], SETTINGS)[0]
    fleet = [ReplicaView(r, num_slots=4, loading=frozenset({"one"} if r == first else ())) for r in ids]
    assert {rank(f"new-{i}", fleet, SETTINGS)[0] for i in range(20)} == set(ids) - {first}


def test_switching_every_term_off_leaves_the_hash_order() -> None:
    off = PlacementSettings(load_cap=0, wait_ms=0, load_ms=0, fetch_ms=0, evict_ms=0)
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
    script = "from cluster.placement import weight; print(weight('adapter', 'replica'))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(other.stdout) == weight("adapter", "replica")


def test_names_do_not_run_into_one_another() -> None:
    assert weight("ab", "c") != weight("a", "bc")
    assert isinstance(weight("\udc80 lone surrogate", "r"), int)


@pytest.mark.parametrize(("key", "value"), [("load_cap", 0.5), ("wait_ms", -1), ("load_ms", float("nan"))])
def test_settings_that_cannot_work_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        PlacementSettings(**{key: value})
