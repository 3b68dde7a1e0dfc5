"""The plan of copies, as a pure function."""

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.copies import CopySettings, Host, Plan, plan
from cluster.rendezvous import hash_order

ADAPTERS = [f"a{i}" for i in range(30)]
HOSTS = [Host(f"r{i}", 8) for i in range(6)]
SETTINGS = CopySettings()


def zipf(number: int, exponent: float = 1.0) -> dict[str, float]:
    weights = [rank**-exponent for rank in range(1, number + 1)]
    return {f"a{i}": weight / sum(weights) for i, weight in enumerate(weights)}


def places(made: Plan) -> dict[str, tuple[str, ...]]:
    """Where each adapter's requests go."""
    return {name: made.slots.get(name) or (made.homes.get(name, first),) for name, first in made.firsts.items()}


def loads(made: Plan, shares: Mapping[str, float]) -> dict[str, float]:
    found = dict.fromkeys(made.replica_ids, 0.0)
    for name, ids in places(made).items():
        for replica_id in ids:
            found[replica_id] += shares.get(name, 0.0) / len(ids)
    return found


@st.composite
def hosts(draw: st.DrawFn) -> list[Host]:
    ids = draw(st.lists(st.sampled_from([f"r{i}" for i in range(8)]), max_size=8, unique=True))
    names = st.frozensets(st.sampled_from(ADAPTERS), max_size=5)
    return [
        Host(
            replica_id, draw(st.integers(0, 6)), resident=draw(names), refused=draw(names),
            speed=draw(st.sampled_from([0.5, 1.0])),
        )
        for replica_id in ids
    ]  # fmt: skip


@st.composite
def shares(draw: st.DrawFn) -> dict[str, float]:
    parts = draw(st.dictionaries(st.sampled_from(ADAPTERS), st.integers(0, 100), max_size=30))
    whole = sum(parts.values()) + draw(st.integers(0, 50))
    return {name: part / whole for name, part in parts.items()} if whole else {}


PERIODS = st.lists(st.tuples(shares(), hosts()), min_size=1, max_size=4)
MINIMA = st.dictionaries(st.sampled_from(ADAPTERS), st.integers(1, 9), max_size=3)
PARTS = (28, 36, 99, 31, 57, 62, 27, 10, 94)
PINS = st.frozensets(st.sampled_from(ADAPTERS), max_size=3)


@settings(max_examples=200, deadline=None)
@given(periods=PERIODS, min_copies=MINIMA, pinned=PINS)
def test_no_more_slots_are_promised_than_there_are_and_every_adapter_has_a_home(
    periods: list[tuple[dict[str, float], list[Host]]], min_copies: dict[str, int], pinned: frozenset[str]
) -> None:
    made = None
    for work, fleet in periods:
        made = plan(work, fleet, SETTINGS, made, min_copies=min_copies, pinned=pinned)
        by_id = {host.replica_id: host for host in fleet}
        assert made.replica_ids == tuple(sorted(by_id))
        promised = Counter(replica_id for ids in made.slots.values() for replica_id in ids)
        for replica_id, host in by_id.items():
            assert promised[replica_id] + min(len(pinned), host.num_slots) <= host.num_slots
            assert Counter(made.keep(replica_id)) == Counter(n for n, ids in made.slots.items() if replica_id in ids)
            assert set(made.warm(replica_id)) <= set(made.keep(replica_id))
            assert host.refused.isdisjoint(made.keep(replica_id))
        for name, ids in made.slots.items():
            assert len(set(ids)) == len(ids)
            assert name not in pinned
        for ids in made.routes().values():
            assert ids
            assert set(ids) <= by_id.keys()
        if fleet:
            assert {name for name, share in work.items() if share > 0} <= made.firsts.keys() | pinned
        for name, ids in places(made).items():
            serving = [host for host in fleet if name not in host.refused]
            assert not serving or set(ids) <= {host.replica_id for host in serving}


@settings(max_examples=50, deadline=None)
@given(work=shares(), fleet=hosts(), seed=st.integers(0, 9))
# Added up in another order, these shares have another sum in the last bit.
@example(
    work={f"a{i}": part / 444 for i, part in zip((0, 1, 2, 3, 6, 4, 5, 7, 8), PARTS, strict=True)},
    fleet=[Host(name, 0, speed=0.5) for name in ("r2", "r3", "r0")],
    seed=0,
)
def test_the_order_of_hosts_and_adapters_does_not_matter(work: dict[str, float], fleet: list[Host], seed: int) -> None:
    rng = random.Random(seed)
    shuffled = dict(rng.sample(list(work.items()), len(work)))
    assert plan(work, fleet).routes() == plan(shuffled, rng.sample(fleet, len(fleet))).routes()


@pytest.mark.parametrize("exponent", [0.0, 0.9, 1.5])
def test_the_work_is_balanced(exponent: float) -> None:
    work = zipf(600, exponent)
    made = plan(work, HOSTS)
    found = loads(made, work)
    assert sum(found.values()) == pytest.approx(1)
    assert max(found.values()) <= (1 + SETTINGS.tolerance) / len(HOSTS) + 1e-9


def test_slower_replicas_are_given_less() -> None:
    fleet = [dataclasses.replace(host, speed=0.5 if host.replica_id == "r0" else 1.0) for host in HOSTS]
    found = loads(plan(zipf(600), fleet), zipf(600))
    assert found["r0"] < 0.6 * found["r1"]


def test_an_adapter_is_at_home_where_its_name_says_unless_balance_needs_otherwise() -> None:
    work = zipf(600, 0.9)
    made = plan(work, HOSTS)
    homes = places(made)
    ids = [host.replica_id for host in HOSTS]
    moved = [name for name, where in homes.items() if where != (hash_order(name, ids)[0],)]
    assert set(made.routes()) == set(moved)
    assert 0 < len(moved) < 60
    assert {name: homes[name] for name in moved} == made.routes()


def test_a_hot_adapter_gets_copies_at_once_and_gives_them_back_after_quiet_periods() -> None:
    calm = dict.fromkeys(ADAPTERS, 1 / 30)
    hot = {**dict.fromkeys(ADAPTERS, 0.5 / 29), "a0": 0.5}
    made = plan(hot, HOSTS, SETTINGS, plan(calm, HOSTS))
    # Half of the work of six replicas, with headroom.
    assert len(made.slots["a0"]) == 4
    for period in range(1, 2 * SETTINGS.quiet_periods):
        made = plan(calm, HOSTS, SETTINGS, made)
        assert len(made.slots["a0"]) == (4 if period < SETTINGS.quiet_periods else 1)
    once_more = plan(hot, HOSTS, SETTINGS, made)
    assert set(made.slots["a0"]) <= set(once_more.slots["a0"]), "what it has stays"


def test_what_changes_in_a_period_is_bounded() -> None:
    before = plan(zipf(200), HOSTS)
    others = {f"b{i}": share for i, share in enumerate(zipf(200).values())}
    made = plan({**others, **dict.fromkeys(zipf(200), 1e-9)}, HOSTS, SETTINGS, before)
    new = [(name, replica_id) for name, ids in made.slots.items() for replica_id in ids]
    new = [pair for pair in new if pair[1] not in before.slots.get(pair[0], ())]
    assert 0 < len(new) <= SETTINGS.churn * 48
    resident = [dataclasses.replace(host, resident=frozenset(others)) for host in HOSTS]
    free = plan({**others, **dict.fromkeys(zipf(200), 1e-9)}, resident, SETTINGS, before)
    assert sum(map(len, free.slots.values())) > len(new), "a promise of a slot that an adapter has costs no load"


def test_the_same_work_again_changes_nothing() -> None:
    work = zipf(300, 0.9)
    made = plan(work, HOSTS)
    for _ in range(4):
        again = plan(work, HOSTS, SETTINGS, made)
        assert again.routes() == made.routes()
        assert again.slots == made.slots
        made = again


def test_work_that_shifts_a_little_moves_little() -> None:
    work, rng = zipf(300, 0.9), random.Random(0)
    made = plan(work, HOSTS)
    for _ in range(5):
        shifted = {name: share * rng.uniform(0.95, 1.05) for name, share in work.items()}
        again = plan(shifted, HOSTS, SETTINGS, made)
        moved = sum(places(again)[name] != where for name, where in places(made).items())
        assert moved <= 0.05 * 300
        made = again


@pytest.mark.parametrize("exponent", [0.0, 0.9])
def test_a_new_replica_takes_about_its_share_and_little_else_moves(exponent: float) -> None:
    work = zipf(900, exponent)
    before = plan(work, HOSTS)
    made = plan(work, [*HOSTS, Host("r6", 8)], dataclasses.replace(SETTINGS, churn=9.0), before)
    was, now = places(before), places(made)
    single = [name for name in work if len(was[name]) == len(now[name]) == 1]
    to_new = sum(work[name] for name in single if now[name] == ("r6",))
    elsewhere = sum(work[name] for name in single if now[name] != was[name] and now[name] != ("r6",))
    assert to_new <= (1 + SETTINGS.tolerance) / 7
    assert elsewhere < 0.03
    assert loads(made, work)["r6"] == pytest.approx(1 / 7, rel=0.1)


def test_a_replica_that_leaves_moves_only_what_it_had() -> None:
    work = zipf(600, 0.9)
    before = plan(work, HOSTS)
    made = plan(work, HOSTS[:-1], dataclasses.replace(SETTINGS, churn=9.0), before)
    was, now = places(before), places(made)
    moved = sum(work[name] for name in work if "r5" not in was[name] and now[name] != was[name])
    assert moved < 0.04
    assert max(loads(made, work).values()) <= 1.05 / 5


def test_least_copies_come_first_and_idle_adapters_get_them_too() -> None:
    made = plan(zipf(600), HOSTS, min_copies={"idle": 3, "a500": 99})
    assert len(made.slots["idle"]) == 3
    assert len(made.slots["a500"]) == len(HOSTS)
    assert "idle" in made.keep(made.slots["idle"][0])
    assert made.slots["idle"][0] == hash_order("idle", [host.replica_id for host in HOSTS])[0]


def test_pinned_adapters_are_everywhere_and_their_slots_are_not_promised() -> None:
    made = plan(zipf(200, 0.0), HOSTS, CopySettings(reserve=0.0, worth=0.0), pinned={"a0", "a1"})
    assert made.routes()["a0"] == made.replica_ids
    assert max(len(made.keep(host.replica_id)) for host in HOSTS) == 6


def test_slots_are_held_back_for_the_unpopular_only_where_there_are_not_enough_for_all() -> None:
    scarce, enough = plan(zipf(400, 0.0), HOSTS, CopySettings(worth=0.0)), plan(zipf(30, 0.0), HOSTS)
    assert max(len(scarce.keep(host.replica_id)) for host in HOSTS) == 6
    assert len(enough.slots) >= 27
    assert max(loads(enough, zipf(30, 0.0)).values()) <= 6 / 30 + 1e-9


def test_where_slots_are_enough_for_all_each_has_one_wherever_its_name_says() -> None:
    number = sum(host.num_slots for host in HOSTS)
    by_name = Counter(hash_order(f"a{i}", [host.replica_id for host in HOSTS])[0] for i in range(number))
    assert max(by_name.values()) > HOSTS[0].num_slots, "by their names, more than fit"
    made = plan(zipf(number, 0.0), HOSTS, SETTINGS)
    assert all(len(ids) == 1 for ids in made.slots.values())
    assert len(made.slots) == number


def test_after_a_restart_what_is_in_slots_stays_there() -> None:
    work = zipf(300, 0.9)
    made = plan(work, HOSTS)
    resident = [dataclasses.replace(host, resident=frozenset(made.keep(host.replica_id))) for host in HOSTS]
    again = plan(work, resident)
    kept = sum(again.slots.get(name) == ids for name, ids in made.slots.items() if len(ids) == 1)
    assert kept >= 0.9 * len(made.slots)
    assert sum(len(again.warm(host.replica_id)) for host in HOSTS) <= 0.3 * len(made.slots)


def test_a_new_promise_is_brought_in_ahead_and_an_old_one_comes_back_with_its_requests() -> None:
    work = zipf(100, 0.5)
    made = plan(work, HOSTS)
    assert set(made.warm("r0")) == set(made.keep("r0"))
    for _ in range(SETTINGS.quiet_periods):
        made = plan(work, HOSTS, SETTINGS, made)
    assert [name for name in made.warm("r0") if len(made.slots[name]) == 1] == []
    grown = plan(work, [*HOSTS, Host("r6", 8)], SETTINGS, made)
    assert grown.warm("r6") == grown.keep("r6") != ()


def test_without_replicas_work_or_slots_there_is_nothing_to_plan() -> None:
    assert plan({"a": 1.0}, []) == Plan()
    assert plan({}, HOSTS).routes() == {}
    made = plan({"a": 0.5, "b": 0.0}, [Host("r0", 0), Host("r1", 0)])
    assert (made.slots, made.keep("r0"), made.keep("unknown")) == ({}, (), ())
    assert set(made.firsts) == {"a"}


@pytest.mark.parametrize(
    ("key", "value"),
    [("headroom", 0.5), ("quiet_periods", 0), ("reserve", 1.0), ("churn", -1), ("worth", float("nan"))],
)
def test_settings_that_cannot_work_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        CopySettings(**{key: value})  # type: ignore[arg-type]
